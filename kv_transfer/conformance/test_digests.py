"""A connector's own digests (`sink_writes`, `source_hashes`) are of the bytes in the blocks and of
nothing else. The core does not read the blocks again, so the connector must not write again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import xxhash

from pdserve.kv_transfer.blocks import gather
from pdserve.kv_transfer.conformance.caches import FREE, ONE_PLANE, Geometry
from pdserve.kv_transfer.conformance.ends import LocalEnd
from pdserve.kv_transfer.conformance.kit import GEOMETRY, Kit
from pdserve.kv_transfer.conformance.nodes import Pair, runs_of, scattered, settle
from pdserve.kv_transfer.connector import BlockRun, Event, Landed, RunDigest
from pdserve.kv_transfer.digest import hash_prefix
from pdserve.kv_transfer.layout import Rect, rank_rects

ID, OTHER = b"transfer-id-0001", b"transfer-id-0002"
COUNTS = (5, 1, 14)
SOURCE_IDS, SINK_IDS = scattered(sum(COUNTS), 256, 1), scattered(sum(COUNTS), 256, 2)


every_geometry = pytest.mark.parametrize(
    "geometry", [GEOMETRY, *ONE_PLANE.values()], ids=["keys and values", *ONE_PLANE]
)


def expected(end: LocalEnd, epoch: int, rect: Rect, run: BlockRun, ids: Sequence[int]) -> bytes:
    """Returns the digest of a run that lies in these blocks."""
    data = gather(end.cache.view, rect, ids[run.first : run.first + run.count]).numpy().tobytes()
    return xxhash.xxh3_128(hash_prefix("same", ID, epoch, rect, run) + data).digest()


def landed(end: LocalEnd, digest: RunDigest, epoch: int = 1) -> bytes | None:
    return end.connector.landed_digest(ID, epoch, digest.rect, digest.run)


def check_source(end: LocalEnd, digests: Sequence[RunDigest], runs: Sequence[BlockRun]) -> None:
    """Each is of the source's blocks, and those of a piece cover the runs, in order."""
    assert digests, "`Sent.digests` is empty, though runs were announced by `ready_hashed`"
    for each in digests:
        assert each.digest == expected(end, 1, each.rect, each.run, SOURCE_IDS), (
            f"the digest of {each.run} is not XXH3 of `hash_prefix` and the source's blocks in "
            "canonical order: layer, plane, block, head"
        )
    wanted = [block for run in runs for block in range(run.first, run.first + run.count)]
    for place in {(each.sink, each.rect) for each in digests}:
        parts = [each.run for each in digests if (each.sink, each.rect) == place]
        found = [block for part in parts for block in range(part.first, part.first + part.count)]
        assert found == wanted, f"the digests for sink rank {place[0]} are of blocks {found}"


@every_geometry
def test_a_source_s_digests_are_of_its_blocks(kit: Kit, geometry: Geometry) -> None:
    """Each run that `ready_hashed` announces, or each of its parts, has one, for one sink rank."""
    if not kit.capabilities.source_hashes:
        return
    pair = kit.pair(geometry)
    assert pair.source.end.connector.hashes_as_it_sends, "the class declares `source_hashes`"
    pair.send(ID, SOURCE_IDS, SINK_IDS, COUNTS, hashed=True)
    check_source(pair.source.end, pair.wait_sent(ID)[0].digests, runs_of(COUNTS))
    assert pair.arrived(SOURCE_IDS, SINK_IDS), "runs of `ready_hashed` arrive as those of `ready`"


def test_a_source_makes_digests_for_each_sink_rank(kit: Kit) -> None:
    """Two sink ranks get half of the heads each: there is a digest of what each of them gets."""
    if not kit.capabilities.source_hashes:
        return
    halves = rank_rects(GEOMETRY.layers, GEOMETRY.heads, 2)
    pair = Pair(kit.node(), kit.node(halves))
    pair.send(ID, SOURCE_IDS, SINK_IDS, COUNTS, hashed=True)
    digests = pair.wait_sent(ID)[0].digests
    check_source(pair.source.end, digests, runs_of(COUNTS))
    for sink, rect in enumerate(halves):
        area = sum({each.rect: each.rect.area for each in digests if each.sink == sink}.values())
        assert area == rect.area, f"the digests of sink rank {sink} do not cover what it gets"


def test_runs_of_ready_have_no_digest(kit: Kit) -> None:
    """The core hashes small runs itself; a digest of the same run by two would be one too many."""
    if not kit.capabilities.source_hashes:
        return
    pair = kit.pair()
    pair.accept(ID, SINK_IDS)
    pair.submit(ID)
    first, second, third = runs_of(COUNTS)
    for run in (first, second, third):
        ids = SOURCE_IDS[run.first : run.first + run.count]
        pair.ready(ID, run, ids, last=run is third, hashed=run is second)
    check_source(pair.source.end, pair.wait_sent(ID)[0].digests, [second])


@every_geometry
def test_a_sink_s_digests_are_of_its_blocks(kit: Kit, geometry: Geometry) -> None:
    """`landed_digest` has, after Landed, the hash of what lies in the blocks of each run."""
    if not kit.capabilities.sink_writes:
        return
    pair = kit.pair(geometry)
    pair.send(ID, SOURCE_IDS, SINK_IDS, COUNTS, digests=True)
    end, whole = pair.sink.end, geometry.rect
    for run in runs_of(COUNTS):
        made = end.connector.landed_digest(ID, 1, whole, run)
        assert made is not None, f"no digest of {run}, though the class declares `sink_writes`"
        assert made == expected(end, 1, whole, run, SINK_IDS), (
            f"the digest of {run} is not XXH3 of `hash_prefix` and what lies in its blocks"
        )


def test_a_sink_s_digest_is_of_one_epoch_and_one_run(kit: Kit) -> None:
    """It has none for another epoch, transfer, run or rectangle, and none after `release`: what it
    has no digest of is read again, but a digest of something else would be believed."""
    if not kit.capabilities.sink_writes:
        return
    pair = kit.pair()
    pair.send(ID, SOURCE_IDS, SINK_IDS, COUNTS, digests=True, epoch=2)
    sink, whole = pair.sink.end.connector, GEOMETRY.rect
    run = runs_of(COUNTS)[0]
    half = Rect(whole.layer_start, whole.layer_end, 0, whole.head_end // 2)
    for what, args in {
        "an older epoch": (ID, 1, whole, run),
        "a later epoch": (ID, 3, whole, run),
        "another transfer": (OTHER, 2, whole, run),
        "another run": (ID, 2, whole, BlockRun(run.first + 1, run.count)),
        "half of the heads": (ID, 2, half, run),
    }.items():
        assert sink.landed_digest(*args) is None, f"a digest of {what}"
    pair.sink.end.release(ID)
    assert sink.landed_digest(ID, 2, whole, run) is None, "a digest after `release`"


def test_both_sides_cut_alike(kit: Kit) -> None:
    """The sink has a digest of every part of which the source has one, and it is the same."""
    if not (kit.capabilities.sink_writes and kit.capabilities.source_hashes):
        return
    pair = kit.pair()
    pair.send(ID, SOURCE_IDS, SINK_IDS, COUNTS, hashed=True, digests=True)
    for digest in pair.wait_sent(ID)[0].digests:
        assert landed(pair.sink.end, digest) == digest.digest, f"the sink has another of {digest}"


def test_nothing_is_written_after_landed(kit: Kit) -> None:
    """The blocks are a running sequence's from then on. With `sink_writes` the core does not read
    them again."""
    pair = kit.pair()

    def take_over(event: Event) -> None:
        if isinstance(event, Landed):
            pair.sink.end.cache.tensor.fill_(FREE)

    pair.sink.end.events.on_event = take_over
    pair.send(ID, SOURCE_IDS, SINK_IDS, COUNTS, digests=True)
    settle()
    assert pair.others_untouched(()), "a block was written after Landed"
