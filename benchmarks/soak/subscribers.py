"""A flood of subscriptions and connections at the ports of KV events."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from benchmarks.access import Access
from benchmarks.soak.attack import Attack, NotNow, Wait, at_grpc, nodes_of

SUBSCRIPTIONS = 60_000  # of one subscriber
SILENT = 500  # connections beside it


async def subscribers(attack: Attack) -> None:
    """Subscribes to 60,000 topics at each port of a node that is neither gRPC nor metrics, those
    of KV events among them, and opens 500 silent connections there. The node must go on."""
    node = attack.random.choice(await nodes_of(attack.fleet))
    if not (ports := await asyncio.to_thread(kv_ports, attack.fleet, node)):
        raise NotNow
    look = at_grpc(attack.fleet, node["address"])
    await asyncio.gather(
        *(attack.ask("port", partial(_flood, port, attack.seconds), look) for port in ports)
    )


async def _flood(port: tuple[str, int], seconds: float, wait: Wait) -> str:
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        subscriber = stack.enter_context(context.socket(zmq.SUB))
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.connect("tcp://{}:{}".format(*port))
        await asyncio.to_thread(_subscribe, subscriber)
        for _ in range(SILENT):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(port)
        await wait.rest(seconds)
    return "flooded"


def _subscribe(subscriber: zmq.Socket[Any]) -> None:
    for number in range(SUBSCRIPTIONS):
        subscriber.setsockopt(zmq.SUBSCRIBE, b"%d" % number)


def kv_ports(fleet: Access, node: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns the ports at which a one-process node listens for KV, and for subscribers of KV
    events: all but its known ones."""
    try:
        known = {node[name].rpartition(":")[2] for name in ("address", "metrics_address")}
        process = Path(f"/proc/{fleet.pids[node['name']]}")
        inodes = {_target(each) for each in (process / "fd").iterdir()}
        lines = (process / "net/tcp").read_text().splitlines()[1:]
    except (OSError, KeyError):
        return []
    rows = (line.split() for line in lines)
    mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    found = [
        (_host(host, node), int(port, 16)) for host, port in (each.split(":") for each in mine)
    ]
    return [place for place in found if str(place[1]) not in known]


def _target(descriptor: Path) -> str:
    """Returns what it is; empty if it was closed meanwhile."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def _host(hexadecimal: str, node: dict[str, Any]) -> str:
    """Returns the address of a line of /proc/net/tcp; for all addresses, the node's."""
    host = socket.inet_ntoa(bytes.fromhex(hexadecimal)[::-1])
    return str(node["address"].rpartition(":")[0]) if host == "0.0.0.0" else host
