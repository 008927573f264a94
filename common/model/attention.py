"""Attention over the paged KV cache: the interface, and what every backend shares.

A step's sequences are concatenated along the token dimension. `prepare` turns their block
tables into whatever the backend's kernels index with, once per step; `forward` runs once per
layer with the result.

The cache is `[layers, 2, num_blocks, kv_heads, block_size, head_dim]` (2 = key, value),
head-major inside a block. Slots behind a sequence's last token are read and masked, and 0 × NaN
would not vanish: so a block is zeroed when its first slot is written, or what its last owner could
not stand would pass to the next one.
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

from pdserve.common.model.layers import RMSNorm
from pdserve.common.model.rotary import Angles, apply_rotary
from pdserve.common.model.staging import upload_together


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One rank's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


BlockIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of a step, in the order of their tokens. Sequence i computes
    `query_lens[i]` tokens after `starts[i]` that are in the cache already; `block_tables[i]`
    covers both."""

    query_lens: Sequence[int]
    starts: Sequence[int]
    block_tables: Sequence[Sequence[int] | BlockIds]
    block_size: int

    @property
    def context_lens(self) -> list[int]:
        """Tokens each sequence's last query attends to, itself included."""
        return [start + length for start, length in zip(self.starts, self.query_lens, strict=True)]

    @property
    def offsets(self) -> list[int]:
        """Where each sequence's tokens begin in the step, and where the last ones end."""
        return list(accumulate(self.query_lens, initial=0))

    def used_tables(self) -> list[BlockIds]:
        """The blocks each sequence reads, without those reserved for later tokens."""
        size = self.block_size
        return [
            np.asarray(table)[: -(-length // size)]
            for table, length in zip(self.block_tables, self.context_lens, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Where each token's key and value go: `blocks` and `slots`, both `[T]`. `fresh` are the
    blocks that the step begins to fill."""

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

    def write(self, layer_cache: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts `k`, `v` [T, kv_heads, D] into one layer's cache [2, N, kv_heads, S, D]."""
        if len(self.fresh):
            layer_cache.index_fill_(1, self.fresh, 0)
        layer_cache[0][self.blocks, :, self.slots] = k
        layer_cache[1][self.blocks, :, self.slots] = v


def pad_tables(tables: Sequence[BlockIds]) -> Tensor:
    """Block tables as one tensor. Short ones are filled up with their own first block, so that
    what a mask hides is never another sequence's."""
    padded = np.empty((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    return torch.from_numpy(padded)


AttentionContext = Any  # what a backend's `prepare` returns; nobody else looks inside


class AttentionBackend(ABC):
    """Writes a step's keys and values into the cache and attends over it."""

    has_fixed = False
    """Whether a step of single queries can run on buffers that stay, as CUDA graphs must."""

    def __init__(self, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> AttentionContext:
        """What `forward` needs to know of a step; valid for that step and all layers."""

    def fixed(self, size: int, slots: SlotMapping, max_blocks: int) -> AttentionContext:
        """A context for all steps of `size` single queries, which together attend to at most
        `max_blocks` blocks. It keeps its buffers, and writes to `slots` as they are by then."""
        raise NotImplementedError

    def refill(self, context: AttentionContext, batch: AttentionBatch, block_ids: Tensor) -> None:
        """Puts a step into a context of `fixed`. `block_ids`: its used tables end to end, int64
        on the device."""
        raise NotImplementedError

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: Angles,
        kv_cache: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """`forward` of projected heads `[T, heads + 2 · kv_heads, D]`, which may be overwritten:
        queries and keys still want their `norms`, where the model has them, and positions."""
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if norms is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((norms[0](q), norms[1](k)), dim=1)
        q, k = apply_rotary(qk, angles).split((heads, kv_heads), dim=1)
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
        """q [T, heads, D], k and v [T, kv_heads, D] → attention's output [T, heads, D].
        A sequence's result does not depend on the others in the step beyond rounding."""
