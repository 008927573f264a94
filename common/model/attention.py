"""Attention over the paged KV cache: the backend interface and shared code.

A step's sequences are concatenated along the token dimension. `prepare` turns their block tables
into the indices of the backend's kernels, once per step; `forward` runs once per layer with the
result.

The cache is `[layers, 2, num_blocks, kv_heads, block_size, head_dim]` (2 = key, value), head-major
inside a block. Kernels read slots after a sequence's last token and mask them, but 0 × NaN is NaN.
So a block is zeroed when its first slot is written, or NaN of its last owner would reach the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.common.core.kv_groups import KV_AUTO
from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import Angles, apply_rotary
from pdserve.common.model.staging import upload_together


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of one rank's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None  # tokens that a query attends to, itself included; None: all
    chunked: bool = False  # attends to its own chunk of `window` tokens instead
    own_scale: float | None = None  # softmax scale; None: `head_dim ** -0.5`

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.own_scale is None else self.own_scale


BlockIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of a step, in the order of their tokens. Sequence i has `starts[i]` tokens in
    the cache and computes the next `query_lens[i]`; `block_tables[i]` covers both. If blocks before
    a window were freed, table and start count from `skipped[i]` tokens into the sequence."""

    query_lens: Sequence[int]
    starts: Sequence[int]
    block_tables: Sequence[Sequence[int] | BlockIds]
    block_size: int
    skipped: Sequence[int] | None = None  # None: 0 each

    @property
    def context_lens(self) -> list[int]:
        """Per sequence, the tokens its last query attends to, including itself."""
        return [start + length for start, length in zip(self.starts, self.query_lens, strict=True)]

    @property
    def offsets(self) -> list[int]:
        """The row of each sequence's first token in the step, and the total number of rows."""
        return list(accumulate(self.query_lens, initial=0))

    def only(self, sequences: Sequence[int]) -> AttentionBatch:
        """Returns a step of these sequences alone."""
        return AttentionBatch(
            [self.query_lens[i] for i in sequences],
            [self.starts[i] for i in sequences],
            [self.block_tables[i] for i in sequences],
            self.block_size,
            None if self.skipped is None else [self.skipped[i] for i in sequences],
        )

    def used_tables(self) -> list[BlockIds]:
        """Returns the blocks each sequence reads, without those reserved for later tokens."""
        size = self.block_size
        return [
            np.asarray(table)[: -(-length // size)]
            for table, length in zip(self.block_tables, self.context_lens, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """The slot of each token's key and value: `blocks` and `slots`, both `[T]`. `fresh`: the blocks
    that this step starts to fill."""

    blocks: Tensor
    slots: Tensor
    fresh: Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, device: torch.device) -> SlotMapping:
        tables = pad_tables(batch.used_tables())
        sequence = torch.repeat_interleave(torch.tensor(batch.query_lens))
        shift = torch.tensor(batch.starts) - torch.tensor(batch.offsets[:-1])
        positions = torch.arange(len(sequence)) + shift[sequence]
        blocks = tables[sequence, positions // batch.block_size]
        slots = positions % batch.block_size
        return cls(*upload_together((blocks, slots, blocks[slots == 0]), device))

    def write(self, layer_cache: Tensor, *planes: Tensor) -> None:
        """Writes `planes` (keys and values, or latents) [T, kv_heads, D] into one layer's cache
        [planes, N, kv_heads, S, D]."""
        if len(self.fresh):
            layer_cache.index_fill_(1, self.fresh, 0)
        for plane, rows in zip(layer_cache, planes, strict=True):
            plane[self.blocks, :, self.slots] = rows


def pad_tables(tables: Sequence[BlockIds]) -> Tensor:
    """Returns the block tables as one tensor. Short ones are padded with their own first block, so
    that masked positions never read another sequence's block."""
    padded = np.empty((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    return torch.from_numpy(padded)


AttentionContext = Any  # the result of a backend's `prepare`, private to the backend


class StepBackend(ABC):
    """Computes the layers of a KV group over its cache."""

    has_fixed = False
    """Whether steps of single queries can run on fixed buffers, which CUDA graphs need."""
    kv_cache_dtype = KV_AUTO
    """The format of the cache's rows: see `kv_row`."""

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> AttentionContext:
        """Returns the context that `forward` needs, valid for all layers of this step."""

    def fixed(self, size: int, slots: SlotMapping, max_blocks: int) -> AttentionContext:
        """Returns a context with fixed buffers for steps of `size` single queries that together
        attend to at most `max_blocks` blocks. It writes to the values of `slots` at that time."""
        raise NotImplementedError

    def fixed_bytes(self, sizes: Sequence[int], blocks_per_query: int) -> int:
        """Returns the bytes that the contexts of `fixed` hold for all of `sizes`, the largest made
        first."""
        raise NotImplementedError

    def refill(self, context: AttentionContext, batch: AttentionBatch, block_ids: Tensor) -> None:
        """Fills a context of `fixed` with a step. `block_ids`: its used tables end to end, int64 on
        the device."""
        raise NotImplementedError


class AttentionBackend(StepBackend):
    """Writes a step's keys and values into the cache and attends over it."""

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: Angles | None,
        kv_cache: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """Applies `norms` and rotary embedding (if any) to the queries and keys in `qkv`
        (`[T, heads + 2 · kv_heads, D]`, may be overwritten), then calls `forward`."""
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if norms is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((norms[0](q), norms[1](k)), dim=1)
        qk = qk if angles is None else apply_rotary(qk, angles)
        q, k = qk.split((heads, kv_heads), dim=1)
        return self.forward(layer, q, k, v, kv_cache, context)

    @abstractmethod
    def forward(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """Takes q [T, heads, D], k and v [T, kv_heads, D]; returns [T, heads, D].
        Apart from rounding, a sequence's result does not depend on the other sequences."""
