"""Transfers that outlast their leases many times, what goes wrong on the way, and what is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import torch

from kv_fakes import Geometry, Pair
from pdserve.common.core.errors import Blame, NodeError, TransferError
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.pb import inference_pb2
from pdserve.common.rpc.server import GrpcServer
from pdserve.decode_node.service import KVTransferService
from pdserve.kv_transfer.commands import RankCalls, Ready, Reply, decode_command
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.connectors.base.channel import Channel
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.tcp import Options, TCPConnector, TCPTransport
from pdserve.kv_transfer.control.announcer import RunAnnouncer
from pdserve.kv_transfer.control.background import Lease
from pdserve.kv_transfer.control.recv_transfer import RecvTransfer
from pdserve.kv_transfer.control.sink import MAX_MESSAGE
from pdserve.kv_transfer.control.sink_client import (
    CHANNEL_IDLE,
    MAX_CHANNELS,
    MAX_PEERS,
    DecodePeers,
    SinkClient,
)
from pdserve.kv_transfer.control.ticket import RankEndpoint, Ticket
from pdserve.kv_transfer.layout import Piece, Rect, Share
from pdserve.kv_transfer.rank import digester, group_connector
from pdserve.kv_transfer.rank.digester import Digester
from transfers import (
    SINK_IDS,
    SOURCE_IDS,
    TOKENS,
    Spoiler,
    announce,
    assert_landed,
    go_on,
    pair,
    start,
)

RATE = 2 << 20  # bytes a second of a throttled connection
LARGE = Geometry(block_size=16, head_dim=64, num_blocks=300)  # 48 KiB a block
THROTTLED = "test_transfer_long:ThrottledTCP"


class ThrottledPipe(SocketPipe):
    def _send(self, buffers: list[memoryview], flags: int = 0) -> int:
        sent = self.sock.send(buffers[0][: 32 << 10], flags)
        time.sleep(sent / RATE)
        return sent

    def _code(self) -> None:
        return None  # compiled code would not wait


class ThrottledTransport(TCPTransport):
    def dial(self, endpoint: bytes) -> SocketPipe:
        return ThrottledPipe(super().dial(endpoint).sock)


class ThrottledTCP(TCPConnector):
    def transport(self, config: Mapping[str, Any]) -> TCPTransport:
        return ThrottledTransport(Options())


async def hand_off(made: Pair, ids: range, runs: int = 1) -> float:
    """From the same blocks to the same blocks; returns seconds."""
    began = time.monotonic()
    tokens = len(ids) * made.sink_node.geometry.block_size
    ticket = await made.reserve(tokens, 0, tuple(ids), made.note_sink_free)
    handoff = made.begin(ticket)
    count = len(ids) // runs
    for number in range(runs):
        part = ids[number * count : (number + 1) * count]
        handoff.ready(BlockRun(number * count, count), part, last=number == runs - 1)
    await handoff.commit("token")
    await made.landed(ticket.transfer_id)
    return time.monotonic() - began


# ---- longer than a lease --------------------------------------------------------------------


async def test_a_cached_prefix_travels_as_one_run_for_many_leases() -> None:
    """Over a slow connection that it shares with a short one, which need not wait for its end."""
    lease = 1.5
    async with pair(THROTTLED, lease_s=lease, geometry=LARGE) as made:
        full = made.source_node.fill_random()
        long = asyncio.create_task(hand_off(made, range(180)))
        (sink,) = made.sink_node.children().values()
        while not sink.counts["bytes"]:
            await asyncio.sleep(0.01)
        short = await hand_off(made, range(180, 182))
        seconds = await long
        assert seconds > 2 * lease
        assert short < seconds
        assert torch.equal(made.sink_node.caches[0][:, :, :182], full[:, :, :182])
        assert made.freed == ["source"] * 2


async def test_digests_take_many_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the source before the commit, and at the sink after it."""
    right = Digester.digest

    def slow(self: Digester, *args: Any) -> bytes:
        time.sleep(0.05)
        return right(self, *args)

    monkeypatch.setattr(Digester, "digest", slow)
    monkeypatch.setattr(digester, "STEP_NBYTES", 1)
    lease = 1.5
    async with pair("reread:RereadTCP", lease_s=lease, geometry=LARGE) as made:
        made.source_node.fill_random()
        assert await hand_off(made, range(40), runs=40) > 2 * lease
        assert made.source.counts["sent"] == 1


async def test_long_runs_are_cut() -> None:
    """Whatever a connector stages, hashes or reads at once is bounded."""
    async with pair("tcp", 1, 2) as made:
        full = made.source_node.fill_random()
        made.source.run_blocks = 2
        seen: list[tuple[int, int, bool]] = []
        call = made.source.ranks.call

        async def note(rank: int, message: bytes) -> bytes:
            if isinstance(command := decode_command(message)[1], Ready):
                seen.append((command.run.first, command.run.count, command.last))
            return await call(rank, message)

        made.source.ranks.call = note  # type: ignore[method-assign]
        _, handoff = await start(made)
        handoff.ready(BlockRun(0, 5), SOURCE_IDS, last=True)
        await handoff.commit("token")
        assert_landed(made, full)
        assert seen == [(0, 2, False), (2, 2, False), (4, 1, True)]


async def test_a_source_whose_digests_never_come_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connector hashes as it sends and has stopped: nothing moves, so no lease is renewed."""
    monkeypatch.setattr(group_connector, "SHORT_NBYTES", 0)
    monkeypatch.setattr(Channel, "deliver", lambda *frame: stopped.wait(20.0))
    stopped = threading.Event()
    async with pair("tcp", lease_s=1.0) as made:
        _, handoff = await start(made)
        announce(handoff)
        with pytest.raises(TransferError, match="LEASE_EXPIRED"):
            await asyncio.wait_for(handoff.commit(0), 10.0)
        stopped.set()


# ---- what goes wrong ------------------------------------------------------------------------


async def test_a_renewal_refused_late_does_not_spoil_the_second_try() -> None:
    async with pair("reread:RereadTCP", lease_s=2.0) as made:
        full = made.source_node.fill_random()
        under_way, let_go, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        renew, retarget = made.peer.renew, made.peer.retarget

        async def slow_renew(ticket: Ticket) -> None:
            under_way.set()
            await let_go.wait()
            answered.set()
            await renew(ticket)

        async def later(ticket: Ticket) -> Ticket:
            let_go.set()
            await answered.wait()
            await asyncio.sleep(0)
            return await retarget(ticket)

        made.peer.renew, made.peer.retarget = slow_renew, later  # type: ignore[method-assign]
        _, handoff = await start(made)
        await under_way.wait()
        Spoiler(made, times=1)
        announce(handoff)
        await handoff.commit("token")
        assert_landed(made, full)
        assert made.source.counts["repulled"] == 1
        assert made.source.counts["repulling/renew_refused"] == 1


async def test_a_rank_that_failed_is_its_own_node_s_fault() -> None:
    async with pair("tcp") as made:
        _, handoff = await start(made)

        async def dead(rank: int, message: bytes) -> bytes:
            raise NodeError("rank 0 was killed", code="RANK_DIED")

        made.source.ranks.call = dead  # type: ignore[method-assign]
        announce(handoff)
        with pytest.raises(TransferError) as caught:
            await handoff.commit(0)
        assert (caught.value.code, caught.value.blame) == ("RANK_DIED", Blame.PREFILL)


async def test_runs_that_a_rank_takes_at_once_do_not_block_the_event_loop() -> None:
    """They are as many as a failover announces again; the rank is one of this process."""
    turns, taken = 0, Counter[int]()  # of this task; commands in each

    async def at_once(rank: int, message: bytes) -> bytes:
        taken.update([turns])
        return msgspec.msgpack.encode(Reply())

    many, rect = 100, Rect(0, 1, 0, 1)
    ticket = Ticket(b"t", 0, 60.0, "", "", 16, 16 * many, (0,), (RankEndpoint(0, rect, b""),), True)
    piece = Piece(0, 0, rect)
    lease = Lease(60.0, lambda: None)
    ranks = RankCalls(at_once, Counter(), [Share(0, rect)])
    announcer = RunAnnouncer(ranks, [piece], [0], ticket, 1, lease)
    announcer.announce(0, BlockRun(0, many), range(many), last=True)
    running = asyncio.create_task(announcer.run())
    while taken.total() <= many:
        await asyncio.sleep(0)
        turns += 1
    assert max(taken.values()) == 1
    announcer.stop()
    await running
    lease.end()


@pytest.mark.parametrize(
    ("where", "method", "blame"),
    [(RecvTransfer, "_compare", Blame.DECODE), (RunAnnouncer, "_send", Blame.PREFILL)],
)
async def test_a_defect_ends_its_transfer_at_once(
    monkeypatch: pytest.MonkeyPatch, where: type, method: str, blame: Blame
) -> None:
    async def broken(*args: Any) -> None:
        raise KeyError("a defect")

    async with pair("tcp", lease_s=60.0) as made:
        ticket, handoff = await start(made)
        monkeypatch.setattr(where, method, broken)
        announce(handoff)
        with pytest.raises(TransferError) as caught:
            await asyncio.wait_for(handoff.commit(0), 10)
        error = caught.value
        assert (error.code, error.blame, error.retryable) == ("INTERNAL", blame, True)
        await made.sink.cancel(ticket.transfer_id)
        assert made.freed == ["sink", "source"]


async def test_a_bad_first_token_is_the_prefill_node_s_fault_and_another_may_try() -> None:
    server, channels = GrpcServer(), Channels()
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    async with pair("tcp", address=address) as made:
        service = KVTransferService([made.sink], vocab_size=50)
        descriptor = pb.DESCRIPTOR.services_by_name["KVTransfer"]
        server.add(descriptor, pb_grpc.add_KVTransferServicer_to_server, service)
        await server.start()
        made.source.sink = SinkClient(channels.get, DecodePeers())
        for token, bad in ((50, True), (49, False)):
            if bad:
                ticket, handoff = await start(made)
            else:
                ticket = await made.sink.retarget(ticket.transfer_id)
                handoff = made.begin(ticket)
            announce(handoff)
            event = pb.TokenEvent(tokens=[inference_pb2.Token(id=token)])
            commit = handoff.commit(pb.FirstToken(token=event))
            if not bad:
                await commit
                continue
            with pytest.raises(TransferError, match="outside the vocabulary of 50") as caught:
                await commit
            error = caught.value
            assert (error.code, error.blame, error.retryable) == (
                "BAD_COMMIT", Blame.PREFILL, True,
            )  # fmt: skip
        assert (await made.landed(ticket.transfer_id)).first_token.token.tokens[0].id == 49
        await channels.close()
        await server.stop(0)


# ---- what is kept ---------------------------------------------------------------------------


class Session:
    """Whom a sink's blocks belong to, with its tokens."""

    def freed(self) -> None: ...


async def test_finished_transfers_are_remembered_without_their_sessions() -> None:
    async with pair("shm") as made:
        sessions, ids = [], []
        for number in range(60):
            session = Session()
            sessions.append(weakref.ref(session))
            ticket = await made.reserve(TOKENS, 0, SINK_IDS, session.freed)
            ids.append(ticket)
            if number % 3 == 0:
                await made.sink.cancel(ticket.transfer_id)
                continue
            handoff = made.begin(ticket)
            announce(handoff)
            if number % 3 == 1:
                await handoff.abort("x" * 10_000)
                await go_on(60.0)
                with pytest.raises(TransferError):
                    await made.landed(ticket.transfer_id)
            else:
                await handoff.commit(b"token")
                await made.landed(ticket.transfer_id)
        await made.sink.close()
        del session, handoff
        made.handoffs.clear()
        gc.collect()
        assert [each() for each in sessions] == [None] * 60
        assert all(made.sink.knows(each.transfer_id) for each in ids)
        # What comes late is told the same as ever.
        assert await made.sink.commit(ids[-1].transfer_id, 1, b"again") > 0
        assert await made.sink.cancel(ids[-1].transfer_id) is False
        assert await made.sink.cancel(ids[0].transfer_id) is True
        with pytest.raises(TransferError, match="ALREADY_LANDED"):
            await made.sink.retarget(ids[-1].transfer_id)
        with pytest.raises(TransferError, match="aborted the transfer") as caught:
            await made.sink.commit(ids[1].transfer_id, 1, b"late")
        assert len(caught.value.message) <= MAX_MESSAGE
        with pytest.raises(TransferError, match="STALE_EPOCH"):
            made.sink.renew(ids[-1].transfer_id, 2)


def test_channels_to_decode_nodes_that_are_not_used_are_closed() -> None:
    now = [0.0]
    peers = DecodePeers(lambda: now[0])
    with peers.calling("busy:1"):
        for number in range(MAX_PEERS + 400):
            with peers.calling(f"d{number}:1"):
                peers.used(f"d{number}:1")
        dropped = set(peers.take_unused())
        assert len(dropped) == MAX_PEERS + 400 - MAX_CHANNELS, "those used last stay"
        assert f"d{MAX_PEERS + 399}:1" not in dropped
        assert len(peers._peers) == MAX_PEERS
        now[0] = CHANNEL_IDLE
        assert len(peers.take_unused()) == MAX_CHANNELS
        assert not peers.take_unused(), "a call is under way"
    now[0] = 2 * CHANNEL_IDLE
    assert peers.take_unused() == ["busy:1"]
    assert not peers.take_unused()
