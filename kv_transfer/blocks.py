"""Where the blocks of a transfer lie in a rank's cache, and how to move them at once.

The canonical order of a piece's bytes is (layer, k|v, block, KV head). Both sides walk their
own memory in that order, so one byte stream fits both though physical block ids and head
ranges differ. What is adjacent in memory is one run; runs are cut differently on each side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.native.code import block_code


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
    place = Placement.of(view)
    ids = np.asarray(block_ids, dtype=np.int64)
    firsts = _stretches([ids], coalesce=place.has_all_heads(rect))
    counts = np.diff(firsts, append=len(ids))
    return place.byte_runs(rect, ids[firsts], counts)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the blocks of a cache lie in its bytes, whoever's cache it is."""

    rect: Rect
    num_blocks: int
    head_nbytes: int

    @classmethod
    def of(cls, view: CacheView) -> Placement:
        return cls(view.rect, view.cache.shape[2], head_nbytes(view.cache))

    @property
    def nbytes(self) -> int:
        return 2 * self.rect.area * self.num_blocks * self.head_nbytes

    def has_all_heads(self, rect: Rect) -> bool:
        """Whether adjacent blocks of `rect` are adjacent bytes."""
        return rect.num_heads == self.rect.num_heads

    def byte_runs(
        self, rect: Rect, starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> ByteRuns:
        """Of stretches of adjacent blocks. Raises IndexError for a block that there is not."""
        if len(starts) and (starts.min() < 0 or (starts + counts).max() > self.num_blocks):
            raise IndexError(f"a block that is none of {self.num_blocks}")
        layers, heads = rect.slices_in(self.rect)
        row = self.rect.num_heads * self.head_nbytes  # of a block in a plane
        planes = np.arange(2 * layers.start, 2 * layers.stop) * (self.num_blocks * row)
        offsets = planes[:, None] + (starts * row + heads.start * self.head_nbytes)[None, :]
        lengths = np.broadcast_to(counts * (rect.num_heads * self.head_nbytes), offsets.shape)
        return ByteRuns(offsets.ravel(), lengths.ravel())


def _stretches(ids: Sequence[NDArray[np.int64]], coalesce: bool = True) -> NDArray[np.int64]:
    """Where stretches begin in which each of `ids` (of equal length) steps by one; at every id
    unless `coalesce`."""
    if not coalesce or len(ids[0]) < 2:
        return np.arange(len(ids[0]))
    broken = np.logical_or.reduce([np.diff(each) != 1 for each in ids])
    return np.concatenate(([0], np.flatnonzero(broken) + 1))


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


def copy_blocks(
    rect: Rect,
    target: tuple[NDArray[np.uint8], Placement],
    target_ids: Sequence[int],
    source: tuple[NDArray[np.uint8], Placement],
    source_ids: Sequence[int],
) -> None:
    """Block by block `rect` (within both) of `source_ids` to that of `target_ids`; each side is all
    bytes of a cache. What is adjacent on both sides is copied at once; the interpreter lock is
    released meanwhile. Raises IndexError for a block that there is not."""
    (to_bytes, to_place), (from_bytes, from_place) = target, source
    to_ids, from_ids = np.asarray(target_ids, np.int64), np.asarray(source_ids, np.int64)
    whole_rows = to_place.has_all_heads(rect) and from_place.has_all_heads(rect)
    firsts = _stretches([to_ids, from_ids], coalesce=whole_rows)
    counts = np.diff(firsts, append=len(to_ids))
    to = to_place.byte_runs(rect, to_ids[firsts], counts)
    at = from_place.byte_runs(rect, from_ids[firsts], counts)
    if (code := block_code()) is not None:
        code.copy(to_bytes, to.offsets, from_bytes, at.offsets, to.lengths)
        return
    ranges = zip(to.offsets.tolist(), at.offsets.tolist(), to.lengths.tolist(), strict=True)
    for start, begin, nbytes in ranges:
        np.copyto(to_bytes[start : start + nbytes], from_bytes[begin : begin + nbytes])
