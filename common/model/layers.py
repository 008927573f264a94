"""Tensor-parallel layers (Megatron-LM, arXiv:1909.08053), for inference only.

A layer holds this rank's part of its weights and lists, as `Shard`s, which rows or columns of
which checkpoint tensor go where. The loader needs nothing else: it neither knows the layers
nor do the layers know files.

    ColumnParallelLinear   splits output features   y_rank = x W_rankᵀ          no communication
    RowParallelLinear      splits input features    y = Σ_rank x_rank W_rankᵀ   all-reduce
    VocabParallelEmbedding splits the vocabulary                                all-reduce
    ParallelLMHead         splits the vocabulary                                all-gather
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.core.model_spec import ModelSpec
from common.distributed.all2all import All2AllManager, Replicated
from common.distributed.group import GroupCoordinator


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one checkpoint tensor that this rank keeps."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # of the whole tensor
    index: tuple[slice, ...]  # this rank's part of it
    target: Tensor  # where the part goes; may be a view into a fused weight


class Sharded(Protocol):
    """Whatever holds weights."""

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of the checkpoint."""


def shards_of(*parts: Sharded) -> Iterator[Shard]:
    """The shards of several layers, in order."""
    for part in parts:
        yield from part.shards()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank's tensors live, and the ranks it shares each layer with."""

    group: GroupCoordinator  # tensor-parallel
    device: torch.device
    dtype: torch.dtype
    all2all: All2AllManager = field(default_factory=lambda: Replicated(GroupCoordinator()))
    """Between the ranks of `group` that hold different experts; default: each holds all."""

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def split(self, total: int) -> slice:
        """This rank's equal share of `total` (a multiple of the group's size)."""
        share = total // self.group.size
        return slice(self.group.rank * share, (self.group.rank + 1) * share)


class RMSNorm:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension, computed in float32."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self.name = name
        self.eps = eps
        self.weight = placement.zeros(size)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def shards(self) -> Iterator[Shard]:
        shape = tuple(self.weight.shape)
        yield Shard(f"{self.name}.weight", shape, (slice(None),), self.weight)


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One checkpoint matrix of a fused column-parallel layer: this rank keeps `rows` of
    `total` output features."""

    name: str
    total: int
    rows: slice

    @property
    def count(self) -> int:
        return int(self.rows.stop - self.rows.start)


class ColumnParallelLinear:
    """Several matrices with one input, fused into one product: `[T, in] → [T, Σ part.count]`."""

    def __init__(
        self, in_features: int, parts: Sequence[OutputPart], bias: bool, placement: Placement
    ) -> None:
        self.parts = tuple(parts)
        rows = sum(part.count for part in parts)
        self.weight = placement.zeros(rows, in_features)
        self.bias = placement.zeros(rows) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def shards(self) -> Iterator[Shard]:
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.count)
            shape = (part.total, self.weight.shape[1])
            index = (part.rows, slice(None))
            yield Shard(f"{part.name}.weight", shape, index, self.weight[rows])
            if self.bias is not None:
                yield Shard(f"{part.name}.bias", shape[:1], index[:1], self.bias[rows])
            start = rows.stop


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections. A rank holds its share of the query heads and the KV
    heads they attend to; where ranks outnumber KV heads, a KV head lies on several ranks."""

    def __init__(self, prefix: str, spec: ModelSpec, placement: Placement) -> None:
        group, dim = placement.group, spec.head_dim
        start, end = spec.kv_head_range(group.rank, group.size)
        queries, kv = spec.num_heads * dim, spec.num_kv_heads * dim
        kv_rows = slice(start * dim, end * dim)
        parts = (
            OutputPart(f"{prefix}.q_proj", queries, placement.split(queries)),
            OutputPart(f"{prefix}.k_proj", kv, kv_rows),
            OutputPart(f"{prefix}.v_proj", kv, kv_rows),
        )
        super().__init__(spec.hidden_size, parts, spec.qkv_bias, placement)
        self.num_heads = parts[0].count // dim
        self.num_kv_heads = end - start


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Matrices of equal size, each split evenly over the ranks."""

    def __init__(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: int,
        bias: bool,
        placement: Placement,
    ) -> None:
        rows = placement.split(out_features)
        parts = [OutputPart(name, out_features, rows) for name in names]
        super().__init__(in_features, parts, bias, placement)


class RowParallelLinear:
    """Takes this rank's input features `[T, in / size]`; returns the sum over ranks `[T, out]`, or
    without `reduce_results` this rank's part of it."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: Placement,
        reduce_results: bool = True,
    ) -> None:
        self.name = name
        self.reduce_results = reduce_results
        self.group = placement.group
        self.in_features = in_features
        self.columns = placement.split(in_features)
        self.weight = placement.zeros(out_features, in_features // self.group.size)
        self.bias = placement.zeros(out_features) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        # One rank adds the bias, or the sum would hold it once per rank.
        bias = self.bias if self.group.rank == 0 else None
        part = F.linear(x, self.weight, bias)
        return self.group.all_reduce(part) if self.reduce_results else part

    def shards(self) -> Iterator[Shard]:
        shape = (self.weight.shape[0], self.in_features)
        yield Shard(f"{self.name}.weight", shape, (slice(None), self.columns), self.weight)
        if self.bias is not None:
            yield Shard(f"{self.name}.bias", shape[:1], (slice(None),), self.bias)


class _VocabParallel:
    """A `[vocab, hidden]` matrix split by rows. Every rank holds equally many; those past the
    vocabulary's end are zero and stand for no token."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        placement: Placement,
        weight: Tensor | None = None,
    ) -> None:
        """`weight` is another layer's to share (tied embeddings); absent, this layer owns one."""
        self.name = name
        self.group = placement.group
        self.vocab_size = vocab_size
        count = -(-vocab_size // self.group.size)
        self.start = min(self.group.rank * count, vocab_size)
        self.end = min(self.start + count, vocab_size)
        self.weight = placement.zeros(count, hidden_size) if weight is None else weight

    def shards(self) -> Iterator[Shard]:
        shape = (self.vocab_size, self.weight.shape[1])
        index = (slice(self.start, self.end), slice(None))
        yield Shard(f"{self.name}.weight", shape, index, self.weight[: self.end - self.start])


class VocabParallelEmbedding(_VocabParallel):
    """Token ids `[T]` → `[T, hidden]`, on every rank."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.start
        foreign = (rows < 0) | (rows >= self.end - self.start)
        part = F.embedding(rows.masked_fill(foreign, 0), self.weight)
        return self.group.all_reduce(part.masked_fill(foreign[:, None], 0.0))


class ParallelLMHead(_VocabParallel):
    """`[B, hidden]` → float32 logits `[B, vocab]`, on every rank."""

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.group.all_gather(F.linear(hidden, self.weight), dim=-1)
        return logits[:, : self.vocab_size].float()
