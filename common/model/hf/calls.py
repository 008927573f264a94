"""The pdserve functions that recorded graphs call, and helpers to find patterns in graphs.

Values are `[1, T, …]`, as classes of transformers have them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.hf.attention import Answers
from pdserve.common.model.hf.packed import PackedLinear
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.weights import Int8Matrix, WeightMatrix

Value = Any  # a `torch.fx.Node`, whose arguments torch types too loosely


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A module that computes an RMS norm."""

    weight: Tensor
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def after_sum(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (`residual + x`, its norm)."""
        total, normed = self.kernels.add_rms_norm(residual[0], x[0], self.weight, self.eps)
        return total[None], normed[None]


@dataclass(slots=True, eq=False)
class Product:
    """Linear layers with one input: `[…, in] → […, Σ out]`. `quantize.py` may quantize it."""

    matrix: WeightMatrix | Int8Matrix | GroupedWeight
    bias: Tensor | None
    width: int

    def __call__(self, x: Tensor) -> Tensor:
        found = self.matrix.linear(x.reshape(-1, x.shape[-1]), self.bias)
        return found.view(*x.shape[:-1], -1)

    def rows(self, ids: Tensor) -> Tensor:
        assert not isinstance(self.matrix, GroupedWeight), "tables are not packed"
        return self.matrix.rows(ids.reshape(-1)).view(*ids.shape, -1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedCall:
    """A call of a linear layer with a packed matrix, before it is fused into a `Product`."""

    name: str
    linear: PackedLinear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def like(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.linear.packed.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedProduct:
    """A product plus that of a step's LoRA adapters. `name`: the first linear layer."""

    product: Product
    name: str
    takes_step = True

    def __call__(self, step: Answers, x: Tensor) -> Tensor:
        y = self.product(x)
        step.adapt(self.name, x, y)
        return y


def part(x: Tensor, start: int, count: int) -> Tensor:
    return x.narrow(-1, start, count)


def pair(value: Value, target: Any) -> tuple[Value, Value] | None:
    """Returns the two arguments if `value` is a call of `target`."""
    if not isinstance(value, Node) or value.target is not target:
        return None
    if value.kwargs or len(value.args) != 2 or not all(isinstance(x, Node) for x in value.args):
        return None
    return value.args[0], value.args[1]


def slice_of(value: Value) -> tuple[Value, int]:
    """Returns (whole, start) of a range of the last dimension."""
    if not value.args:
        return value, 0
    source = value.args[0]
    if value.target is part:
        return source, value.args[1]
    index = value.args[1] if value.target is torch.Tensor.__getitem__ else None
    if isinstance(index, tuple) and len(index) == 2:
        dots, taken = index
        if dots is ... and isinstance(taken, slice) and taken.step is None:
            return source, taken.start or 0
    if value.target is operator.getitem and _cuts_the_last(source):
        whole, sizes = source.args[:2]
        if source.target in CHUNKS:
            sizes = size_of(whole) // sizes
        return whole, value.args[1] * sizes if isinstance(sizes, int) else sum(
            sizes[: value.args[1]]
        )
    return value, 0


def size_of(value: Value) -> int:
    """Returns the size of the last dimension."""
    return int(value.meta["shape"][-1])


CHUNKS = (torch.Tensor.chunk, torch.chunk)


def _cuts_the_last(value: Value) -> bool:
    if value.target not in (*CHUNKS, torch.Tensor.split, torch.split):
        return False
    dim = value.kwargs.get("dim", value.args[2] if len(value.args) > 2 else 0)
    whole, sizes = value.args[0], value.args[1]
    even = value.target not in CHUNKS or size_of(whole) % sizes == 0
    return even and dim in (-1, len(whole.meta["shape"]) - 1)
