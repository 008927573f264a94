"""Probes whether the router reaches its nodes, so that no client's request has to find out.
Heartbeats with answers show that node and router hear each other, but not that the node's own port
is open.

A node with an open connection is probed from time to time. One answer may be missing: the node is
probed again at once. A node with a broken connection, or with two missing answers, is probed in
every period. Probes are spread over time: a thousand at once would block the event loop.
"""

from __future__ import annotations

import asyncio
import random

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.common.rpc.channels import Channels
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.node_client import is_connected
from pdserve.router.cluster.registry import Registry

PROBE_TIMEOUT = 2.0  # seconds
LONGEST_PERIOD = 1.0  # seconds between two looks at a node
QUIET = 0.6  # of --heartbeat-timeout, that a node with a connection is left alone
SPREAD = 0.8, 1.0  # of that
_TICKS = 8  # in a period


async def probe_nodes(registry: Registry, channels: Channels, heartbeat_timeout: float) -> None:
    """Looks after every node; only whether it answers matters. Never returns."""
    period = min(LONGEST_PERIOD, heartbeat_timeout / 4)
    async with asyncio.TaskGroup() as group:
        while True:
            now = registry.now()
            for node in registry.connected():
                if now >= node.look_at and not node.probing:
                    node.look_at = now + period
                    if is_due(node, now, channels, heartbeat_timeout):
                        node.probing = True
                        group.create_task(_probe(node, registry, channels))
            await asyncio.sleep(period / _TICKS)


def is_due(node: Node, now: float, channels: Channels, heartbeat_timeout: float) -> bool:
    """Returns whether to ask the node now."""
    if node.unreachable or not is_connected(channels.get(node.info.address)):
        return True
    return now - node.last_answer >= QUIET * heartbeat_timeout * random.uniform(*SPREAD)


async def _probe(node: Node, registry: Registry, channels: Channels) -> None:
    stub = health_pb2_grpc.HealthStub(channels.get(node.info.address))
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        code = error.code()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            refused = code is grpc.StatusCode.UNAVAILABLE
            registry.unanswered(node, error.details() or code.name, refused)
            if node.missed == 1:
                node.look_at = 0.0  # again, now: one answer may be missing
            return
    finally:
        node.probing = False
    registry.answered(node)
