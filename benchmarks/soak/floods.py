"""Attacks on the servers: floods, decompression bombs, and input that no parser expects. Most come
without a key."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from benchmarks.fleet import Fleet
from benchmarks.soak.crowd import UNEXPLAINED, burst
from benchmarks.soak.faults import Fault, Faults, Kind, NotNow
from benchmarks.soak.hostile import (
    ADDRESS,
    MB,
    PATIENCE,
    TEXT,
    answer,
    calls,
    http,
)

BOMBS = 8  # bodies at a time
BOMB_MB = 1024  # megabytes of zeros in one megabyte of body
FLOODS = 12  # messages at a time
MAX_TAKEN = 128 * 2**10  # most bytes read of each, with TLS and HTTP/2 overhead
MAX_READ = 2**18  # more bytes for a method that the clients' port reads: a health request
SILENT = 1300  # connections to a port
GREEDY, GREEDY_CHOICES = 40, 4  # requests at a time, and choices of each
LONGEST_GREED = 10.0  # seconds
LONGEST_IDLE = 8.0
TAKEN = "taken"  # an outcome that should have been a refusal: a failure

# ---- decompression bombs ----


@cache
def _bomb() -> bytes:
    """Returns a zlib stream of zeros: one compressed block, repeated; after a full flush each copy
    decompresses independently."""
    packer = zlib.compressobj(9)
    first = packer.compress(bytes(MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + block * (BOMB_MB - 1)


def _bombs() -> dict[str, tuple[str, str, str]]:
    """Returns reason for a refusal → (method, path, headers)."""
    json_type = "Content-Type: application/json\r\n"
    return {
        "no key": ("POST", TEXT, json_type),
        "no such path": ("POST", "/nowhere", json_type),
        "no such method": ("PUT", TEXT, json_type),
        "another type": ("POST", TEXT, "Content-Type: text/plain\r\n"),
        "health": ("GET", "/health", ""),
        "metrics": ("GET", "/metrics", ""),
    }


async def bomb(faults: Faults, fault: Fault) -> None:
    """Sends eight bodies of one megabyte that decompress to a gigabyte, to the router or a node's
    metrics port, and keeps the connections open after the answers."""
    rng, fleet = fault.random, faults.fleet
    ways = [rng.choice(list(_bombs().items())) for _ in range(BOMBS)]
    ports = [("127.0.0.1", fleet.ports["http"]), *_metrics_ports(await _nodes(fleet))]
    attacks = [(name, _explode(rng.choice(ports), way, fault.seconds)) for name, way in ways]
    await _note(faults, "bomb", attacks)


async def _explode(port: tuple[str, int], way: tuple[str, str, str], seconds: float) -> str:
    method, path, headers = way
    body = _bomb()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Encoding: deflate\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await _open(port)
    try:
        writer.write(head.encode() + body)
        line = (await reader.readline()).decode(errors="replace").split()
        await asyncio.sleep(seconds)
        return line[1] if len(line) > 1 else "closed"
    finally:
        writer.transport.abort()


# ---- floods without a key ----


async def grpc_flood(faults: Faults, fault: Fault) -> None:
    """Sends twelve large messages without a key: to the clients' port, and to reflection and health
    at the registry and the nodes. The server must not read more of each than a flow-control
    window."""
    rng, fleet = fault.random, faults.fleet
    clients, registry = f"127.0.0.1:{fleet.ports['grpc']}", fleet.registry
    nodes = [node["address"] for node in await _nodes(fleet)]
    size = rng.choice((MB // 5, 30 * MB, 60 * MB))
    ways = {
        "Generate": (clients, "/pdserve.v1.Inference/Generate"),
        "reflection": (
            rng.choice((registry, *nodes)),
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ),
        "health": (rng.choice((clients, registry, *nodes)), "/grpc.health.v1.Health/Check"),
    }
    name = rng.choice(list(ways))
    reads = name == "health" and ways[name][0] == clients
    most = MAX_TAKEN + MAX_READ * reads
    await _note(faults, "grpc-flood", [(name, _flood(fleet, *ways[name], size, most))])


async def _flood(fleet: Fleet, address: str, method: str, size: int, most: int) -> str:
    # An unknown field, which every protobuf parser has to accept.
    message = b"\xfa\x7f" + _varint(size) + bytes(size)

    async def one(channel: grpc.aio.Channel) -> str:
        call = channel.stream_stream(method)(iter([message]), timeout=PATIENCE)
        is_told = await call.read() is not grpc.aio.EOF
        return "told" if is_told else (await call.code()).name

    async with _counting(address) as (near, sent), calls(fleet, near, name=address) as channel:
        told = {*await asyncio.gather(*(answer(one(channel)) for _ in range(FLOODS)))}
    if UNEXPLAINED in told:
        return UNEXPLAINED
    return TAKEN if sum(sent) > FLOODS * most else ", ".join(sorted(told))


@asynccontextmanager
async def _counting(address: str) -> AsyncIterator[tuple[str, list[int]]]:
    """Relays to `address`; yields the relay's address and the sizes of data sent through it."""
    sent: list[int] = []
    pumps: list[asyncio.Task[None]] = []

    async def join(*near: Any) -> None:
        with suppress(OSError):
            far = await _open(_split(address))
            pumps.append(asyncio.create_task(_pump(near[0], far[1], sent)))
            pumps.append(asyncio.create_task(_pump(far[0], near[1], [])))

    server = await asyncio.start_server(join, "127.0.0.1", 0, limit=2**14)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", sent
    finally:
        server.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: list[int]
) -> None:
    try:
        with suppress(OSError):
            while data := await reader.read(2**14):
                writer.write(data)
                await writer.drain()
                sent.append(len(data))
    finally:
        writer.transport.abort()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


# ---- floods with a key ----


async def greedy(faults: Faults, fault: Fault) -> None:
    """Keeps forty requests of four choices in flight; the requests of other clients must not wait
    for them."""
    with faults.greed.lasting(), faults.crowds.lasting():
        async with http(faults.fleet) as session:
            end = asyncio.get_running_loop().time() + fault.seconds
            body = {"prompt": [7] * 40, "max_tokens": 48, "n": GREEDY_CHOICES, "ignore_eos": True}

            async def ask_on() -> None:
                while asyncio.get_running_loop().time() < end:
                    async with session.post(TEXT, json=body) as response:
                        await response.read()

            told = await asyncio.gather(*(answer(_said(ask_on())) for _ in range(GREEDY)))
    faults.answers.update(("greedy", f"client: {words}") for words in told)


async def _said(work: Awaitable[None]) -> str:
    await work
    return "answered or refused"


# ---- silent connections ----


async def idle(faults: Faults, fault: Fault) -> None:
    """Opens 1,300 silent connections to a port of the router or of a node."""
    rng, fleet = fault.random, faults.fleet
    node = rng.choice(await _nodes(fleet))
    ports: dict[str, tuple[str, int]] = {
        "HTTP": ("127.0.0.1", fleet.ports["http"]),
        "gRPC": ("127.0.0.1", fleet.ports["grpc"]),
        "registry": ("127.0.0.1", fleet.ports["registry"]),
        "a node's gRPC": _split(node["address"]),
        "a node's metrics": _split(node["metrics_address"]),
    }
    if node["name"] in fleet.pids and (kv := await asyncio.to_thread(_kv_ports, fleet, node)):
        ports["a node's KV"] = rng.choice(kv)
    name = rng.choice(list(ports))
    with faults.crowds.lasting():
        await _note(faults, "idle", [(name, _stay(ports[name], fault.seconds))])


async def _stay(port: tuple[str, int], seconds: float) -> str:
    """Returns whether most connections were closed by the time this client left. A frozen process
    accepts as many as the kernel's queue holds, and the rest wait: that counts as an answer."""
    sockets: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        for _ in range(SILENT):
            one = socket.socket()
            one.setblocking(False)
            sockets.append(one)
        dials = (loop.sock_connect(one, port) for one in sockets)
        try:
            async with asyncio.timeout(seconds + 5):
                await asyncio.gather(*dials, return_exceptions=True)
        except TimeoutError:
            return "the queue of the port was full"
        await asyncio.sleep(seconds)
        closed = sum(_is_closed(one) for one in sockets)
        return "most were closed" if closed > SILENT / 2 else "most stayed open"
    finally:
        for one in sockets:
            one.close()


def _is_closed(one: socket.socket) -> bool:
    try:
        while one.recv(4096):  # HTTP/2 servers send first
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _kv_ports(fleet: Fleet, node: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns the ports at which a one-process node listens for KV: all but its known ones."""
    try:
        known = {_split(node[name])[1] for name in ("address", "metrics_address")}
        process = Path(f"/proc/{fleet.pids[node['name']]}")
        inodes = {os.readlink(each) for each in (process / "fd").iterdir()}
        lines = (process / "net/tcp").read_text().splitlines()[1:]
    except (OSError, KeyError):
        return []
    rows = (line.split() for line in lines)
    mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    found = [
        (socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(number, 16))
        for host, number in (local.split(":") for local in mine)
    ]
    return [place for place in found if place[1] not in known]


# ---- unexpected input ----

HALF = "\\ud800"  # of a surrogate pair, as JSON writes it
DEEP = 20_000


def _odd() -> dict[str, str]:
    tool = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
    user = '{"role": "user", "content": "x"}'
    call = (
        '{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": '
        '{"name": "f", "arguments": "%s"}}]}, {"role": "tool", "tool_call_id": "1", "content": "x"}'
    )
    nested = "[" * DEEP + "]" * DEEP
    return {
        "half a surrogate": _chat(f"{user}, {call % (HALF * 3)}"),
        "half a surrogate, escaped": _chat(f"{user}, {call % ('{' + chr(92) * 2 + 'ud800')}"),
        "deep arguments": _chat(f"{user}, {call % nested}"),
        "wide arguments": _chat(f"{user}, {call % ('[' + '[],' * 300_000 + '[]]')}"),
        "a schema of huge numbers": _chat(user, tool % f'{{"maximum": {10**400}}}'),
        "a schema with half a surrogate": _chat(user, tool % f'{{"{HALF}": "{HALF}"}}'),
        "a large schema": _chat(user, tool % f'{{"enum": ["{HALF}", "{"x" * 100_000}"]}}'),
        "a deep schema": _chat(user, tool % ('{"not":' * DEEP + "{}" + "}" * DEEP)),
    }


def _chat(messages: str, tool: str = "") -> str:
    tools = f', "tools": [{tool}]' if tool else ""
    return f'{{"max_tokens": 2, "messages": [{messages}]{tools}}}'


async def odd(faults: Faults, fault: Fault) -> None:
    """Sends strings and schemas that are valid JSON but unusual; none may give a 500."""
    rng = fault.random
    name, body = rng.choice(list(_odd().items()))
    async with http(faults.fleet) as session:
        headers = {"Content-Type": "application/json"}

        async def ask() -> str:
            path = "/v1/chat/completions"
            async with session.post(path, data=body.encode(), headers=headers) as response:
                await response.read()
                return UNEXPLAINED if response.status == 500 else str(response.status)

        faults.answers["odd", f"{name}: {await answer(ask())}"] += 1


async def foreign(faults: Faults, fault: Fault) -> None:
    """Sends requests as a browser sends them for a page of another origin: without a key, and with
    a content type that needs no preflight."""
    path = fault.random.choice((TEXT, "/reset_prefix_cache", "/v1/load_lora_adapter"))
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    if fault.random.random() < 0.5:
        del headers["Content-Type"]
    async with http(faults.fleet, known=False) as session:
        data = json.dumps({"prompt": [5], "max_tokens": 1}).encode()

        async def ask() -> str:
            async with session.post(
                path, data=data, headers=headers, skip_auto_headers=("Content-Type",)
            ) as response:
                await response.read()
                return TAKEN if response.status == 200 else str(response.status)

        faults.answers["foreign", f"{path}: {await answer(ask())}"] += 1


# ---- shared code ----


async def _note(faults: Faults, kind: str, attacks: Sequence[tuple[str, Awaitable[str]]]) -> None:
    told = await asyncio.gather(*(answer(attack) for _, attack in attacks))
    for (name, _), words in zip(attacks, told, strict=True):
        faults.answers[kind, f"{name}: {words}"] += 1


async def _nodes(fleet: Fleet) -> list[dict[str, Any]]:
    """Returns the nodes in `/v1/cluster`. Raises NotNow."""
    try:
        nodes: list[dict[str, Any]] = (await asyncio.to_thread(fleet.state))["nodes"]
    except OSError:
        raise NotNow from None
    if not (ours := [node for node in nodes if node["name"]]):
        raise NotNow
    return ours


def _metrics_ports(nodes: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    return [_split(node["metrics_address"]) for node in nodes]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def _open(port: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    local = (ADDRESS, 0) if port[0].startswith("127.") else None
    return await asyncio.open_connection(*port, local_addr=local)


FLOOD_KINDS: dict[str, Kind] = {
    "bomb": Kind(bomb, ("client",)),
    "grpc-flood": Kind(grpc_flood, ("client",)),
    "burst": Kind(burst, ("client",), weight=0.25),  # takes seconds of the router's time
    "greedy": Kind(greedy, ("client",), LONGEST_GREED, weight=0.5),
    "idle": Kind(idle, ("client",), LONGEST_IDLE),
    "odd": Kind(odd, ("client",)),
    "foreign": Kind(foreign, ("client",)),
}
