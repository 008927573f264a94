"""Every block arrives where it belongs, no other block is touched, and the events say so."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from pdserve.kv_transfer.conformance.caches import FREE
from pdserve.kv_transfer.conformance.kit import Kit
from pdserve.kv_transfer.conformance.nodes import eventually, scattered, settle
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    Landed,
    Progress,
    Sent,
    SourceTransfer,
)

ID = b"transfer-id-0001"
NUM_BLOCKS = 256
PLACES = (
    "the sink's blocks are not what the source's were: `block_ids[i]` of `ready` is logical "
    "block `run.first + i`, and goes to `SinkTransfer.block_ids[run.first + i - first_block]`"
)
ONLY_NAMED = "a block that the transfer does not name was written: it is another request's"


@pytest.mark.parametrize("count", [1, 2, 17, 200])
def test_blocks_arrive(kit: Kit, count: int) -> None:
    """One run of one block or of many, from and to blocks in no order, arrives."""
    pair = kit.pair()
    source_ids, sink_ids = scattered(count, NUM_BLOCKS, 1), scattered(count, NUM_BLOCKS, 2)
    pair.send(ID, source_ids, sink_ids)
    assert pair.arrived(source_ids, sink_ids), PLACES
    assert pair.others_untouched(sink_ids), ONLY_NAMED


IDS = {
    "adjacent": tuple(range(40, 60)),
    "reversed": tuple(range(99, 79, -1)),
    "scattered": scattered(20, NUM_BLOCKS),
    "mixed": (*range(7, 17), *range(2, 7), *range(200, 205)),
}


@pytest.mark.parametrize("sink_ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("source_ids", IDS.values(), ids=IDS)
def test_any_block_ids(kit: Kit, source_ids: tuple[int, ...], sink_ids: tuple[int, ...]) -> None:
    """Block ids that are adjacent, reversed or scattered, on either side: each has its place."""
    pair = kit.pair()
    pair.send(ID, source_ids, sink_ids, (13, 7))
    assert pair.arrived(source_ids, sink_ids), PLACES
    assert pair.others_untouched(sink_ids), ONLY_NAMED


def test_only_the_named_blocks_are_written(kit: Kit) -> None:
    """Neighbours of the transfer's blocks, and blocks of a transfer before, stay as they are."""
    pair = kit.pair()
    pair.send(ID, (1, 2, 3), (10, 12, 14))
    for end in pair.sink.ends:
        end.release(ID)
        end.cache.tensor.fill_(FREE)
    pair.send(ID[::-1], (1, 2, 3), (20, 22, 24))
    assert pair.others_untouched((20, 22, 24)), ONLY_NAMED


def test_runs_arrive_in_their_places(kit: Kit) -> None:
    """Runs of uneven sizes, announced one after the other without waiting."""
    pair = kit.pair()
    counts = (1, 7, 2, 30, 1, 1, 18)
    source_ids, sink_ids = scattered(60, NUM_BLOCKS, 1), scattered(60, NUM_BLOCKS, 2)
    pair.send(ID, source_ids, sink_ids, counts)
    assert pair.arrived(source_ids, sink_ids), PLACES
    assert pair.others_untouched(sink_ids), ONLY_NAMED


def test_runs_go_out_as_they_become_ready(kit: Kit) -> None:
    """A run is delivered before the next one is announced: that is how the transfer hides
    behind the prefill. Both sides report Progress, which renews the leases."""
    pair = kit.pair()
    source_ids, sink_ids = (5, 4, 3, 2), (50, 40, 30, 20)
    pair.accept(ID, sink_ids)
    pair.submit(ID)
    for index, source_id in enumerate(source_ids):
        pair.ready(ID, BlockRun(index, 1), (source_id,), last=index == 3)
        arrived = partial(pair.arrived, source_ids[: index + 1], sink_ids[: index + 1])
        assert eventually(arrived), f"run {index + 1} did not arrive though its blocks are ready"
    pair.wait_sent(ID)
    for end in (pair.source.end, pair.sink.end):
        assert end.events.of(Progress, ID), (
            "no Progress event: without it the lease of a long transfer lapses"
        )


def test_a_cached_prefix_is_left_out(kit: Kit) -> None:
    """The sink has the first blocks already: `first_block` is the first it takes, and runs
    start there."""
    pair = kit.pair()
    source_ids, sink_ids = scattered(9, NUM_BLOCKS, 1), scattered(9, NUM_BLOCKS, 2)
    pair.send(ID, source_ids, sink_ids, (4, 5), first=11)
    assert pair.arrived(source_ids, sink_ids), PLACES
    assert pair.others_untouched(sink_ids), ONLY_NAMED


def test_the_last_run_may_be_empty(kit: Kit) -> None:
    """`last` may come with no blocks, when all were announced before."""
    pair = kit.pair()
    pair.send(ID, (1, 2, 3), (4, 5, 6), (3, 0))
    assert pair.arrived((1, 2, 3), (4, 5, 6)), PLACES


def test_nothing_to_move(kit: Kit) -> None:
    """A sink that has every block has landed at once; a source rank that serves no sink rank has
    sent all with its last run."""
    pair = kit.pair()
    pair.accept(ID, ())
    assert pair.wait_landed(ID)[0].nbytes == 0, "an empty transfer has 0 bytes"
    pair.source.end.submit(SourceTransfer(ID, 1, ()))
    pair.ready(ID, BlockRun(0, 1), (3,), last=True)
    assert pair.wait_sent(ID)[0].nbytes == 0, "an empty transfer has 0 bytes"


def test_landed_comes_after_the_data(kit: Kit) -> None:
    """Every block is in place when Landed is emitted: the core may decode from them at once."""
    pair = kit.pair()
    source_ids, sink_ids = scattered(150, NUM_BLOCKS, 1), scattered(150, NUM_BLOCKS, 2)
    in_place: list[bool] = []

    def look(event: Event) -> None:
        if isinstance(event, Landed):
            in_place.append(pair.arrived(source_ids, sink_ids))

    pair.sink.end.events.on_event = look
    pair.send(ID, source_ids, sink_ids, (50, 50, 50))
    assert in_place[0], "Landed was emitted before all blocks were in place"


def test_landed_and_sent_come_once(kit: Kit) -> None:
    """A transfer ends with one Landed at the sink and one Sent at the source."""
    pair = kit.pair()
    pair.send(ID, (1, 2, 3), (4, 5, 6), (2, 1))
    settle()
    assert len(pair.sink.end.events.of(Landed, ID)) == 1, "Landed must be emitted exactly once"
    assert len(pair.source.end.events.of(Sent, ID)) == 1, "Sent must be emitted exactly once"
    for end in (pair.source.end, pair.sink.end):
        assert not end.events.of(Failed, ID), "a transfer that succeeded has not failed as well"


def test_sent_means_done_reading(kit: Kit) -> None:
    """After Sent the source's blocks may change: no rank reads them for this transfer."""
    pair = kit.pair()
    source_ids, sink_ids = scattered(150, NUM_BLOCKS, 1), scattered(150, NUM_BLOCKS, 2)

    def reuse(event: Event) -> None:
        if isinstance(event, Sent):
            pair.source.end.cache.tensor.fill_(FREE)

    pair.source.end.events.on_event = reuse
    pair.send(ID, source_ids, sink_ids, (50, 50, 50))
    settle()
    assert pair.arrived(source_ids, sink_ids), (
        "Sent was emitted while the source's blocks were still to be read"
    )


def test_events_name_the_transfer_and_its_bytes(kit: Kit) -> None:
    """Every event carries the transfer's id and epoch; Landed and Sent carry all its bytes."""
    pair = kit.pair()
    pair.send(ID, (1, 2, 3), (4, 5, 6), (2, 1), epoch=7)
    settle()
    for end in (pair.source.end, pair.sink.end):
        for event in end.events.all():
            assert (event.transfer_id, event.epoch) == (ID, 7), (
                f"{event} is not about the only transfer there is, epoch 7 of {ID!r}"
            )
    (landed,), (sent,) = pair.wait_landed(ID), pair.wait_sent(ID)
    assert landed.nbytes == pair.nbytes(3), "Landed.nbytes is what this rank received"
    assert sent.nbytes == pair.nbytes(3), "Sent.nbytes is what this rank delivered"
    assert 0 <= sent.seconds < 60, "Sent.seconds is from the first run to the last delivery"


def test_without_the_last_run_nothing_is_over(kit: Kit) -> None:
    """A source that never announces its last run: the announced runs arrive; no Landed, no Sent.
    (The core's lease ends such a transfer.)"""
    pair = kit.pair()
    pair.accept(ID, (4, 5, 6))
    pair.submit(ID)
    pair.announce(ID, (1, 2), last=False)
    assert eventually(lambda: pair.arrived((1, 2), (4, 5))), PLACES
    settle()
    assert not pair.sink.end.events.of(Landed, ID), "Landed, but a block is missing"
    assert not pair.source.end.events.of(Sent, ID), "Sent, but the last run was not announced"


def test_several_transfers_at_once(kit: Kit) -> None:
    """Sixteen transfers between the same two ranks, their runs interleaved, announced by four
    threads: they do not disturb each other."""
    pair = kit.pair()
    ids = [bytes([number]) * 16 for number in range(16)]
    places = scattered(NUM_BLOCKS, NUM_BLOCKS, 3)
    parts = [places[start : start + 16] for start in range(0, NUM_BLOCKS, 16)]

    def work(numbers: range) -> None:
        for number in numbers:
            pair.submit(ids[number])
        for run in (BlockRun(0, 5), BlockRun(5, 1), BlockRun(6, 10)):
            for number in numbers:
                blocks = range(16 * number + run.first, 16 * number + run.first + run.count)
                pair.ready(ids[number], run, blocks, run.first == 6)

    for transfer_id, part in zip(ids, parts, strict=True):
        pair.accept(transfer_id, part)
    threads = [threading.Thread(target=work, args=(range(n, 16, 4),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, transfer_id in enumerate(ids):
        pair.wait_landed(transfer_id)
        pair.wait_sent(transfer_id)
        blocks = range(16 * number, 16 * number + 16)
        assert pair.arrived(blocks, parts[number]), "a transfer's blocks hold another one's data"


def test_transfers_one_after_another(kit: Kit) -> None:
    """A pair of ranks serves many transfers, each released before the next."""
    pair = kit.pair()
    for number in range(12):
        transfer_id = bytes([number]) * 16
        ids = scattered(5, NUM_BLOCKS, number)
        pair.send(transfer_id, ids, ids[::-1], (2, 3))
        assert pair.arrived(ids, ids[::-1]), PLACES
        pair.source.end.release(transfer_id)
        pair.sink.end.release(transfer_id)
