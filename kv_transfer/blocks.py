"""Where the blocks of a transfer lie in a rank's cache, and how to move them at once.

The canonical order of a piece's bytes is (layer, k|v, block, KV head). Both sides walk their
own memory in that order, so one byte stream fits both though physical block ids and head
ranges differ. What is adjacent in memory is one run; runs are cut differently on each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.kv_transfer.layout import CacheView, Rect

# numpy copies rows of words half again as fast as rows of bytes
WORD = 8


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Byte ranges of a cache, in canonical order."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def slices(self, memory: memoryview) -> list[memoryview]:
        ends = (self.offsets + self.lengths).tolist()
        return [memory[start:end] for start, end in zip(self.offsets.tolist(), ends, strict=True)]


def head_nbytes(cache: torch.Tensor) -> int:
    """Bytes of one KV head of one block: adjacent in memory."""
    return cache.shape[4] * cache.shape[5] * cache.element_size()


def piece_nbytes(cache: torch.Tensor, rect: Rect, count: int) -> int:
    """Bytes of `count` blocks of a piece."""
    return rect.area * 2 * count * head_nbytes(cache)


def byte_runs(view: CacheView, rect: Rect, block_ids: Sequence[int]) -> ByteRuns:
    """The runs of `block_ids` × `rect` (in the model's coordinates, within `view.rect`)."""
    _, _, num_blocks, num_heads, _, _ = view.cache.shape
    head = head_nbytes(view.cache)
    layers, heads = rect.slices_in(view.rect)
    planes = np.arange(2 * layers.start, 2 * layers.stop) * (num_blocks * num_heads * head)
    starts, counts = _segments(block_ids, coalesce=rect.num_heads == num_heads)
    offsets = planes[:, None] + ((starts * num_heads + heads.start) * head)[None, :]
    lengths = np.broadcast_to(counts * rect.num_heads * head, offsets.shape)
    return ByteRuns(offsets.ravel(), lengths.ravel())


def _segments(
    block_ids: Sequence[int], coalesce: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and counts of consecutive ids; each id alone unless `coalesce`."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if not coalesce or len(ids) == 0:
        return ids, np.ones_like(ids)
    firsts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2) != 1)
    return ids[firsts], np.diff(firsts, append=len(ids))


def memory_of(cache: torch.Tensor) -> memoryview:
    """All bytes of a contiguous CPU cache, writable."""
    return cache.view(torch.uint8).reshape(-1).numpy().data


def gather(view: CacheView, rect: Rect, block_ids: Sequence[int]) -> torch.Tensor:
    """A contiguous copy of a piece in canonical order, on the cache's device."""
    index = torch.tensor(block_ids, dtype=torch.long, device=view.cache.device)
    return _part(view, rect).index_select(2, index)


def scatter(view: CacheView, rect: Rect, block_ids: Sequence[int], staged: torch.Tensor) -> None:
    """Writes what `gather` read; `staged` is its bytes (1-D uint8, any device)."""
    part = _part(view, rect)
    index = torch.tensor(block_ids, dtype=torch.long, device=part.device)
    shape = (*part.shape[:2], len(block_ids), *part.shape[3:])
    part.index_copy_(2, index, staged.view(part.dtype).view(shape).to(part.device))


def _part(view: CacheView, rect: Rect) -> torch.Tensor:
    layers, heads = rect.slices_in(view.rect)
    return view.cache[layers, :, :, heads]


def words(memory: memoryview, num_layers: int, num_blocks: int, num_heads: int) -> NDArray[Any]:
    """A cache as `[planes, blocks, heads, words]` for `copy_blocks`; read-only if `memory` is.
    A plane is one layer's keys or values."""
    flat = np.frombuffer(memory, dtype=np.uint8)
    rows = flat.reshape(2 * num_layers, num_blocks, num_heads, -1)
    return rows.view(np.int64) if rows.shape[3] % WORD == 0 else rows


def copy_blocks(
    target: NDArray[Any],
    source: NDArray[Any],
    target_ids: Sequence[int],
    source_ids: Sequence[int],
) -> None:
    """`target[:, target_ids] = source[:, source_ids]`, without the temporary that numpy's own
    indexing makes. One strided copy per stretch of blocks adjacent on both sides; the
    interpreter lock is released while it runs. Shapes: `[planes, blocks, heads, words]`."""
    for to, start, count in _stretches(target_ids, source_ids):
        np.copyto(target[:, to : to + count], source[:, start : start + count])


def _stretches(
    target_ids: Sequence[int], source_ids: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """(target, source, count) of stretches in which both ids step by one."""
    to, start = np.asarray(target_ids, np.int64), np.asarray(source_ids, np.int64)
    if len(to) == 0:
        return
    broken = (np.diff(to) != 1) | (np.diff(start) != 1)
    firsts = np.concatenate(([0], np.flatnonzero(broken) + 1))
    counts = np.diff(firsts, append=len(to))
    yield from zip(to[firsts].tolist(), start[firsts].tolist(), counts.tolist(), strict=True)
