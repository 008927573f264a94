"""A matrix of 4- or 8-bit values in memory, with a scale and a zero point per group of inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import addressof
from functools import cache, cached_property
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.quantization import Quantization
from pdserve.common.model.kernels.packed import ROWS, Grouped, Packed
from pdserve.common.model.kernels.quantized import EvenGroups, Products, Quantized
from pdserve.common.model.packing import pack_nibbles, unpack_nibbles
from pdserve.common.model.sharding import Sharding

logger = logging.getLogger(__name__)

MAX_RUN = 128  # inputs that are quantized together; more would be less precise


class Runs(NamedTuple):
    """The inputs sorted by group and cut into runs of equal length, each within one group."""

    length: int
    groups: Tensor  # int32 [runs]
    order: Tensor | None  # int32 [in]; None: already sorted

    @classmethod
    def of(cls, group_of: Tensor, bits: int, block: int) -> Runs | None:
        """Returns the longest possible runs whose length is a whole number of 32-bit words and
        divides every group and the `block`; None if there is none."""
        order = group_of.argsort(stable=True)
        groups = group_of[order]
        counts = groups.unique_consecutive(return_counts=True)[1].tolist()
        word, whole = 32 // bits, gcd(*counts, block)
        lengths = [length for length in range(word, MAX_RUN + 1, word) if whole % length == 0]
        if not lengths:
            return None
        as_they_are = bool((group_of.diff() >= 0).all())
        of_runs = groups[:: lengths[-1]].contiguous()
        return cls(lengths[-1], of_runs, None if as_they_are else order.int())


class GroupedMatrix:
    """A matrix `[out, in]`: `(number - zero point) * scale`.
    `values`, `zeros` and `scales` are in row-major order while they are loaded. `pack` then
    reorders them in place if the kernels can multiply by the packed form; otherwise each product
    dequantizes the matrix.
    """

    def __init__(
        self,
        rows: int,
        group_of: Tensor,
        groups: int,
        sharding: Sharding,
        quantization: Quantization,
        block: int | None = None,
    ) -> None:
        """`group_of`: int32 `[in]`, the group of each input; with `desc_act` loading fills it in.
        `block`: inputs that kernels sum separately (default: all)."""
        self.rows, self.group_of, self.quantization = rows, group_of, quantization
        self._block = block or len(group_of)
        self._packer, self._products = sharding.kernels.packer, sharding.kernels.products
        held = rows if self._packer is None else -(-rows // ROWS) * ROWS
        inputs, stored = len(group_of), 0 if self.quantization.symmetric else groups
        self.values = sharding.zeros(held, inputs * self.bits // 8, dtype=torch.uint8)
        self.zeros = sharding.zeros(held, stored, dtype=torch.uint8)  # without `zero_offset`
        self.scales = sharding.zeros(held, groups)
        self._runs: Runs | None = None
        self._described: Grouped | None = None  # once packed for a CPU
        self._order: Tensor | None = None  # of the inputs, once packed for a GPU
        self._quantized: Quantized | None = None

    @property
    def bits(self) -> int:
        return self.quantization.bits

    @property
    def packed(self) -> bool:
        return self._described is not None or self._quantized is not None

    @property
    def nbytes(self) -> int:
        """The bytes without padding rows."""
        held = (each[: self.rows] for each in (self.values, self.zeros, self.scales))
        index = self.group_of.nbytes if self.quantization.desc_act else 0
        return sum(each.nbytes for each in held) + index

    def take(self, others: Sequence[GroupedMatrix]) -> None:
        """Copies the rows of other matrices with the same input groups, and packs them."""
        found = zip(*(each._in_order() for each in others), strict=True)
        for target, parts in zip((self.values, self.zeros, self.scales), found, strict=True):
            rows = [part[: each.rows] for part, each in zip(parts, others, strict=True)]
            torch.cat(rows, out=target[: self.rows])
        self.pack()

    def pack(self) -> None:
        """Packs the matrix, once, after it was loaded."""
        packer = self._packer
        if self._products is not None and not self.packed:
            self._pack_for(self._products)
            return
        if self.packed or packer is None or not packer.multiplies(self.scales.dtype):
            return
        self._runs = runs = Runs.of(self.group_of, self.bits, self._block)
        if runs is None or self.values.device.type != "cpu":
            return
        packer.pack_grouped(self.values, self.bits, runs.order)
        self.scales.copy_(_interleaved(self.scales))
        self.zeros.copy_(_interleaved(self.zeros))
        self._described = Grouped(
            bits=self.bits,
            rows=self.rows,
            inputs=len(self.group_of),
            block=self._block,
            run=runs.length,
            groups=self.scales.shape[1],
            words=self.values.data_ptr(),
            order=None if runs.order is None else runs.order.data_ptr(),
            groups_of_runs=runs.groups.data_ptr(),
            scales=self.scales.data_ptr(),
            zeros=None if self.quantization.symmetric else self.zeros.data_ptr(),
            zero=self.quantization.zero_offset,
        )

    def _pack_for(self, products: Products) -> None:
        """Sorts the inputs by group, and transposes scales and zero points, if kernels of a GPU
        multiply by that."""
        groups = self.scales.shape[1]
        if (even := EvenGroups.of(self.group_of, groups)) is not None:
            zeros = None if self.quantization.symmetric else self.zeros.view(groups, -1)
            found = Quantized(
                "nibbles" if self.bits == 4 else "uint8",
                self.values,
                self.scales.view(groups, -1),
                even.size,
                even.first,
                zeros,
                self.quantization.zero_offset,
            )
            if products.takes(found):
                _reorder(self.values, self.bits, even.order)
                self.scales.copy_(_transposed(self.scales))
                self.zeros.copy_(_transposed(self.zeros))
                self._order, self._quantized = even.order, found
                return
        _warn_once(self.bits)

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        """Computes as `Weight.linear`."""
        if self._quantized is not None and self._products is not None:
            inputs = x if self._order is None else x.index_select(1, self._order)
            found = self._products.linear(inputs, self._quantized, bias)
            return F.linear(x, self.dense(), bias) if found is None else found
        if self._described is None or self._packer is None:
            return F.linear(x, self.dense(), bias)
        return self._packer.grouped_linear(x, self._described, bias, partial)

    def described(self) -> Packed | None:
        """Returns the matrix for native kernels; None unless it is packed."""
        if self._described is None:
            return None
        inputs, address = len(self.group_of), addressof(self._described)
        return Packed(self.rows, inputs, self._block, grouped=address)

    def dense(self) -> Tensor:
        """Returns `[out, in]` in the dtype."""
        values, stored, scales = (each[: self.rows] for each in self._in_order())
        dtype = scales.dtype
        weight = unpack_nibbles(values, dtype) if self.bits == 4 else values.to(dtype)
        zeros = torch.zeros_like(scales) if self.quantization.symmetric else stored.to(dtype)
        zeros = zeros + self.quantization.zero_offset
        if self._even:
            weight.view(*scales.shape, -1).sub_(zeros[:, :, None]).mul_(scales[:, :, None])
            return weight
        zeros, scales = (each.index_select(1, self.group_of) for each in (zeros, scales))
        return weight.sub_(zeros).mul_(scales)

    @cached_property
    def _even(self) -> bool:
        """Whether groups are in order and equally large. Called when weights are loaded."""
        size = -(-len(self.group_of) // self.scales.shape[1])
        even = torch.arange(len(self.group_of), device=self.group_of.device) // size
        return torch.equal(self.group_of, even.int())

    def _in_order(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values, zeros and scales in row-major order."""
        if self._quantized is not None:
            values, order = self.values, self._order
            if order is not None:
                _reorder(values := values.clone(), self.bits, order.argsort())
            return values, _back(self.zeros), _back(self.scales)
        if self._described is None or self._packer is None or self._runs is None:
            return self.values, self.zeros, self.scales
        values = self._packer.unpack_grouped(self.values, self.bits, self._runs.order)
        return values, _row_major(self.zeros), _row_major(self.scales)


def _reorder(values: Tensor, bits: int, order: Tensor | None) -> None:
    """Permutes the inputs of values in row-major order, in place."""
    if order is None:
        return
    if bits == 4:
        values.copy_(pack_nibbles(unpack_nibbles(values, torch.uint8).index_select(1, order)))
    else:
        values.copy_(values.index_select(1, order))


def _transposed(tensor: Tensor) -> Tensor:
    """Returns `[out, groups]` with its numbers in the order `[groups, out]`."""
    return tensor.t().reshape(tensor.shape)


def _back(tensor: Tensor) -> Tensor:
    """Reverses `_transposed`."""
    rows, groups = tensor.shape
    return tensor.view(groups, rows).t().contiguous()


@cache
def _warn_once(bits: int) -> None:
    logger.warning(
        "some %d-bit matrices are dequantized for each product, which is slow: kernels for GPUs "
        "need groups of equally many inputs, a multiple of 16",
        bits,
    )


def _interleaved(tensor: Tensor) -> Tensor:
    """Returns `[out, groups]` with its numbers in the order `[out / ROWS, groups, ROWS]`."""
    rows, groups = tensor.shape
    return tensor.view(rows // ROWS, ROWS, groups).transpose(1, 2).reshape(rows, groups)


def _row_major(tensor: Tensor) -> Tensor:
    """Reverses `_interleaved`."""
    rows, groups = tensor.shape
    return tensor.view(rows // ROWS, groups, ROWS).transpose(1, 2).reshape(rows, groups)
