"""Paged attention in C++ on a CPU. It reads blocks in place and computes all sequences of a step in
one call per layer, decodes and prefill chunks alike. A token's result depends only on its position
and on the tokens it attends to, not on the rest of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.common.core.kv_groups import KV_AUTO
from pdserve.common.model.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    BlockIds,
)
from pdserve.common.model.kernels.native import NativeKernels, call_of
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import Angles

FORMATS = {KV_AUTO: 0, "int8": 1, "fp8_e4m3": 2}  # `KVFormat` of kv_rows.h
NO_WINDOW = 1 << 62  # tokens; more than any context
Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def can_attend(shape: AttentionShape) -> bool:
    """Returns whether the kernels support this head size."""
    return shape.head_dim % 2 == 0


@dataclass(frozen=True, slots=True)
class NativeContext:
    """B sequences of a step with T tokens."""

    block_size: int
    slots: BlockIds  # [T] block · block_size + slot of each token
    rows: Int32s  # [B] row of the first token in the step
    counts: Int32s  # [B] tokens to compute
    starts: Int32s  # [B] tokens in the cache before them, from `skipped` on
    skipped: Int32s  # [B] tokens before the first one of the table
    tables: Int32s  # [B, blocks of the longest]; the padding of shorter ones is not read


class NativeAttention(AttentionBackend):
    """An `AttentionBackend`."""

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        kernels: NativeKernels,
        kv_cache_dtype: str = KV_AUTO,
    ) -> None:
        super().__init__(shape, device, dtype)
        self.kv_cache_dtype = kv_cache_dtype
        self.format = FORMATS[kv_cache_dtype]
        self._rotate_and_cache = kernels.function("rotate_and_cache")
        self._paged_attention = kernels.function("paged_attention")

    # ---- once per step ----

    def prepare(self, batch: AttentionBatch) -> NativeContext:
        counts = np.asarray(batch.query_lens, np.int64)
        starts = np.asarray(batch.starts, np.int64)
        offsets = np.cumsum(counts) - counts
        tables = pad([np.asarray(table) for table in batch.block_tables])
        skipped = np.zeros(len(counts)) if batch.skipped is None else batch.skipped
        return NativeContext(
            batch.block_size,
            _slots(counts, starts, offsets, tables, batch.block_size),
            rows=offsets.astype(np.int32),
            counts=counts.astype(np.int32),
            starts=starts.astype(np.int32),
            skipped=np.asarray(skipped, np.int32),
            tables=tables,
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
        cos, sin = (None, None) if angles is None else (part.data_ptr() for part in angles)
        self._rotate_and_cache(
            *call_of(qkv), len(qkv), shape.num_heads, shape.num_kv_heads, shape.head_dim,
            context.block_size, self.format, qkv.data_ptr(), *_norms(norms), cos, sin, keys,
            values, context.slots.ctypes.data,
        )  # fmt: skip
        return self.attend_cached(qkv, cache[0], cache[1], shape.scale, context)

    def attend_cached(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, context: NativeContext
    ) -> Tensor:
        """Attends with the first `num_heads` rows of each token of `q` `[T, …, D]` to a layer's
        keys and values, both `[N, kv_heads, S, D]`; returns `[T, num_heads, D]`."""
        shape = self.shape
        out = q.new_empty(len(q), shape.num_heads, shape.head_dim)
        self._paged_attention(
            *call_of(q), len(context.rows), shape.num_heads, shape.num_kv_heads, shape.head_dim,
            context.block_size, self.format, shape.window or NO_WINDOW, shape.chunked, scale,
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(),
            context.rows.ctypes.data, context.counts.ctypes.data, context.starts.ctypes.data,
            context.skipped.ctypes.data, context.tables.ctypes.data, context.tables.shape[1],
            out.data_ptr(),
        )  # fmt: skip
        return out

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, context: NativeContext
    ) -> Tensor:
        return self.attend(layer, torch.cat((q, k, v), dim=1), None, None, kv_cache, context)


def pad(tables: Sequence[BlockIds]) -> Int32s:
    """Returns block tables as one array; the padding of shorter ones is 0."""
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


def _norms(norms: tuple[RMSNorm, RMSNorm] | None) -> tuple[int | None, int | None, float]:
    if norms is None:
        return None, None, 0.0
    queries, keys = norms
    return queries.weight.data_ptr(), keys.weight.data_ptr(), queries.eps
