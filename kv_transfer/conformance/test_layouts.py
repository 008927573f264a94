"""Unequal parallelism: each source rank sends each sink rank its part of the rectangle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pdserve.kv_transfer.conformance.caches import ONE_PLANE, Geometry
from pdserve.kv_transfer.conformance.kit import Kit
from pdserve.kv_transfer.conformance.nodes import Pair, scattered
from pdserve.kv_transfer.layout import Rect, rank_rects

ID = b"transfer-id-0001"
LAYERS = 4
CASES = [
    (heads, source_tp, sink_tp)
    for heads in (4, 2)
    for source_tp in (1, 2, 4)
    for sink_tp in (1, 2, 4)
    if (heads == 4 and source_tp != sink_tp) or (heads == 2 and 4 in (source_tp, sink_tp))
]
WHOLE = (0, LAYERS)
PIPELINES = {
    "cut": ((WHOLE,), ((0, 1), (1, 4))),
    "joined": (((0, 3), (3, 4)), (WHOLE,)),
    "moved": (((0, 1), (1, 4)), ((0, 3), (3, 4))),
}


def check(kit: Kit, geometry: Geometry, sources: Sequence[Rect], sinks: Sequence[Rect]) -> None:
    pair = Pair(kit.node(sources, geometry), kit.node(sinks, geometry))
    source_ids, sink_ids = scattered(11, 32, 1), scattered(11, 32, 2)
    pair.send(ID, source_ids, sink_ids, (8, 3))
    assert pair.arrived(source_ids, sink_ids), (
        "layers or KV heads are mixed up: `Piece.rect` is in the model's coordinates, a cache "
        "starts at `CacheView.rect`, and a piece may be any part of either"
    )
    assert pair.others_untouched(sink_ids), "a block was written that the transfer does not name"
    for end in pair.sink.ends:
        landed = pair.wait_landed(ID)[pair.sink.ends.index(end)]
        share = end.cache.rect.area * pair.nbytes(11) // pair.sink.ends[0].cache.rect.area
        assert landed.nbytes == share, "Landed.nbytes is what this rank received, from all sources"


@pytest.mark.parametrize(("heads", "source_tp", "sink_tp"), CASES)
def test_tensor_parallel(kit: Kit, heads: int, source_tp: int, sink_tp: int) -> None:
    """TP 1, 2 and 4 on either side; with more ranks than KV heads, replicas of them."""
    geometry = Geometry(layers=LAYERS, heads=heads, num_blocks=32)
    sources, sinks = (rank_rects(LAYERS, heads, tp) for tp in (source_tp, sink_tp))
    check(kit, geometry, sources, sinks)


@pytest.mark.parametrize(("source_tp", "sink_tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("geometry", ONE_PLANE.values(), ids=ONE_PLANE)
def test_one_plane(kit: Kit, geometry: Geometry, source_tp: int, sink_tp: int) -> None:
    """Latents without heads, of which each rank has all, and recurrent states: a plane instead of
    keys and values."""
    sources, sinks = (rank_rects(LAYERS, geometry.heads, tp) for tp in (source_tp, sink_tp))
    check(kit, geometry, sources, sinks)


@pytest.mark.parametrize(("sources", "sinks"), PIPELINES.values(), ids=PIPELINES)
def test_pipelines(
    kit: Kit, sources: Sequence[tuple[int, int]], sinks: Sequence[tuple[int, int]]
) -> None:
    """Ranges of layers that are cut differently on each side."""
    geometry = Geometry(layers=LAYERS, num_blocks=32)
    rects = [[Rect(*layers, 0, geometry.heads) for layers in side] for side in (sources, sinks)]
    check(kit, geometry, *rects)


def test_layers_and_heads_at_once(kit: Kit) -> None:
    """A pipeline of two on one side, four tensor-parallel ranks on the other."""
    geometry = Geometry(layers=LAYERS, num_blocks=32)
    grid = [Rect(start, end, head, head + 2) for start, end in ((0, 1), (1, 4)) for head in (0, 2)]
    check(kit, geometry, grid, rank_rects(LAYERS, geometry.heads, 4))
