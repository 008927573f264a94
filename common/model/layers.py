"""Tensor-parallel layers (Megatron-LM, arXiv:1909.08053), for inference only.

A layer holds this rank's part of its weights and lists, as `Shard`s, which rows or columns of
which checkpoint tensor go where. The loader needs nothing else: it neither knows the layers
nor do the layers know files. How a linear layer's matrix is stored is its `Weight`'s affair.

    ColumnParallelLinear   splits output features   y_rank = x W_rankᵀ          no communication
    RowParallelLinear      splits input features    y = Σ_rank x_rank W_rankᵀ   all-reduce
    VocabParallelEmbedding splits the vocabulary                                all-reduce
    ParallelLMHead         splits the vocabulary                                all-gather
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.model_spec import ModelSpec, RopeSpec
from pdserve.common.model.sharding import Placement, Shard
from pdserve.common.model.weights import MatrixPart, make_weight

# ---- rotary position embeddings (arXiv:2104.09864), half-split as in Llama ----


class RotaryEmbedding:
    """Turns query and key heads by angles that grow with the position."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.inverse_frequencies = _inverse_frequencies(spec, head_dim).to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin `[T, 1, head_dim/2]` for positions `[T]`: once per step, for all layers.
        Computed in float32, where bfloat16 would lose the position."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `x` [T, H, D] turned by the step's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _stretch_llama3(frequencies, spec)
    return frequencies


def _stretch_llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Llama 3.1's rule: wavelengths well inside the original context stay, those beyond it
    stretch by `factor`, those between are blended."""
    context = spec.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)  # over the original context
    low, high = spec.low_freq_factor, spec.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / spec.factor


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

    def matrix(self, in_features: int) -> MatrixPart:
        return MatrixPart(self.name, (self.total, in_features), self.rows, slice(0, in_features))


class ColumnParallelLinear:
    """Several matrices with one input, fused into one product: `[T, in] → [T, Σ part.count]`."""

    def __init__(
        self, in_features: int, parts: Sequence[OutputPart], bias: bool, placement: Placement
    ) -> None:
        self.parts = tuple(parts)
        self.weight = make_weight([part.matrix(in_features) for part in parts], placement)
        self.bias = placement.zeros(sum(part.count for part in parts)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.linear(x, self.bias)

    def shards(self) -> Iterator[Shard]:
        yield from self.weight.shards()
        if self.bias is None:
            return
        targets = self.bias.split([part.count for part in self.parts])
        for part, target in zip(self.parts, targets, strict=True):
            yield Shard(f"{part.name}.bias", (part.total,), (part.rows,), target)


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
        columns = placement.split(in_features)
        part = MatrixPart(name, (out_features, in_features), slice(0, out_features), columns)
        self.weight = make_weight([part], placement)
        self.bias = placement.zeros(out_features) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        # One rank adds the bias, or the sum would hold it once per rank.
        bias = self.bias if self.group.rank == 0 else None
        part = self.weight.linear(x, bias)
        return self.group.all_reduce(part) if self.reduce_results else part

    def shards(self) -> Iterator[Shard]:
        yield from self.weight.shards()
        if self.bias is not None:
            shape = tuple(self.bias.shape)
            yield Shard(f"{self.name}.bias", shape, (slice(None),), self.bias)


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
