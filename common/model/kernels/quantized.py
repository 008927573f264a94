"""Quantized matrices as kernels for GPUs read them: row by row, converted in registers.

On a CPU `packed.py` has the order in which native kernels read.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Format = Literal["int8", "uint8", "nibbles"]


class Quantized(NamedTuple):
    """A matrix `[out, in]`: `(number - zero point) * scale`. Input i belongs to group
    `(first + i) // size`."""

    format: Format
    values: Tensor  # int8 or uint8 [out, in]; nibbles: uint8 [out, in / 2] (`pack_nibbles`)
    scales: Tensor  # [groups, out]
    size: int  # inputs of a group
    first: int = 0  # inputs of the first group that other ranks have
    zeros: Tensor | None = None  # uint8 [groups, out]
    zero: int = 0  # added to zero points

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * (2 if self.format == "nibbles" else 1)


class Products(Protocol):
    """Multiplies by quantized matrices on a GPU."""

    token_counts: tuple[int, ...]
    """Numbers of tokens that together use every kernel: a node computes them before it is ready."""

    def takes(self, matrix: Quantized) -> bool:
        """Returns whether the kernels multiply by such a matrix."""

    def linear(self, x: Tensor, matrix: Quantized, bias: Tensor | None) -> Tensor | None:
        """Multiplies `x` `[T, in]` by a matrix that `takes` takes; returns `[T, out]` in the dtype
        of `x`. None: with so many tokens a product with the dequantized matrix is faster."""


class EvenGroups(NamedTuple):
    """The inputs sorted by group: all groups have `size` inputs, except that other ranks may have
    the `first` inputs of the first group, and some of the last."""

    size: int
    first: int
    order: Tensor | None  # int32 [in]; None: already sorted

    @classmethod
    def of(cls, group_of: Tensor, groups: int) -> EvenGroups | None:
        """Returns None if groups are not so, as when ranks split the inputs of `desc_act`."""
        order = group_of.argsort(stable=True)
        ordered = group_of[order]
        counts = ordered.unique_consecutive(return_counts=True)[1].tolist()
        size = max(counts)
        first = size - counts[0] if groups > 1 else 0
        places = torch.arange(len(group_of), device=group_of.device)
        if len(counts) != groups or not torch.equal(ordered.long(), (places + first) // size):
            return None
        in_order = bool((group_of.diff() >= 0).all())
        return cls(size, first, None if in_order else order.int())
