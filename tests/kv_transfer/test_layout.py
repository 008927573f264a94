"""Rectangles, plans and byte runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from compiled import use_compiled_code
from pdserve.common.core.errors import ConfigError, TransferError
from pdserve.kv_transfer.blocks import (
    BlockLayout,
    CacheBytes,
    byte_runs,
    copy_blocks,
    gather,
    memory_of,
    piece_nbytes,
    scatter,
)
from pdserve.kv_transfer.layout import CacheView, Piece, Rect, Share, fingerprint, plan, rank_rects


def cells(rect: Rect) -> set[tuple[int, int]]:
    layers = range(rect.layer_start, rect.layer_end)
    return set(itertools.product(layers, range(rect.head_start, rect.head_end)))


def shares(rects: list[Rect]) -> list[Share]:
    return [Share(*each) for each in enumerate(rects)]


def assert_covers(sources: list[Rect], sinks: list[Rect]) -> None:
    pieces = plan(shares(sources), shares(sinks))
    for number, sink in enumerate(sinks):
        parts = [cells(piece.rect) for piece in pieces if piece.sink == number]
        assert set().union(*parts) == cells(sink)
        assert sum(map(len, parts)) == len(cells(sink))  # no cell twice
    for piece in pieces:
        assert cells(piece.rect) <= cells(sources[piece.source])


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_plan_covers_every_sink_once_for_all_tensor_parallel_pairs(heads: int) -> None:
    for source_tp, sink_tp in itertools.product([1, 2, 4, 8], repeat=2):
        assert_covers(rank_rects(6, heads, source_tp), rank_rects(6, heads, sink_tp))


def test_plan_covers_unequal_pipelines() -> None:
    two_stages = [Rect(0, 3, 0, 4), Rect(3, 6, 0, 4)]
    uneven = [Rect(0, 2, 0, 2), Rect(0, 2, 2, 4), Rect(2, 6, 0, 4)]
    assert_covers(two_stages, uneven)
    assert_covers(uneven, two_stages)


def test_plan_covers_with_sources_that_overlap() -> None:
    assert_covers([Rect(0, 4, 0, 3), Rect(1, 4, 2, 4), Rect(0, 1, 1, 4)], [Rect(0, 4, 0, 4)])


def test_replicated_heads_share_the_sending() -> None:
    ranks = shares(rank_rects(2, 1, 4))
    senders = [piece.source for piece in plan(ranks, ranks)]
    assert sorted(senders) == [0, 1, 2, 3]


def test_plan_names_the_part_that_no_source_holds() -> None:
    with pytest.raises(TransferError, match="head_start=2") as error:
        plan(shares([Rect(0, 4, 0, 2)]), shares([Rect(0, 4, 0, 4)]))
    assert error.value.code == "LAYOUT_MISMATCH"


def test_groups_are_planned_apart() -> None:
    """Stages of unequal length, of which one has no layer of the second group."""
    left, right = Rect(0, 1, 0, 2), Rect(1, 3, 0, 2)
    sources = [Share(0, left), Share(1, right), Share(1, Rect(0, 2, 0, 2), group=1)]
    sinks = [Share(0, Rect(0, 3, 0, 2)), Share(0, Rect(0, 2, 0, 2), group=1)]
    assert plan(sources, sinks) == [
        Piece(0, 0, left),
        Piece(1, 0, right),
        Piece(2, 1, sinks[1].rect),
    ]
    with pytest.raises(TransferError, match="of KV group 1, which sink rank 0 needs"):
        plan(sources[:2], sinks)


def test_rank_rects() -> None:
    assert rank_rects(2, 4, 2) == [Rect(0, 2, 0, 2), Rect(0, 2, 2, 4)]
    assert [rect.head_start for rect in rank_rects(2, 2, 4)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="3 KV heads cannot be split over 2"):
        rank_rects(2, 3, 2)


def test_fingerprint_and_its_explanation() -> None:
    ours, theirs = {"dtype": "float32", "block_size": "16"}, {"dtype": "float32"}
    assert fingerprint(ours) == fingerprint(dict(reversed(ours.items())))
    assert fingerprint(ours) != fingerprint(theirs)


def random_view(rect: Rect, dtype: torch.dtype = torch.float32) -> CacheView:
    shape = (rect.layer_end - rect.layer_start, 2, 10, rect.head_end - rect.head_start, 4, 6)
    return CacheView(torch.randn(shape).to(dtype), rect)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rect", [Rect(2, 6, 4, 8), Rect(3, 5, 5, 6), Rect(2, 3, 4, 6)])
@pytest.mark.parametrize("ids", [(3,), (0, 1, 2, 9), (9, 8, 7), (4, 5, 1, 2, 3)])
def test_byte_runs_are_the_canonical_order(
    rect: Rect, ids: tuple[int, ...], dtype: torch.dtype
) -> None:
    view = random_view(Rect(2, 6, 4, 8), dtype)
    runs = byte_runs(view, rect, ids)
    stream = b"".join(runs.slices(memory_of(view.cache)))
    expected = view.cache[
        rect.layer_start - 2 : rect.layer_end - 2,
        :,
        list(ids),
        rect.head_start - 4 : rect.head_end - 4,
    ]
    assert stream == expected.contiguous().view(torch.uint8).numpy().tobytes()
    assert len(stream) == piece_nbytes(view.cache, rect, len(ids))
    assert torch.equal(gather(view, rect, ids), expected)


def test_consecutive_blocks_are_one_run() -> None:
    view = random_view(Rect(0, 2, 0, 2))
    assert len(byte_runs(view, view.rect, (5, 6, 7, 1)).lengths) == 2 * 2 * 2
    assert len(byte_runs(view, Rect(0, 2, 0, 1), (5, 6, 7, 1)).lengths) == 2 * 2 * 4


def test_scatter_puts_back_what_gather_took() -> None:
    source, sink = random_view(Rect(0, 4, 0, 4)), random_view(Rect(1, 3, 2, 6))
    before = sink.cache.clone()
    rect = Rect(1, 3, 2, 4)
    staged = gather(source, rect, (7, 0)).view(torch.uint8).reshape(-1)
    scatter(sink, rect, (4, 2), staged)
    assert torch.equal(sink.cache[:, :, [4, 2], :2], source.cache[1:3, :, [7, 0], 2:4])
    untouched = [0, 1, 3, 5, 6, 7, 8, 9]
    assert torch.equal(sink.cache[:, :, untouched], before[:, :, untouched])
    assert torch.equal(sink.cache[:, :, :, 2:], before[:, :, :, 2:])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("num_blocks", [9, 4000])  # within the caches and past them
@pytest.mark.parametrize("rect", [Rect(2, 6, 4, 8), Rect(3, 5, 4, 8), Rect(2, 4, 5, 7)])
def test_copied_blocks_are_those_and_no_others(
    compiled: bool, num_blocks: int, rect: Rect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a rank with other heads and another number of blocks; some adjacent on both sides."""
    use_compiled_code(compiled, monkeypatch)
    source, target = (
        BlockLayout(Rect(2, 6, 4, 8), num_blocks + 3, 26, 2),
        BlockLayout(rect, num_blocks, 26, 2),
    )
    rng = np.random.default_rng(1)
    data = [rng.integers(0, 255, each.nbytes, np.uint8) for each in (target, source)]
    theirs = rows(data[1], source)[2 * rect.layer_start - 4 : 2 * rect.layer_end - 4]
    theirs = theirs[:, :, rect.head_start - 4 : rect.head_end - 4]
    to = [1, 2, 3, 8, *range(9, num_blocks, 2)]
    at = [5, 6, 2, 3, *range(10, num_blocks + 1, 2)]
    expected = rows(data[0], target).copy()
    expected[:, to] = theirs[:, at]
    caches = CacheBytes.of(data[0].data, target), CacheBytes.of(data[1].data, source)
    copy_blocks(rect, caches[0], to, caches[1], at)
    assert np.array_equal(rows(data[0], target), expected)
    copy_blocks(rect, caches[0], (), caches[1], ())
    for stray in (num_blocks + 3, -1):
        with pytest.raises(IndexError):
            copy_blocks(rect, caches[0], (0,), caches[1], (stray,))
    assert np.array_equal(rows(data[0], target), expected)


def rows(data: np.ndarray, place: BlockLayout) -> np.ndarray:
    """Returns it as `[planes, blocks, heads, bytes]`."""
    shape = (2 * place.rect.num_layers, place.num_blocks, place.rect.num_heads, place.head_nbytes)
    return data.reshape(shape)


def test_layers_are_split_evenly() -> None:
    rect = Rect(2, 9, 1, 3)
    parts = rect.split_layers(3)
    assert [(part.layer_start, part.layer_end) for part in parts] == [(2, 4), (4, 6), (6, 9)]
    assert all((part.head_start, part.head_end) == (1, 3) for part in parts)
    assert rect.split_layers(1) == [rect]
    assert len(rect.split_layers(99)) == 7
