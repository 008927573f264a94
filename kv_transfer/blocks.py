"""The bytes of a transfer's blocks in a rank's cache, and functions that move or hash them.

The canonical order of a piece's bytes is (layer, plane, block, KV head). Both sides walk their
own memory in that order, so one byte stream fits both though physical block ids and head
ranges differ. Adjacent bytes form one run; runs are cut differently on each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.native.code import MIN_HASHED_NBYTES, block_code


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Lists byte ranges of a cache, in canonical order."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def slices(self, memory: memoryview) -> list[memoryview]:
        ends = (self.offsets + self.lengths).tolist()
        return [memory[start:end] for start, end in zip(self.offsets.tolist(), ends, strict=True)]

    def parts(self, nbytes: int) -> Iterator[ByteRuns]:
        """Cuts the ranges, in order, into parts of `nbytes`; the last one may have less."""
        ends = np.cumsum(self.lengths)
        total = int(ends[-1]) if len(ends) else 0
        for start in range(0, total, nbytes):
            end = min(start + nbytes, total)
            first, last = np.searchsorted(ends, (start, end - 1), side="right")
            offsets = self.offsets[first : last + 1].copy()
            lengths = self.lengths[first : last + 1].copy()
            lengths[-1] -= int(ends[last]) - end
            before = start - int(ends[first] - self.lengths[first])
            offsets[0] += before
            lengths[0] -= before
            yield ByteRuns(offsets, lengths)


def head_nbytes(cache: torch.Tensor) -> int:
    """Returns the size of one KV head of one block, which is adjacent in memory."""
    return cache.shape[4] * cache.shape[5] * cache.element_size()


def piece_nbytes(cache: torch.Tensor, rect: Rect, count: int) -> int:
    """Returns the size of `count` blocks of a piece."""
    return rect.area * cache.shape[1] * count * head_nbytes(cache)


def byte_runs(view: CacheView, rect: Rect, block_ids: Sequence[int]) -> ByteRuns:
    """Returns the runs of `block_ids` × `rect` (in the model's coordinates, within `view.rect`)."""
    return plane_runs(view, rect, block_ids).expanded()


def plane_runs(view: CacheView, rect: Rect, block_ids: Sequence[int]) -> PlaneRuns:
    """Returns the same runs as `byte_runs`, for compiled code."""
    layout = BlockLayout.of(view)
    (firsts,), counts = _stretches([block_ids], coalesce=layout.has_all_heads(rect))
    return layout.runs(rect, firsts, counts)


@dataclass(frozen=True, slots=True)
class PlaneRuns:
    """Lists byte ranges that are the same in each of `num_planes` planes (a plane is one layer's
    keys or values). Planes are `stride` bytes long; the first begins at byte `start` of the
    cache."""

    start: int
    stride: int
    num_planes: int
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        return self.num_planes * int(self.lengths.sum())

    def expanded(self) -> ByteRuns:
        """Raises IndexError for a block that does not exist."""
        ends = self.starts + self.lengths
        if len(ends) and (self.starts.min() < 0 or ends.max() > self.stride):
            raise IndexError("no such block")
        planes = self.start + self.stride * np.arange(self.num_planes)
        offsets = planes[:, None] + self.starts[None, :]
        return ByteRuns(offsets.ravel(), np.broadcast_to(self.lengths, offsets.shape).ravel())


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Says where the blocks of a cache lie in its bytes, for this rank's cache or a peer's."""

    rect: Rect
    num_blocks: int
    head_nbytes: int
    planes: int  # of a layer

    @classmethod
    def of(cls, view: CacheView) -> BlockLayout:
        cache = view.cache
        return cls(view.rect, cache.shape[2], head_nbytes(cache), cache.shape[1])

    @property
    def nbytes(self) -> int:
        return self.planes * self.rect.area * self.num_blocks * self.head_nbytes

    def has_all_heads(self, rect: Rect) -> bool:
        """Returns whether adjacent blocks of `rect` are adjacent bytes."""
        return rect.num_heads == self.rect.num_heads

    def runs(self, rect: Rect, firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> PlaneRuns:
        """Returns the runs of stretches of adjacent blocks: where each begins, how long it is."""
        layers, heads = rect.slices_in(self.rect)
        row = self.rect.num_heads * self.head_nbytes  # of a block in a plane
        stride = self.num_blocks * row
        starts = firsts * row + heads.start * self.head_nbytes
        lengths = counts * (rect.num_heads * self.head_nbytes)
        planes = self.planes
        return PlaneRuns(
            *(planes * layers.start * stride, stride, planes * rect.num_layers, starts, lengths)
        )


def _stretches(
    block_ids: Sequence[Sequence[int]], coalesce: bool
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Finds the stretches in which every list of `block_ids` steps by one; the lists are equally
    long. Returns where they begin in each list, and their lengths. Without `coalesce` every id is
    a stretch."""
    ids = [np.asarray(each, np.int64) for each in block_ids]
    count = len(ids[0])
    if not coalesce or count < 2:
        return ids, np.ones(count, np.int64)
    broken = np.logical_or.reduce([np.diff(each) != 1 for each in ids])
    firsts = np.concatenate(([0], np.flatnonzero(broken) + 1))
    return [each[firsts] for each in ids], np.diff(firsts, append=count)


def memory_of(cache: torch.Tensor) -> memoryview:
    """Returns all bytes of a contiguous CPU cache, writable."""
    return cache.view(torch.uint8).reshape(-1).numpy().data


def gather(view: CacheView, rect: Rect, block_ids: Sequence[int]) -> torch.Tensor:
    """Returns a contiguous copy of a piece in canonical order, on the cache's device."""
    index = torch.tensor(block_ids, dtype=torch.long, device=view.cache.device)
    return _part(view, rect).index_select(2, index)


def scatter(view: CacheView, rect: Rect, block_ids: Sequence[int], staged: torch.Tensor) -> None:
    """Writes the bytes that `gather` read: `staged`, 1-D uint8 on any device."""
    part = _part(view, rect)
    index = torch.tensor(block_ids, dtype=torch.long, device=part.device)
    shape = (*part.shape[:2], len(block_ids), *part.shape[3:])
    part.index_copy_(2, index, staged.view(part.dtype).view(shape).to(part.device))


def _part(view: CacheView, rect: Rect) -> torch.Tensor:
    layers, heads = rect.slices_in(view.rect)
    return view.cache[layers, :, :, heads]


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Holds all bytes of a cache in host memory; read-only if its memory is."""

    memory: NDArray[np.uint8]
    address: int
    layout: BlockLayout

    @classmethod
    def of(cls, memory: memoryview, layout: BlockLayout) -> CacheBytes:
        data = np.frombuffer(memory, np.uint8)
        return cls(data, data.ctypes.data, layout)


def copy_blocks(
    rect: Rect,
    target: CacheBytes,
    target_ids: Sequence[int],
    source: CacheBytes,
    source_ids: Sequence[int],
) -> None:
    """Copies `rect` (within both caches) of block `source_ids[i]` to block `target_ids[i]`, for
    every i. Ranges that are adjacent on both sides are copied at once, without the interpreter
    lock. Raises IndexError for a block that does not exist."""
    to, at = _both_runs(rect, target, target_ids, source, source_ids)
    if (code := block_code()) is not None:
        code.copy(
            target.address + to.start, to.stride, to.starts,
            source.address + at.start, at.stride, at.starts,
            to.lengths, to.num_planes,
        )  # fmt: skip
        return
    for ours, theirs in zip(_slices(target, to), _slices(source, at), strict=True):
        np.copyto(ours, theirs)


def copy_hashed(
    prefix: bytes,
    rect: Rect,
    target: CacheBytes,
    target_ids: Sequence[int],
    source: CacheBytes,
    source_ids: Sequence[int],
) -> bytes:
    """Copies as `copy_blocks`, and returns the hash of the prefix and the written bytes, as
    `hash_blocks` would, without reading them again."""
    to, at = _both_runs(rect, target, target_ids, source, source_ids)
    code = block_code()
    if code is not None and len(prefix) + to.nbytes >= MIN_HASHED_NBYTES:
        return code.copy_hashed(
            prefix,
            target.address + to.start, to.stride, to.starts,
            source.address + at.start, at.stride, at.starts,
            to.lengths, to.num_planes,
        )  # fmt: skip
    hasher = xxhash.xxh3_128(prefix)
    for ours, theirs in zip(_slices(target, to), _slices(source, at), strict=True):
        np.copyto(ours, theirs)
        hasher.update(ours.data)
    return hasher.digest()


def _both_runs(
    rect: Rect,
    target: CacheBytes,
    target_ids: Sequence[int],
    source: CacheBytes,
    source_ids: Sequence[int],
) -> tuple[PlaneRuns, PlaneRuns]:
    """Returns the same stretches of blocks in both caches."""
    whole_rows = target.layout.has_all_heads(rect) and source.layout.has_all_heads(rect)
    (to_firsts, at_firsts), counts = _stretches([target_ids, source_ids], coalesce=whole_rows)
    return target.layout.runs(rect, to_firsts, counts), source.layout.runs(rect, at_firsts, counts)


def _slices(cache: CacheBytes, runs: PlaneRuns) -> list[NDArray[np.uint8]]:
    ranges = runs.expanded()
    starts, lengths = ranges.offsets.tolist(), ranges.lengths.tolist()
    return [cache.memory[at : at + nbytes] for at, nbytes in zip(starts, lengths, strict=True)]


def hash_blocks(prefix: bytes, cache: CacheBytes, runs: PlaneRuns) -> bytes:
    """Returns the XXH3 hash (128 bits) of the prefix and of the runs, plane by plane."""
    code = block_code()
    if code is not None and len(prefix) + runs.nbytes >= MIN_HASHED_NBYTES:
        first = cache.address + runs.start
        return code.hash(prefix, first, runs.stride, runs.starts, runs.lengths, runs.num_planes)
    hasher = xxhash.xxh3_128(prefix)
    for part in runs.expanded().slices(cache.memory.data):
        hasher.update(part)
    return hasher.digest()


class RunsHash:
    """Makes the hash of `hash_blocks` from parts of the runs, which come one after the other."""

    def __init__(self, prefix: bytes, cache: CacheBytes, nbytes: int) -> None:
        """`nbytes`: of all parts together."""
        self._cache = cache
        code = block_code()
        self._code = (
            code if code is not None and len(prefix) + nbytes >= MIN_HASHED_NBYTES else None
        )
        # Compiled code that moves the parts may continue it; None: only `update` can.
        self.state = None if self._code is None else self._code.begin_hash(prefix, nbytes)
        self._hasher = xxhash.xxh3_128(prefix)

    def update(self, part: ByteRuns) -> None:
        if self._code is not None and self.state is not None:
            memory = self._cache.address, len(self._cache.memory)
            self._code.update_hash(self.state, *memory, part.offsets, part.lengths)
            return
        for piece in part.slices(self._cache.memory.data):
            self._hasher.update(piece)

    def digest(self) -> bytes:
        if self._code is not None and self.state is not None:
            return self._code.end_hash(self.state)
        return self._hasher.digest()
