"""The router asks nodes for their health: how often, and when it takes silence for an answer."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pdserve.common.config.router import RoutingConfig
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster import probes
from pdserve.router.cluster.probes import probe_nodes
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.registry_service import RegistryService
from waiting import eventually

TIMEOUT = 2.0
FOR_EVER = 600.0


class Asked:
    """A node's health service, which notes how often it is asked and may keep silent."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.silent = False
        self.server = grpc.aio.server()
        check = grpc.unary_unary_rpc_method_handler(self._check, None, None)
        handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
        self.server.add_generic_rpc_handlers((handler,))

    async def start(self) -> str:
        """Returns the address."""
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def _check(self, _: bytes, __: Any) -> bytes:
        self.moments.append(monotonic())
        if self.silent:
            await asyncio.Event().wait()
        return health_pb2.HealthCheckResponse(status=1).SerializeToString()


@asynccontextmanager
async def probed(address: str, timeout: float) -> AsyncIterator[Registry]:
    registry, channels = Registry(RoutingConfig(heartbeat_timeout=timeout)), Channels()
    node = pb.NodeInfo(node_id="d0", role=pb.ROLE_DECODE, address=address)
    registry.register(node, pb.NodeLoad(healthy=True))
    tasks = [
        asyncio.create_task(each)
        for each in (registry.clock.run(), probe_nodes(registry, channels, timeout))
    ]
    try:
        yield registry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await channels.close()


async def test_a_node_that_answers_is_asked_rarely_and_one_that_does_not_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That one answer is missing is nothing yet."""
    monkeypatch.setattr(probes, "PROBE_TIMEOUT", 30.0)  # no answer is missing: they are only late
    node = Asked()
    async with probed(await node.start(), TIMEOUT) as registry:
        (known,) = registry.nodes()
        await eventually(lambda: len(node.moments) >= 3)
        assert not known.unreachable
        quiet = probes.QUIET * TIMEOUT * probes.SPREAD[0]
        assert node.moments[2] - node.moments[1] > 0.9 * quiet
        monkeypatch.setattr(probes, "PROBE_TIMEOUT", 0.5)
        node.silent = True
        last = known.last_answer
        await eventually(lambda: known.unreachable)
        assert registry.now() - last > TIMEOUT, "not for one missing answer"
        assert len(node.moments) >= 5
        node.silent = False
        await eventually(lambda: not known.unreachable)
    await node.server.stop(0)


async def test_a_node_whose_connection_ends_is_left_without_waiting() -> None:
    node = Asked()
    async with probed(await node.start(), FOR_EVER) as registry:
        await eventually(lambda: node.moments)
        await node.server.stop(0)
        await eventually(lambda: registry.nodes()[0].unreachable)


async def test_nodes_that_are_not_there_are_noticed_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens
        async with probed(f"127.0.0.1:{taken.getsockname()[1]}", FOR_EVER) as registry:
            await eventually(lambda: registry.nodes()[0].unreachable)


async def test_many_nodes_send_heartbeats_more_rarely_but_often_enough() -> None:
    routing = RoutingConfig(heartbeat_interval=0.5, heartbeat_timeout=5.0)
    registry = Registry(routing)
    service = RegistryService(registry, "m", routing)
    found = []

    async def beat() -> AsyncIterator[pb.HeartbeatRequest]:
        yield pb.HeartbeatRequest(node_id="d0")

    for number in range(1024):
        node = pb.NodeInfo(node_id=f"d{number}", role=pb.ROLE_DECODE, address=f"h{number}:1")
        registry.register(node, pb.NodeLoad(healthy=True))
        (answer,) = [each async for each in service.Heartbeats(beat(), None)]
        assert answer.known
        found.append(answer.heartbeat_interval_s)
    assert found[0] == found[249] == 0.5
    assert found[499] == 1.0 and max(found) == found[999] == 2.0


async def test_probes_of_many_nodes_are_spread_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that came at the same moment are not asked at the same moment for long."""
    now, asked = 100.0, []
    monkeypatch.setattr(random, "uniform", random.Random(0).uniform)
    registry, channels = Registry(RoutingConfig(), lambda: now), Channels()
    monkeypatch.setattr(probes, "is_connected", lambda channel: True)
    for number in range(100):
        node = pb.NodeInfo(node_id=f"d{number}", role=pb.ROLE_DECODE, address=f"h{number}:1")
        registry.register(node, pb.NodeLoad(healthy=True))
    rounds = round(3 * probes.QUIET * 5.0 / 0.125)
    for _ in range(rounds):
        now += 0.125
        due = [each for each in registry.nodes() if probes.is_due(each, now, channels, 5.0)]
        for node in due:
            node.last_answer = now
        asked.append(len(due))
    once = rounds // 3
    assert max(asked[:once]) > max(asked[-once:]), asked
    assert sum(asked[-once:]) >= 100, "each is asked in that time"
    await channels.close()
