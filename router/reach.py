"""Whether nodes answer this router. Heartbeats show the way from a node to here; a name that no
longer resolves or a one-way cut shows only on the way there, which is tried here all the time, so
that no client's request has to find out."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.common.rpc.server import Channels
from pdserve.router.registry import Node, Registry

ASK_TIMEOUT = 2.0  # seconds


async def watch(registry: Registry, channels: Channels, period: float) -> None:
    """Asks every node for its health, for ever; what it answers does not matter here."""
    while True:
        async with asyncio.TaskGroup() as group:
            for node in registry.in_use():
                group.create_task(_ask(node, registry, channels))
        await asyncio.sleep(period)


async def _ask(node: Node, registry: Registry, channels: Channels) -> None:
    stub = health_pb2_grpc.HealthStub(channels.get(node.info.address))
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=ASK_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        code = error.code()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            refused = code is grpc.StatusCode.UNAVAILABLE
            registry.unanswered(node, error.details() or code.name, refused)
            return
    registry.answered(node)
