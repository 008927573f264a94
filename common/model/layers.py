"""Tensor-parallel layers (Megatron-LM, arXiv:1909.08053), for inference only.

A layer holds this rank's part of its weights and yields `Shard`s, which say which part of which
checkpoint tensor goes where. The loader needs nothing else, and layers know nothing about files.
The storage format of a linear layer's matrix is up to its `Weight`.

    ColumnParallelLinear   splits output features   y_rank = x W_rankᵀ          no communication
    RowParallelLinear      splits input features    y = Σ_rank x_rank W_rankᵀ   all-reduce
    MLP                    one of each              down(silu(gate x) · up x)   all-reduce
    VocabParallelEmbedding splits the vocabulary                                all-reduce
    ParallelLMHead         splits the vocabulary                                all-gather
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.sharding import MatrixPart, Shard, Sharding, shards_of
from pdserve.common.model.weights import Table, make_table, make_weight


class LoRA(ABC):
    """The LoRA adapters of a step's rows."""

    @abstractmethod
    def add(self, name: str, x: Tensor, y: Tensor, group: GroupCoordinator | None = None) -> None:
        """Adds the adapters' product with `x` `[T, in]` to `y` `[T, out]` in place; `name`: the
        layer's first matrix; `group`: ranks that share the inputs."""


class RMSNorm:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension, computed in float32."""

    def __init__(self, name: str, size: int, eps: float, sharding: Sharding) -> None:
        self.name = name
        self.eps = eps
        self.weight = sharding.zeros(size)
        self.kernels = sharding.kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (`residual + x`, its norm); the sum is `x` without a residual."""
        if residual is None:
            return x, self(x)
        return self.kernels.add_rms_norm(residual, x, self.weight, self.eps)

    def shards(self) -> Iterator[Shard]:
        shape = tuple(self.weight.shape)
        yield Shard(f"{self.name}.weight", shape, (slice(None),), self.weight)


class ColumnParallelLinear:
    """Matrices with the same input, fused into one product: `[T, in] → [T, Σ part.count]`."""

    def __init__(self, parts: Sequence[MatrixPart], bias: bool, sharding: Sharding) -> None:
        self.parts = tuple(parts)
        self.weight = make_weight(parts, sharding)
        self.bias = sharding.zeros(sum(part.count for part in parts)) if bias else None

    def __call__(self, x: Tensor, lora: LoRA | None = None) -> Tensor:
        y = self.weight.linear(x, self.bias)
        if lora is not None:
            lora.add(self.parts[0].name, x, y)
        return y

    def shards(self) -> Iterator[Shard]:
        yield from self.weight.shards()
        if self.bias is None:
            return
        targets = self.bias.split([part.count for part in self.parts])
        for part, target in zip(self.parts, targets, strict=True):
            yield Shard(f"{part.name}.bias", part.shape[:1], (part.rows,), target)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections. A rank has its share of the query heads and the KV heads
    they attend to; with more ranks than KV heads, several ranks have the same KV head."""

    def __init__(self, prefix: str, spec: ModelSpec, sharding: Sharding) -> None:
        group, dim = sharding.group, spec.head_dim
        start, end = spec.kv_head_range(group.rank, group.size)
        queries, kv = spec.num_heads * dim, spec.num_kv_heads * dim
        kv_rows = slice(start * dim, end * dim)
        hidden, columns = spec.hidden_size, slice(0, spec.hidden_size)
        parts = [
            MatrixPart(f"{prefix}.q_proj", (queries, hidden), sharding.split(queries), columns),
            MatrixPart(f"{prefix}.k_proj", (kv, hidden), kv_rows, columns),
            MatrixPart(f"{prefix}.v_proj", (kv, hidden), kv_rows, columns),
        ]
        super().__init__(parts, spec.qkv_bias, sharding)
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
        sharding: Sharding,
    ) -> None:
        shape, rows = (out_features, in_features), sharding.split(out_features)
        parts = [MatrixPart(name, shape, rows, slice(0, in_features)) for name in names]
        super().__init__(parts, bias, sharding)


class RowParallelLinear:
    """Takes this rank's input features `[T, in / size]`; returns the sum over ranks `[T, out]`.

    Native kernels sum blocks of inputs as a tree. Each rank has a branch of it, and ranks add the
    branches in float32 in the order of the tree. So results are bit-identical for every number of
    ranks that is a power of two and at most `sharding.blocks`."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        sharding: Sharding,
    ) -> None:
        self.name = name
        self.group = sharding.group
        columns = sharding.split(in_features)
        shape, rows = (out_features, in_features), slice(0, out_features)
        part = MatrixPart(name, shape, rows, columns, sharding.blocks)
        self.parts = (part,)
        self.weight = make_weight([part], sharding)
        self.bias = sharding.zeros(out_features) if bias else None

    def __call__(self, x: Tensor, lora: LoRA | None = None) -> Tensor:
        if self.group.size == 1:
            y = self.weight.linear(x, self.bias)
        else:
            y = self.finish(self.group.all_reduce(self.partial(x)), x.dtype)
        if lora is not None:
            lora.add(self.name, x, y, self.group)
        return y

    def partial(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum over ranks, the input of `finish`."""
        return self.weight.linear(x, None, partial=True)

    def finish(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds the sum over ranks, with the bias, to `dtype`."""
        return (total if self.bias is None else total + self.bias).to(dtype)

    def addend(self, x: Tensor) -> Tensor:
        """Returns this rank's addend of the result, in the dtype of `x`. Only one rank adds the
        bias, or the sum would contain it once per rank."""
        return self.weight.linear(x, self.bias if self.group.rank == 0 else None)

    def shards(self) -> Iterator[Shard]:
        yield from self.weight.shards()
        if self.bias is not None:
            shape = tuple(self.bias.shape)
            yield Shard(f"{self.name}.bias", shape, (slice(None),), self.bias)


Linear = ColumnParallelLinear | RowParallelLinear


class MLP:
    """A SwiGLU MLP (arXiv:2002.05202) with `inner` features between its two products."""

    def __init__(self, prefix: str, spec: ModelSpec, inner: int, sharding: Sharding) -> None:
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up_proj = MergedColumnParallelLinear(
            names, spec.hidden_size, inner, spec.mlp_bias, sharding
        )
        self.down_proj = RowParallelLinear(
            f"{prefix}.down_proj", inner, spec.hidden_size, spec.mlp_bias, sharding
        )
        self.kernels = sharding.kernels

    def __call__(self, x: Tensor, lora: LoRA | None = None) -> Tensor:
        return self.down_proj(self.inner(x, lora), lora)

    def inner(self, x: Tensor, lora: LoRA | None = None) -> Tensor:
        """Returns the input of `down_proj`."""
        return self.kernels.silu_and_mul(self.gate_up_proj(x, lora))

    def shards(self) -> Iterator[Shard]:
        return shards_of(self.gate_up_proj, self.down_proj)


class _VocabParallel:
    """A `[vocab, hidden]` matrix split by rows. All ranks have equally many; padding rows after the
    vocabulary's end are zero."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        sharding: Sharding,
        weight: Table | None = None,
    ) -> None:
        """`weight`: another layer's weight to share (tied embeddings)."""
        self.name = name
        self.group = sharding.group
        self.vocab_size = vocab_size
        count = -(-vocab_size // self.group.size)
        self.start = min(self.group.rank * count, vocab_size)
        self.end = min(self.start + count, vocab_size)
        if weight is None:
            shape, rows = (vocab_size, hidden_size), slice(self.start, self.end)
            part = MatrixPart(name, shape, rows, slice(0, hidden_size))
            weight = make_table(part, count, sharding)
        self.weight = weight

    def shards(self) -> Iterator[Shard]:
        return self.weight.shards()


class VocabParallelEmbedding(_VocabParallel):
    """Embeds token ids `[T]` as `[T, hidden]`, on every rank."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.weight.rows(token_ids)
        rows = token_ids - self.start
        foreign = (rows < 0) | (rows >= self.end - self.start)
        part = self.weight.rows(rows.masked_fill(foreign, 0))
        return self.group.all_reduce(part.masked_fill(foreign[:, None], 0.0))


class ParallelLMHead(_VocabParallel):
    """Computes float32 logits `[B, vocab]` of `[B, hidden]`, on every rank."""

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.group.all_gather(self.weight.linear(hidden, None), dim=-1)
        return logits[:, : self.vocab_size].float()
