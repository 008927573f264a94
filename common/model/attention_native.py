"""Paged attention on a CPU in C++, which reads blocks in place.

Each layer makes one call for sequences with few queries (decodes, also with drafts) and one for
those with many (prefill chunks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.common.model.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    BlockIds,
)
from pdserve.common.model.kernels.native import NativeKernels, call_of
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import Angles

MAX_HEAD_DIM = 256  # `MAX_DIM` of paged.h
FEW_QUERIES = 8  # up to this many queries go to the decode kernel, each as its own sequence
NO_WINDOW = 1 << 62  # tokens: all there can be
Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def can_attend(shape: AttentionShape) -> bool:
    """Returns whether the kernels support this head size."""
    return shape.head_dim <= MAX_HEAD_DIM and shape.head_dim % 2 == 0


@dataclass(frozen=True, slots=True)
class _Decodes:
    """B queries, each a sequence to the kernel."""

    rows: Int32s  # [B] row of the token in the step
    lengths: Int32s  # [B] context length
    tables: Int32s  # [B, blocks of the longest]; the padding of shorter ones is not read


@dataclass(frozen=True, slots=True)
class _Chunks:
    """C sequences with several queries each."""

    rows: Int32s  # [C] row of the first token in the step
    counts: Int32s  # [C] queries
    starts: Int32s  # [C] tokens in the cache before them
    tables: Int32s  # as for decodes


@dataclass(frozen=True, slots=True)
class NativeContext:
    block_size: int
    slots: BlockIds  # [T] block · block_size + slot of each token
    decodes: _Decodes | None
    chunks: _Chunks | None


class NativeAttention(AttentionBackend):
    """An `AttentionBackend`."""

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        kernels: NativeKernels,
    ) -> None:
        super().__init__(shape, device, dtype)
        self._rotate_and_cache = kernels.function("rotate_and_cache")
        self._paged_decode = kernels.function("paged_decode")
        self._paged_prefill = kernels.function("paged_prefill")

    # ---- once per step ----

    def prepare(self, batch: AttentionBatch) -> NativeContext:
        counts = np.asarray(batch.query_lens, np.int64)
        starts = np.asarray(batch.starts, np.int64)
        offsets = np.cumsum(counts) - counts
        tables = _pad([np.asarray(table) for table in batch.block_tables])
        few, many = np.flatnonzero(counts <= FEW_QUERIES), np.flatnonzero(counts > FEW_QUERIES)
        return NativeContext(
            batch.block_size,
            _slots(counts, starts, offsets, tables, batch.block_size),
            _decodes(few, offsets, counts, starts, tables) if len(few) else None,
            _chunks(many, offsets, counts, starts, tables) if len(many) else None,
        )

    # ---- once per layer ----

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: Angles | None,
        kv_cache: Tensor,
        context: NativeContext,
    ) -> Tensor:
        qkv, cache, shape = qkv.contiguous(), kv_cache[layer], self.shape
        keys, values = cache[0].data_ptr(), cache[1].data_ptr()
        window = shape.window or NO_WINDOW
        cos, sin = (None, None) if angles is None else (part.data_ptr() for part in angles)
        self._rotate_and_cache(
            *call_of(qkv), len(qkv), shape.num_heads, shape.num_kv_heads, shape.head_dim,
            context.block_size, qkv.data_ptr(), *_norms(norms), cos, sin, keys, values,
            context.slots.ctypes.data,
        )  # fmt: skip
        out = qkv.new_empty(len(qkv), shape.num_heads, shape.head_dim)
        if (decodes := context.decodes) is not None:
            self._paged_decode(
                *call_of(qkv), len(decodes.rows), shape.num_heads, shape.num_kv_heads,
                shape.head_dim, context.block_size, window, shape.scale, qkv.data_ptr(),
                qkv.stride(0),
                keys, values, decodes.rows.ctypes.data, decodes.lengths.ctypes.data,
                decodes.tables.ctypes.data, decodes.tables.shape[1], out.data_ptr(),
            )  # fmt: skip
        if (chunks := context.chunks) is not None:
            self._paged_prefill(
                *call_of(qkv), len(chunks.rows), shape.num_heads, shape.num_kv_heads,
                shape.head_dim, context.block_size, window, shape.scale, qkv.data_ptr(),
                qkv.stride(0),
                keys, values, chunks.rows.ctypes.data, chunks.counts.ctypes.data,
                chunks.starts.ctypes.data, chunks.tables.ctypes.data, chunks.tables.shape[1],
                out.data_ptr(),
            )  # fmt: skip
        return out

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, context: NativeContext
    ) -> Tensor:
        return self.attend(layer, torch.cat((q, k, v), dim=1), None, None, kv_cache, context)


def _pad(tables: Sequence[BlockIds]) -> Int32s:
    padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _slots(
    counts: BlockIds, starts: BlockIds, offsets: BlockIds, tables: Int32s, size: int
) -> BlockIds:
    sequence = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(sequence)) + np.repeat(starts - offsets, counts)
    return tables[sequence, positions // size].astype(np.int64) * size + positions % size


def _chunks(
    chosen: BlockIds, offsets: BlockIds, counts: BlockIds, starts: BlockIds, tables: Int32s
) -> _Chunks:
    return _Chunks(
        offsets[chosen].astype(np.int32),
        counts[chosen].astype(np.int32),
        starts[chosen].astype(np.int32),
        tables if len(chosen) == len(tables) else np.ascontiguousarray(tables[chosen]),
    )


def _decodes(
    chosen: BlockIds, offsets: BlockIds, counts: BlockIds, starts: BlockIds, tables: Int32s
) -> _Decodes:
    """Splits sequences into single queries. A sequence's queries stay together, so that each finds
    the KV in the CPU's caches that the one before it has read."""
    counts = counts[chosen]
    sequence = np.repeat(chosen, counts)
    ahead = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _Decodes(
        (offsets[sequence] + ahead).astype(np.int32),
        (starts[sequence] + ahead + 1).astype(np.int32),
        tables if len(chosen) == len(sequence) == len(tables) else tables[sequence],
    )


def _norms(norms: tuple[RMSNorm, RMSNorm] | None) -> tuple[int | None, int | None, float]:
    if norms is None:
        return None, None, 0.0
    queries, keys = norms
    return queries.weight.data_ptr(), keys.weight.data_ptr(), queries.eps
