"""`quiesce` makes it safe to free blocks: once it has returned, another transfer may own them.
Epochs separate the current transfer from an abandoned one."""

from __future__ import annotations

import time

import pytest

from pdserve.kv_transfer.conformance.caches import FREE, Geometry
from pdserve.kv_transfer.conformance.ends import LocalEnd
from pdserve.kv_transfer.conformance.kit import Kit
from pdserve.kv_transfer.conformance.nodes import Pair, eventually, scattered, settle
from pdserve.kv_transfer.connector import BlockRun, Landed

ID, OTHER = b"transfer-id-0001", b"transfer-id-0002"
BIG = Geometry(block_size=16, head_dim=64, num_blocks=128)  # 16 MiB: transfers take a while
STOLEN = 13.0  # what a source's blocks hold once they are another request's
WRITTEN = "a block was written after `quiesce` had returned: it is another request's by then"
READ = "a block was read after `quiesce` had returned: it is another request's by then"


def begin(pair: Pair[LocalEnd, LocalEnd], transfer_id: bytes = ID) -> None:
    """Half of four blocks, 1 2 3 4 → 10 20 30 40, has arrived."""
    pair.accept(transfer_id, (10, 20, 30, 40))
    pair.submit(transfer_id)
    pair.announce(transfer_id, (1, 2), last=False)
    assert eventually(lambda: pair.arrived((1, 2), (10, 20))), "the first run did not arrive"


def test_after_quiesce_the_sink_is_not_written(kit: Kit) -> None:
    """The sink gives a transfer up half way; the source does not know and continues."""
    pair = kit.pair()
    begin(pair)
    pair.sink.end.quiesce(ID)
    pair.sink.end.cache.tensor.fill_(FREE)
    pair.ready(ID, BlockRun(2, 2), (3, 4), last=True)
    settle()
    assert pair.others_untouched(()), WRITTEN
    assert not pair.sink.end.events.of(Landed, ID), "Landed after `quiesce`"
    pair.source.end.quiesce(ID)
    pair.send(OTHER, (5, 6), (50, 60))
    assert pair.arrived((5, 6), (50, 60)), "the next transfer suffers from the one given up"


@pytest.mark.parametrize("after_ms", [0, 3, 8])
def test_quiesce_amid_a_stream(kit: Kit, after_ms: int) -> None:
    """`quiesce` at the sink while runs come in one after the other."""
    pair = kit.pair(BIG)
    ids = scattered(128, 128)
    pair.accept(ID, ids)
    pair.submit(ID)
    pair.announce(ID, ids[::-1], (8,) * 16)
    time.sleep(after_ms / 1e3)
    pair.sink.end.quiesce(ID)
    pair.sink.end.cache.tensor.fill_(FREE)
    settle()
    assert pair.others_untouched(()), WRITTEN


def test_after_quiesce_the_source_is_not_read(kit: Kit) -> None:
    """The source gives a transfer up half way; later runs belong to an unknown transfer."""
    pair = kit.pair()
    begin(pair)
    pair.source.end.quiesce(ID)
    pair.source.end.cache.tensor.fill_(STOLEN)
    pair.ready(ID, BlockRun(2, 2), (3, 4), last=True)
    settle()
    assert not (pair.sink.end.cache.tensor == STOLEN).any(), READ
    assert not pair.sink.end.events.of(Landed, ID), "Landed, but the source gave it up half way"


@pytest.mark.parametrize("after_ms", [0, 3, 8])
def test_source_quiesce_amid_a_stream(kit: Kit, after_ms: int) -> None:
    """`quiesce` at the source while runs are sent. Everything that the sink counts as landed was
    read before. (A sink that reads by itself may see newer bytes, but must not report them as
    landed.)"""
    pair = kit.pair(BIG)
    ids = scattered(128, 128)
    pair.accept(ID, ids)
    pair.submit(ID)
    pair.announce(ID, ids[::-1], (8,) * 16)
    time.sleep(after_ms / 1e3)
    pair.source.end.quiesce(ID)
    pair.source.end.cache.tensor.fill_(STOLEN)
    settle()
    stolen = bool((pair.sink.end.cache.tensor == STOLEN).any())
    if kit.capabilities.pull and kit.capabilities.one_sided:
        stolen = stolen and bool(pair.sink.end.events.of(Landed, ID))
    assert not stolen, READ


def test_a_zombie_of_an_older_epoch_never_writes(kit: Kit) -> None:
    """The sink hands the transfer to another source under a higher epoch; the first source does not
    know and continues, into the same connection."""
    sink, zombie = kit.node(), kit.node()
    old = Pair(zombie, sink, seed=1)
    begin(old)
    sink.end.quiesce(ID)
    new = Pair(kit.node(), sink, seed=2)  # the sink's blocks are FREE again
    new.accept(ID, (11, 21, 31, 41), epoch=2)
    new.submit(ID, epoch=2)
    new.announce(ID, (1, 2), last=False)
    old.ready(ID, BlockRun(2, 2), (3, 4), last=True)
    settle()
    assert not sink.end.events.of(Landed, ID), "Landed with blocks of two epochs"
    new.ready(ID, BlockRun(2, 2), (3, 4), last=True)
    assert new.wait_landed(ID, epoch=2)[0].epoch == 2, "events carry the epoch that was accepted"
    assert new.arrived((1, 2, 3, 4), (11, 21, 31, 41)), "data of an older epoch was taken"
    assert new.others_untouched((11, 21, 31, 41)), WRITTEN


def test_the_same_source_with_a_higher_epoch(kit: Kit) -> None:
    """After `quiesce` on both sides the transfer may be tried again, under a higher epoch."""
    pair = kit.pair()
    begin(pair)
    pair.source.end.quiesce(ID)
    pair.sink.end.quiesce(ID)
    pair.sink.end.cache.tensor.fill_(FREE)
    pair.send(ID, (1, 2, 3, 4), (15, 25, 35, 45), (1, 3), epoch=2)
    assert pair.arrived((1, 2, 3, 4), (15, 25, 35, 45)), "the second try brought other data"
    assert pair.others_untouched((15, 25, 35, 45)), WRITTEN
    assert {each.epoch for each in pair.sink.end.events.of(Landed, ID)} == {2}


def test_an_older_epoch_is_not_accepted_again(kit: Kit) -> None:
    """`accept` of an older epoch comes late: it must not displace the newer one."""
    pair = kit.pair()
    pair.accept(ID, (10, 20), epoch=2)
    pair.accept(ID, (11, 21), epoch=1)
    pair.submit(ID, epoch=2)
    pair.announce(ID, (1, 2))
    assert pair.wait_landed(ID, epoch=2)[0].epoch == 2, "events carry the epoch that was accepted"
    assert pair.arrived((1, 2), (10, 20)), "the blocks of an older accept were used"
    assert pair.others_untouched((10, 20)), "the blocks of an older accept were written"


def test_an_older_epoch_is_not_written(kit: Kit) -> None:
    """A source that submits an older epoch than the sink accepted writes nothing."""
    pair = kit.pair()
    pair.accept(ID, (10, 20), epoch=2)
    pair.submit(ID, epoch=1)
    pair.announce(ID, (1, 2))
    settle()
    assert pair.others_untouched(()), "a source of an older epoch has written"
    assert not pair.sink.end.events.of(Landed, ID), "Landed, but the epoch is another"


def test_quiesce_and_release_again(kit: Kit) -> None:
    """`quiesce` right after `submit`, twice, and `release` after it all return."""
    pair = kit.pair()
    pair.accept(ID, (10, 20))
    pair.submit(ID)
    for end in (pair.source.end, pair.sink.end):
        end.quiesce(ID)
        end.quiesce(ID)
        end.release(ID)
    pair.announce(ID, (1, 2))
    settle()
    assert pair.others_untouched(()), WRITTEN
