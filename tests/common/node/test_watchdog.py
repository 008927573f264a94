"""When a node says that it could not produce a token, and when it can again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from clock import Clock
from live_node import Gate, decode_node, eventually, generate
from pdserve.common.core.errors import Blame, NodeError, TransferError
from pdserve.common.engine.core import EngineProgress
from pdserve.common.node.replica import Watchdog
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.server import GrpcServer
from pdserve.common.rpc.status import serving
from pdserve.decode_node.node import DecodeNode
from pdserve.decode_node.session import DecodeSession
from pdserve.kv_transfer.control.sink_client import (
    FORGET_AFTER,
    DecodePeers,
    SinkClient,
    why_unreachable,
)

IDLE = EngineProgress(
    step=0, computing=False, call=None, admitted=0, freed=0, waiting=0, remote=0, needed_blocks=0,
    free_blocks=8, total_blocks=8,
)  # fmt: skip


QUEUED = replace(IDLE, waiting=2, needed_blocks=5, free_blocks=3)


class Watched:
    """A watchdog of 20 seconds, and the clock that it goes by."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.watchdog = Watchdog(20.0, self.clock)

    def after(self, seconds: float, work: EngineProgress) -> str:
        self.clock.time += seconds
        self.watchdog.check(work)
        return self.watchdog.reason


def test_a_rank_that_stands_still_for_good_is_given_up() -> None:
    watched = Watched()
    still = replace(IDLE, call=(1, 1))
    while not watched.watchdog.stalled:
        watched.after(4.0, still)
    for _ in range(8):
        watched.after(4.0, still)
        assert watched.watchdog.stalled and not watched.watchdog.hopeless
    watched.after(4.0, still)
    assert watched.watchdog.hopeless
    watched.after(4.0, IDLE)
    assert not watched.watchdog.hopeless


def test_a_host_that_stood_still_gives_no_rank_up() -> None:
    watched = Watched()
    watched.after(1.0, replace(IDLE, call=(1, 1)))
    watched.after(10_000.0, replace(IDLE, call=(1, 1)))
    assert not watched.watchdog.hopeless


# ---- the engine -----------------------------------------------------------------------------


def test_a_step_that_does_not_return_and_then_does() -> None:
    watched, computing = Watched(), replace(IDLE, step=7, computing=True)
    watched.after(100, IDLE)
    assert not watched.after(1, computing)
    assert not watched.after(19.9, computing)
    assert watched.after(0.2, computing) == "step 7 has been running for 20.1 s"
    assert watched.watchdog.stalled
    assert watched.after(5, computing) == "step 7 has been running for 25.1 s"
    assert not watched.after(1, replace(computing, computing=False))
    assert not watched.watchdog.stalled


def test_a_rank_that_does_not_answer_and_then_does() -> None:
    watched = Watched()
    watched.after(0, replace(IDLE, call=(1, 0)))
    watched.after(19, replace(IDLE, call=(2, 1)))  # the first was answered
    steps = (replace(IDLE, step=step, computing=True, call=(2, 1)) for step in range(5))
    reasons = [watched.after(6, work) for work in steps]  # steps do not hide it
    assert reasons[2:] == ["", *(f"rank 1 has not answered a call for {s}.0 s" for s in (24, 30))]
    assert watched.watchdog.stalled
    assert not watched.after(1, IDLE)
    assert not watched.watchdog.stalled


def test_a_queue_that_stands_still_and_then_moves() -> None:
    watched = Watched()
    assert not watched.after(0, QUEUED)
    assert not watched.after(19, replace(QUEUED, waiting=7))
    reason = watched.after(2, replace(QUEUED, waiting=9))  # arrivals are no progress
    assert reason == (
        "KV memory exhausted: nothing was admitted, computed or freed for 21.0 s; the first of 9 "
        "waiting sequences needs 5 blocks, 3 of 8 are free"
    )
    assert not watched.watchdog.stalled, "no session has to move elsewhere"
    assert not watched.after(1, replace(QUEUED, admitted=1, waiting=8))
    assert not watched.after(10, IDLE)
    assert not watched.after(1000, IDLE), "idle time does not count"
    assert not watched.after(10, QUEUED)


@pytest.mark.parametrize("progress", ["step", "admitted", "freed"])
def test_a_queue_behind_a_busy_engine_is_no_ailment(progress: str) -> None:
    watched = Watched()
    for count in range(5):
        assert not watched.after(19, replace(QUEUED, **{progress: count}))


def test_a_queue_behind_kv_that_is_on_its_way_is_no_ailment() -> None:
    """An idle decode node whose blocks are reserved for a prompt that takes minutes."""
    watched, reserved = Watched(), replace(QUEUED, remote=3)
    watched.after(0, reserved)
    assert not any(watched.after(19, reserved) for _ in range(20))
    assert not watched.after(1, replace(reserved, freed=5, remote=2)), "a lease has lapsed"
    assert not watched.after(1000, replace(reserved, freed=5, remote=2))
    left = replace(QUEUED, freed=9)  # none is under way, and still nothing moves
    assert not watched.after(1, left)
    assert not watched.after(19.9, left)
    assert "KV memory exhausted" in watched.after(0.2, left)


# ---- the way to the decode nodes ------------------------------------------------------------


def test_no_decode_node_reachable_until_one_answers() -> None:
    peers = DecodePeers(Clock())
    assert not peers.unhealthy_reason() and not peers.in_doubt()
    peers.used("d0:1", answered=False)
    assert not peers.unhealthy_reason(), "it may just have died"
    assert peers.in_doubt() == ["d0:1"]
    peers.probed("d0:1", lost="no route")
    peers.used("d0:1", answered=False)
    assert peers.unhealthy_reason() == "no decode node reachable: d0:1 (no route)"
    peers.probed("d0:1", lost="")
    assert not peers.unhealthy_reason() and not peers.in_doubt()
    peers.used("d1:1", answered=False)
    peers.probed("d1:1", lost="no route")
    assert not peers.unhealthy_reason(), "of one alone"
    assert peers.in_doubt() == ["d0:1", "d1:1"], "the other one may be out of reach by now"
    peers.probed("d0:1", lost="time-out")
    assert "d0:1 (time-out), d1:1 (no route)" in peers.unhealthy_reason()


def test_an_address_out_of_reach_is_forgotten() -> None:
    """An unhealthy node gets no work, so it would stay unhealthy for ever."""
    clock = Clock()
    peers = DecodePeers(clock)
    peers.used("d0:1")
    peers.probed("d0:1", lost="no route")
    clock.time += FORGET_AFTER - 0.1
    peers.probed("d0:1", lost="no route")
    assert peers.unhealthy_reason()
    clock.time += 0.2
    assert not peers.unhealthy_reason() and not peers.in_doubt()
    peers.probed("d0:1", lost="a probe that was under way")
    assert not peers.unhealthy_reason()


async def test_probes_until_somebody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kv_transfer.control.sink_client.PROBE_PERIOD", 0.01)
    answers = iter(["no route", "time-out", ""])
    asked: list[str] = []

    async def probe(address: str) -> str:
        asked.append(address)
        return next(answers)

    peers = DecodePeers()
    peers.used("d0:1", answered=False)

    async def drop(addresses: Sequence[str]) -> None:
        assert not addresses

    watching = asyncio.create_task(peers.watch(probe, drop))
    await eventually(lambda: len(asked) == 3 and not peers.in_doubt())
    await asyncio.sleep(0.05)
    assert asked == 3 * ["d0:1"], "no peer is asked once all answer"
    watching.cancel()


async def test_a_refusal_shows_that_the_network_leads_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert await why_unreachable(address) == ""
    assert await why_unreachable(address) == "", "refused"
    # Whatever a peer has said of itself: the node that probes it goes on.
    odd = ["", "d0", "d0:x", "d0:65536", "\0:1", "a..b:1", f"{'a' * 300}:1", "unix:/run/d0"]
    assert all([await why_unreachable(address) for address in odd])


class Refusing(pb_grpc.KVTransferServicer):
    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        async with serving(context):
            raise TransferError("no such transfer", code="UNKNOWN_TRANSFER")
        raise AssertionError("unreachable")


async def test_calls_to_a_decode_node_tell_whether_it_is_there() -> None:
    server, channels, peers = GrpcServer(), Channels(), DecodePeers()
    descriptor = pb.DESCRIPTOR.services_by_name["KVTransfer"]
    server.add(descriptor, pb_grpc.add_KVTransferServicer_to_server, Refusing())
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    ticket: Any = SimpleNamespace(transfer_id=b"t", epoch=0, lease_s=1.0, address=address)
    peer = SinkClient(channels.get, peers)
    with pytest.raises(NodeError):
        await peer.abort(ticket, "the server is not started")
    assert peers.in_doubt() == [address]
    await server.start()
    with pytest.raises(TransferError, match="no such transfer"):
        await peer.abort(ticket, "there is somebody")
    assert not peers.in_doubt()
    await channels.close()
    await server.stop(0)


# ---- a node ---------------------------------------------------------------------------------


async def health(node: DecodeNode, channel: grpc.aio.Channel) -> tuple[bool, int, str, float]:
    """Returns what the node says of itself, everywhere: gRPC health, /ready, heartbeat, metric."""
    check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    url = f"http://127.0.0.1:{node.server._metrics.port}/ready"  # type: ignore[union-attr]
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        status, reason = response.status, (await response.json())["reason"]
    assert node.load("router-0").healthy is (status == 200)
    metric = node.metrics.registry.get_sample_value("pdserve_healthy")
    assert metric is not None
    return check.status == health_pb2.HealthCheckResponse.SERVING, status, reason, metric


class WatchedNode:
    """Its watchdogs go by a clock that stands still while a step may take long by accident."""

    def __init__(self, node: DecodeNode) -> None:
        self.clock = Clock()
        for replica in node.replicas:
            replica.watchdog = Watchdog(20.0, self.clock)

    async def pass_until(self, condition: Callable[[], bool]) -> None:
        """Lets time pass, each time more than a watchdog allows, while it looks."""
        async with asyncio.timeout(60):
            while not condition():
                self.clock.time += 21
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("forked_ranks")
async def test_a_replica_whose_step_stalls_is_avoided_and_the_node_says_so_until_it_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with (
        decode_node(replicas=2) as (node, _, gates),
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        watched = WatchedNode(node)
        sample, (one, two) = node.metrics.registry.get_sample_value, node.replicas
        assert await generate(channel) == 4, "on replica 0: all else is equal"
        assert one.scheduler.generation_tokens == 4
        assert await health(node, channel) == (True, 200, "ok", 1.0)

        async def stall(replica: Any, gate: Gate) -> None:
            """Raises what the node says of a job whose step does not return."""
            gate.open.clear()
            job = asyncio.create_task(generate(channel))
            await eventually(lambda: replica.engine.progress().computing)
            await watched.pass_until(job.done)
            await job

        with pytest.raises(NodeError, match=r"replica 0: step \d+ has been running") as caught:
            await stall(one, gates[0])
        assert caught.value.code == "ENGINE_STALLED"
        assert caught.value.blame is Blame.DECODE and caught.value.retryable
        pool = one.scheduler.pool
        assert pool.num_free < pool.num_blocks, "the step still computes into them"
        assert await generate(channel) == 4, "on the other one, though this one has the prefix"
        assert two.scheduler.generation_tokens == 4
        serving, status, reason, metric = await health(node, channel)
        assert (serving, status, metric) == (True, 200, 1.0) and "replica 0: step" in reason
        assert node.load("router-0").reason == reason
        assert [sample("pdserve_engine_healthy", {"engine": e}) for e in "01"] == [0, 1]

        with pytest.raises(NodeError, match="replica 1: step"):
            await stall(two, gates[1])
        with pytest.raises(NodeError, match=r"replica 0: .*replica 1: "):
            await generate(channel)
        await eventually(lambda: "unhealthy: replica 0" in caplog.text)
        serving, status, reason, metric = await health(node, channel)
        assert (serving, status, metric) == (False, 503, 0.0)
        assert "replica 0: " in reason and "replica 1: " in reason

        for gate in gates:
            gate.open.set()
        await eventually(lambda: "healthy again" in caplog.text and node.ready() == (True, "ok"))
        assert await health(node, channel) == (True, 200, "ok", 1.0)
        assert await generate(channel) == 4
        await eventually(
            lambda: node.load("router-0").free_blocks == node.load("router-0").total_blocks == 512
        )
        assert node.load("router-0").most_free_blocks == 256


async def test_a_node_without_memory_says_so_and_recovers() -> None:
    async with (
        decode_node() as (node, _, _),
        grpc.aio.insecure_channel(node.address) as channel,
    ):
        watched = WatchedNode(node)
        (pool,) = node.replicas[0].scheduler.pool.pools
        taken = pool.allocate(pool.num_blocks)
        waiting = asyncio.create_task(generate(channel))
        await watched.pass_until(lambda: not node.ready()[0])
        assert "first of 1 waiting sequences needs 3 blocks, 0 of 256 are free" in node.ready()[1]
        pool.free(taken)
        node.replicas[0].engine._work.set()  # as code that frees blocks does
        assert await waiting == 4
        await eventually(lambda: node.ready()[0])


async def test_a_session_that_does_not_close_ends_its_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def defect(session: DecodeSession) -> None:
        raise KeyError("blocks")

    async with decode_node() as (node, serving, _):
        monkeypatch.setattr(DecodeSession, "close", defect)
        async with grpc.aio.insecure_channel(node.address) as channel:
            await generate(channel)
            assert await asyncio.wait_for(serving, 60) == 1
    line = (
        "[SESSION_NOT_CLOSED, blame=decode] a session could not be closed and may still hold blocks"
    )
    assert line in caplog.text


async def test_a_defect_in_the_background_ends_the_node() -> None:
    async def defect() -> None:
        raise KeyError("load")

    async with decode_node() as (node, serving, _):
        node.spawn(defect())
        assert await asyncio.wait_for(serving, 60) == 1
