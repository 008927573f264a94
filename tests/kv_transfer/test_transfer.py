"""The control halves, over a connector that misbehaves and over the real ones."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_fakes import FINGERPRINT, Geometry
from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.rpc.pb import cluster_pb2
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.control.background import Lease
from pdserve.kv_transfer.control.protocol import SinkState
from pdserve.kv_transfer.control.recv_transfer import RecvTransfer
from pdserve.kv_transfer.control.source import SendTransfer
from pdserve.kv_transfer.control.ticket import RankEndpoint, Ticket
from pdserve.kv_transfer.layout import Rect
from pdserve.kv_transfer.rank import digester
from transfers import (
    FAKE,
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
from waiting import eventually


@pytest.mark.parametrize(
    ("streams", "source_tp", "sink_tp"), [(2, 1, 1), (3, 2, 1), (2, 1, 4), (7, 1, 4)]
)
async def test_several_streams_share_the_layers(streams: int, source_tp: int, sink_tp: int) -> None:
    options = {"tcp": {"streams": streams}}
    async with pair("tcp", source_tp, sink_tp, options=options) as made:
        full = made.source_node.fill_random()
        for turn in range(2):  # the second one finds the connections open
            ticket, handoff = await start(made)
            announce(handoff)
            result = await handoff.commit(turn)
            arrival = await made.landed(ticket.transfer_id)
            assert arrival.first_token == turn and arrival.nbytes == result.nbytes > 0
            assert_landed(made, full)
        at_work = [each for each in threading.enumerate() if each.name == "kv-source"]
        layers = made.source_node.geometry.layers
        assert len(at_work) == min(streams, layers) * max(source_tp, sink_tp)


@pytest.mark.parametrize("connector", ["tcp", "shm"])
async def test_blocks_the_sink_has_are_left_out(connector: str) -> None:
    async with pair(connector, 2, 1, geometry=Geometry(dtype=torch.bfloat16)) as made:
        full = made.source_node.fill_random()
        ticket, handoff = await start(made, first_block=3)
        announce(handoff)
        await asyncio.gather(handoff.commit(1), made.landed(ticket.transfer_id))
        assert_landed(made, full, first_block=3)


@pytest.mark.parametrize("connector", ["tcp", "shm", "shm,tcp"])
async def test_concurrent_transfers_share_connections(connector: str) -> None:
    async with pair(connector, 2, 2, geometry=Geometry(num_blocks=40)) as made:
        full = made.source_node.fill_random()
        tickets = []

        async def one(index: int) -> None:
            ids = tuple(range(5 * index, 5 * index + 5))
            ticket = await made.reserve(TOKENS, 0, ids[::-1], lambda: None)
            tickets.append(ticket)
            handoff = made.begin(ticket)
            for block in range(5):
                handoff.ready(BlockRun(block, 1), ids[block : block + 1], last=block == 4)
                await asyncio.sleep(0)
            await handoff.commit(index)
            assert (await made.landed(ticket.transfer_id)).first_token == index

        await asyncio.gather(*(one(index) for index in range(8)))
        rows = [5 * index + block for index in range(8) for block in range(5)]
        mirrored = [5 * index + 4 - block for index in range(8) for block in range(5)]
        for cache, rect in zip(made.sink_node.caches, made.sink_node.rects, strict=True):
            heads = full[:, :, :, rect.head_start : rect.head_end]
            assert torch.equal(cache[:, :, mirrored], heads[:, :, rows])
        assert made.freed == ["source"] * 8


async def test_commit_may_come_before_the_data_and_is_idempotent() -> None:
    async with pair(FAKE, faults={"delay": 0.1}, digests=False) as made:
        ticket, handoff = await start(made)
        announce(handoff)
        early = asyncio.create_task(made.sink.commit(ticket.transfer_id, ticket.epoch, "early"))
        result = await handoff.commit("again")
        assert await early == result.nbytes
        arrival = await made.landed(ticket.transfer_id)
        assert arrival.first_token == "early"
        assert 0 <= arrival.commit_s < arrival.data_s and arrival.verify_s >= 0
        assert await made.sink.commit(ticket.transfer_id, ticket.epoch, "late") == result.nbytes


async def test_a_commit_after_the_data_is_timed_as_the_later_of_both() -> None:
    async with pair("tcp") as made, asyncio.timeout(30):
        ticket, handoff = await start(made)
        announce(handoff)
        machine = made.sink._live[ticket.transfer_id].machine
        while machine.state is not SinkState.LANDED:
            await asyncio.sleep(0.001)
        await handoff.commit(0)
        arrival = await made.landed(ticket.transfer_id)
        assert 0 <= arrival.data_s < arrival.commit_s and arrival.verify_s >= 0


async def test_duplicate_events_are_counted_not_obeyed() -> None:
    async with pair(FAKE, 2, 2, faults={"duplicate": True}) as made:
        ticket, handoff = await start(made)
        announce(handoff)
        await handoff.commit(0)
        await made.landed(ticket.transfer_id)
        assert made.sink.counts["landed"] == 1
        assert made.sink.counts["landed/ranks_landed"] + made.sink.counts["late_event"] >= 1
        assert made.freed == ["source"]


async def test_data_that_never_lands_ends_with_the_lease() -> None:
    async with pair(FAKE, lease_s=0.15, faults={"lose": True}) as made:
        ticket, handoff = await start(made)
        announce(handoff)
        outcomes = await asyncio.gather(
            handoff.commit(0), made.landed(ticket.transfer_id), return_exceptions=True
        )
        assert [type(each) for each in outcomes] == [TransferError] * 2
        assert outcomes[1].code in ("LEASE_EXPIRED", "ABORTED")
        assert made.freed == ["sink", "source"]


async def test_a_committed_source_does_not_wait_for_a_sink_that_makes_no_progress() -> None:
    """The sink answers every renewal, and its own lease is much longer."""
    async with pair(FAKE, faults={"lose": True}) as made:
        made.source.lease_s = 1.0
        _, handoff = await start(made)
        announce(handoff)
        committed = handoff.commit(0)
        await go_on(5.0, steps=50)  # several between two renewals
        with pytest.raises(TransferError, match="LEASE_EXPIRED"):
            await asyncio.wait_for(committed, 5)


async def test_each_side_frees_alone() -> None:
    async with pair(FAKE, lease_s=0.1, faults={}) as made:
        ticket, handoff = await start(made)
        made.peer.cut_off = True  # and then neither side hears anything
        with pytest.raises(TransferError) as error:
            await made.landed(ticket.transfer_id)
        assert error.value.code == "LEASE_EXPIRED"
        await asyncio.wait([handoff.outcome], timeout=5)
        with pytest.raises(TransferError, match="LEASE_EXPIRED"):
            await handoff.commit(0)
        assert made.freed == ["sink", "source"]


async def test_progress_renews_the_lease() -> None:
    async with pair(FAKE, lease_s=1.0, faults={}) as made:
        ticket, handoff = await start(made)
        for block in range(5):  # 1.5 s altogether
            await go_on(0.3)
            handoff.ready(BlockRun(block, 1), SOURCE_IDS[block : block + 1], last=block == 4)
        await handoff.commit(0)
        await made.landed(ticket.transfer_id)


async def test_a_failed_rank_fails_both_sides() -> None:
    async with pair(FAKE, 2, 1, faults={"fail_after": 1}, lease_s=1.0) as made:
        ticket, handoff = await start(made)
        announce(handoff)
        with pytest.raises(TransferError, match="PEER_LOST"):
            await handoff.commit(0)
        with pytest.raises(TransferError, match="ABORTED"):
            await made.landed(ticket.transfer_id)
        assert made.freed == ["sink", "source"]


async def test_a_refused_reservation_frees_before_it_raises() -> None:
    async with pair(FAKE, faults={"refuse": True}) as made:
        with pytest.raises(TransferError, match="CONNECT_FAILED"):
            await start(made)
        assert made.freed == ["sink"]


@pytest.mark.parametrize("connector", ["tcp", "shm"])
@pytest.mark.parametrize("stage", ["reserved", "sending", "committing"])
async def test_the_client_leaves(connector: str, stage: str) -> None:
    async with pair(connector, 1, 2) as made:
        ticket, handoff = await start(made)
        committing: asyncio.Task[Any] | None = None
        if stage != "reserved":
            handoff.ready(BlockRun(0, 2), SOURCE_IDS[:2])
        if stage == "committing":  # the last runs never come, so it stays open
            committing = handoff.commit(0)
            await asyncio.sleep(0)
        assert await made.sink.cancel(ticket.transfer_id) is True
        with pytest.raises(TransferError, match="CANCELLED"):
            await made.landed(ticket.transfer_id)
        with pytest.raises(TransferError, match="CANCELLED"):
            await (committing or handoff.commit(0))
        assert made.freed == ["sink", "source"]


async def test_cancel_after_the_landing_leaves_the_blocks_to_the_waiter() -> None:
    async with pair(FAKE, faults={}) as made:
        ticket, handoff = await start(made)
        announce(handoff)
        await handoff.commit(0)
        assert await made.sink.cancel(ticket.transfer_id) is False
        assert made.freed == ["source"]
        assert await made.sink.cancel(b"?" * 16) is True


async def test_a_prompt_that_waits_long_keeps_both_leases() -> None:
    async with pair(FAKE, faults={}, lease_s=0.6) as made:
        ticket, handoff = await start(made)
        await go_on(2.0)
        assert made.freed == []
        announce(handoff)
        await handoff.commit(0)
        await made.landed(ticket.transfer_id)


async def test_a_waiting_source_learns_that_the_sink_is_done_with_it() -> None:
    async with pair(FAKE, faults={}, lease_s=0.15) as made:
        ticket, handoff = await start(made)
        await made.sink.cancel(ticket.transfer_id)
        computing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(TransferError):
            await asyncio.wait_for(handoff.watch(computing), 30)


async def test_the_source_aborts() -> None:
    """The part that it has sent may be completed by another one, until the lease lapses."""
    async with pair("tcp") as made:
        ticket, handoff = await start(made)
        handoff.ready(BlockRun(0, 2), SOURCE_IDS[:2])
        await handoff.abort("out of blocks")
        await go_on(60.0)
        with pytest.raises(TransferError, match="out of blocks"):
            await made.landed(ticket.transfer_id)
        assert made.freed == ["sink", "source"]
        handoff.ready(BlockRun(2, 2), SOURCE_IDS[2:4])  # too late: no effect
        with pytest.raises(TransferError, match="out of blocks"):
            await handoff.commit(0)


async def test_stale_epochs_and_unknown_transfers_are_typed() -> None:
    async with pair(FAKE, faults={}) as made:
        ticket, handoff = await start(made)
        with pytest.raises(TransferError, match="STALE_EPOCH"):
            await made.sink.commit(ticket.transfer_id, ticket.epoch - 1, 0)
        with pytest.raises(TransferError, match="UNKNOWN_TRANSFER"):
            made.sink.abort(b"x" * 16, 1, "?")
        with pytest.raises(TransferError, match="under way"):
            made.source.begin(ticket)
        await handoff.abort("done")


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"fingerprint": "0" * 24}, "FINGERPRINT_MISMATCH", FINGERPRINT),
        ({"block_size": 32}, "LAYOUT_MISMATCH", "the prefill node has 4, the decode node 32"),
        (
            {"endpoints": (RankEndpoint(0, Rect(0, 9, 0, 2), b""),)},
            "LAYOUT_MISMATCH",
            "layer_start=3",
        ),
    ],
)
async def test_a_ticket_that_does_not_fit(change: dict[str, Any], code: str, says: str) -> None:
    async with pair(FAKE, faults={}) as made:
        ticket = await made.reserve(TOKENS, 0, SINK_IDS, lambda: None)
        with pytest.raises(TransferError, match=says) as error:
            made.source.begin(replace(ticket, **change))
        assert error.value.code == code


@pytest.mark.parametrize(("sink", "source"), [("a" * 32, "b" * 32), ("", "b" * 32), ("a" * 32, "")])
async def test_kv_of_another_adapter_is_refused(sink: str, source: str) -> None:
    async with pair(FAKE, faults={}) as made:
        ticket = await made.reserve(TOKENS, 0, SINK_IDS, lambda: None, adapter=sink)
        with pytest.raises(TransferError, match=r"\+") as error:
            made.source.begin(ticket, adapter=source)
        assert error.value.code == "FINGERPRINT_MISMATCH"


async def test_ticket_survives_the_wire_and_is_checked() -> None:
    endpoint = RankEndpoint(0, Rect(0, 3, 0, 2), b"\x00\xff")
    ticket = Ticket(b"t" * 16, 3, 1.5, "h:1", "f", 4, 18, (2,), (endpoint,), True)
    assert Ticket.from_pb(ticket.to_pb()) == ticket
    assert ticket.num_blocks == 5
    faults: list[tuple[dict[str, Any], str]] = [
        ({"transfer_id": b"short"}, "BAD_FRAME"),
        ({"lease_s": float("nan")}, "BAD_FRAME"),
        ({"lease_s": 1e-9}, "BAD_FRAME"),  # it would be renewed without a pause
        ({"address": "unix:/run/anybody.sock"}, "BAD_FRAME"),
        ({"address": "h:65536"}, "BAD_FRAME"),
        ({"block_size": 0}, "BAD_FRAME"),
        ({"num_tokens": 0}, "BAD_FRAME"),
        ({"first_blocks": (6,)}, "BAD_FRAME"),
        ({"endpoints": ()}, "BAD_FRAME"),
        ({"endpoints": (replace(endpoint, rank=1),)}, "BAD_FRAME"),
        ({"endpoints": (endpoint, endpoint)}, "BAD_FRAME"),
        ({"endpoints": (endpoint, replace(endpoint, group=1))}, "BAD_FRAME"),
        ({"first_blocks": ()}, "BAD_FRAME"),
        ({"endpoints": (replace(endpoint, rect=Rect(3, 1, 2, 0)),)}, "LAYOUT_MISMATCH"),
    ]
    for change, code in faults:
        with pytest.raises(TransferError) as error:
            Ticket.from_pb(replace(ticket, **change).to_pb())
        assert error.value.code == code, change
    with pytest.raises(TransferError):
        Ticket.from_pb(cluster_pb2.Ticket())


class Clock:
    """Has as much of an event loop as a lease uses; its time is what a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: dict[object, tuple[float, Callable[[], None]]] = {}

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        timer = SimpleNamespace(cancel=lambda: self._timers.pop(id(timer)))
        self._timers[id(timer)] = when, callback
        return timer

    def go_on(self, seconds: float) -> None:
        self.now += seconds
        for key, (when, callback) in list(self._timers.items()):
            if when <= self.now:
                del self._timers[key]
                callback()


def test_lease_lapses_once_and_only_without_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lapses = Clock(), list[float]()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    lease = Lease(1.0, lambda: lapses.append(clock.now))
    clock.go_on(0.5)
    lease.renew()
    clock.go_on(0.75)
    assert not lapses
    clock.go_on(0.25)
    assert lapses == [1.5]
    clock.go_on(9.0)
    assert lapses == [1.5]
    ended = Lease(1.0, lambda: lapses.append(0.0))
    ended.end()
    clock.go_on(9.0)
    assert lapses == [1.5]


# ---- digests and epochs ----


@pytest.mark.parametrize("connector", ["reread:RereadTCP", "reread:RereadShm", FAKE])
async def test_wrong_data_is_sent_once_more_and_then_refused(connector: str) -> None:
    async with pair(connector, 1, 2, faults={} if connector == FAKE else None) as made:
        full = made.source_node.fill_random()
        ticket, handoff = await start(made)
        spoil = Spoiler(made, times=1)
        announce(handoff)
        result = await handoff.commit("token")
        assert result.nbytes > 0
        assert_landed(made, full)
        assert (made.source.counts["repulled"], spoil.spoiled) == (1, 1)
        assert made.sink.counts["stopped/DIGEST_MISMATCH"] == 1

        ticket, handoff = await start(made)
        spoil = Spoiler(made, times=2)
        announce(handoff)
        with pytest.raises(TransferError, match="DIGEST_MISMATCH"):
            await handoff.commit("token")
        assert spoil.spoiled == 2
        await made.sink.cancel(ticket.transfer_id)
        assert made.freed.count("sink") == 1


@pytest.mark.parametrize("block", range(3))
async def test_no_digest_is_left_out_between_two_steps_of_comparing(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digester, "STEP_NBYTES", 1)  # one run in each step
    async with pair("reread:RereadTCP") as made:
        full = made.source_node.fill_random()
        _, handoff = await start(made)
        Spoiler(made, times=1, block=SINK_IDS[2 * block])
        announce(handoff)
        await handoff.commit("token")
        assert made.sink.counts["stopped/DIGEST_MISMATCH"] == 1
        assert_landed(made, full)


@pytest.mark.parametrize(
    "other",
    [
        {"transfer_id": b"x" * 16},
        {"epoch": 1},
        {"endpoints": ()},
        {"num_tokens": 10 * TOKENS},
        {"first_blocks": (2,)},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_the_next_epochs_ticket_is_of_the_same_transfer(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """A decode node that answers nonsense fails this hand-off, and its source ends it."""
    async with pair("reread:RereadTCP") as made:
        ticket, handoff = await start(made)
        retarget = made.source.sink.retarget

        async def nonsense(ticket: Ticket) -> Ticket:
            return replace(await retarget(ticket), **other)

        monkeypatch.setattr(made.source.sink, "retarget", nonsense)
        Spoiler(made, times=1)
        announce(handoff)
        with pytest.raises(TransferError) as caught:
            await asyncio.wait_for(handoff.commit("token"), 10)
        assert (caught.value.code, caught.value.blame) == ("BAD_FRAME", Blame.DECODE)
        await made.sink.cancel(ticket.transfer_id)
        assert made.freed == ["sink", "source"]


@pytest.mark.parametrize("state", ["reserved", "sending", "aborted"])
async def test_another_source_takes_over(state: str) -> None:
    async with pair("tcp", 2, 1) as made:
        full = made.source_node.fill_random()
        ticket, first = await start(made)
        if state != "reserved":
            first.ready(BlockRun(0, 2), SOURCE_IDS[:2])
        if state == "aborted":
            await first.abort("it crashed")
        second = await made.sink.retarget(ticket.transfer_id)
        assert second.epoch == ticket.epoch + 1
        with pytest.raises(TransferError, match="STALE_EPOCH"):
            await made.sink.commit(ticket.transfer_id, ticket.epoch, "old")
        await first.abort("late")
        handoff = made.begin(second)
        announce(handoff)
        await handoff.commit("new")
        assert (await made.landed(ticket.transfer_id)).first_token == "new"
        assert_landed(made, full)
        with pytest.raises(TransferError, match="ALREADY_LANDED"):
            await made.sink.retarget(ticket.transfer_id)


async def test_the_last_retarget_gets_the_ticket() -> None:
    async with pair("tcp") as made:
        ticket, handoff = await start(made)
        asked = [asyncio.create_task(made.sink.retarget(ticket.transfer_id)) for _ in range(3)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [getattr(answer, "code", "ticket") for answer in answers] == [
            "STALE_EPOCH", "STALE_EPOCH", "ticket",
        ]  # fmt: skip
        await made.sink.cancel(ticket.transfer_id)
        with pytest.raises(TransferError, match="CANCELLED"):
            await made.sink.retarget(ticket.transfer_id)
        await handoff.abort("over")
        assert made.freed == ["sink", "source"]


async def test_a_source_that_was_given_up_cannot_outbid_the_one_that_takes_over() -> None:
    async with pair("tcp") as made:
        ticket, handoff = await start(made)
        router = asyncio.create_task(made.sink.retarget(ticket.transfer_id))
        await asyncio.sleep(0)
        with pytest.raises(TransferError, match="STALE_EPOCH"):
            await made.sink.retarget(ticket.transfer_id, ticket.epoch)
        assert (await router).epoch == ticket.epoch + 1
        await handoff.abort("over")


@pytest.mark.parametrize("connector", ["tcp", "shm"])
async def test_a_sink_that_has_every_block_takes_the_commit_alone(connector: str) -> None:
    async with pair(connector, 1, 2) as made:
        ticket = await made.reserve(TOKENS, 5, (), made.note_sink_free)
        handoff = made.begin(ticket)
        announce(handoff)
        await asyncio.wait_for(handoff.commit("token"), 30)
        arrival = await made.landed(ticket.transfer_id)
        assert (arrival.first_token, arrival.nbytes) == ("token", 0)


@pytest.mark.parametrize(
    "digests",
    [
        lambda right: right[1:],
        lambda right: [*right, right[0]],
        lambda right: [replace(right[0], rect=Rect(0, 2, 0, 2)), *right[1:]],
        lambda right: [replace(right[0], rect=Rect(0, 9, 0, 2)), *right[1:]],
    ],
)
async def test_digests_must_cover_every_block_once(digests: Any) -> None:
    async with pair("tcp") as made:
        ticket, handoff = await start(made)
        commit = made.peer.commit

        async def lie(ticket: Ticket, payload: Any, right: Any) -> int:
            return await commit(ticket, payload, digests(list(right)))

        made.peer.commit = lie  # type: ignore[method-assign]
        announce(handoff)
        with pytest.raises(TransferError, match="BAD_FRAME"):
            await handoff.commit(0)
        await made.sink.cancel(ticket.transfer_id)


async def test_ended_transfers_are_freed_without_garbage_collection() -> None:
    """Cycles of references would keep them until a full collection, which comes late."""

    def left() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (SendTransfer, RecvTransfer)]

    gc.collect()
    before = len(left())
    gc.disable()
    try:
        async with pair("tcp") as made:
            ticket, handoff = await start(made)
            announce(handoff)
            await asyncio.gather(handoff.commit(1), made.landed(ticket.transfer_id))
            ticket, handoff = await start(made)
            await handoff.abort("not wanted any more")
            made.handoffs.clear()
            del handoff
        await eventually(lambda: len(left()) <= before)
    finally:
        gc.enable()
