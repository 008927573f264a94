"""Weight formats of linear layers in memory.

    PlainWeight     [out, in] in the dtype
    Int8Weight      [out, in] int8, and a scale per output channel
    GroupedWeight   [out, in] 4- or 8-bit numbers, and a scale and a zero point per group of inputs
                    of an output channel: AWQ, GPTQ and pack-quantized checkpoints

Native CPU kernels multiply by all of them directly. Triton's on GPUs multiply by int8 and grouped
weights if there are few tokens. Otherwise these are dequantized for each product, which costs time
but no lasting memory. `common/planning/footprint.py` computes the bytes of each format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.kernels.packed import Packed, Packer, pointer
from pdserve.common.model.kernels.quantized import Quantized
from pdserve.common.model.sharding import (
    MatrixPart,
    Shard,
    Sharding,
    columns_of,
    rows_of,
    whole_words_of,
)

INT8_MAX = 127


class Weight(Protocol):
    """Matrices `[out, in]` with the same input, stacked."""

    def dense(self) -> Tensor:
        """Returns `[out, in]` in the dtype; read-only."""

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        """Computes `[T, in] → [T, out]` in the dtype of `x`. `partial`: leaves out the bias and
        returns this rank's part of a sum over ranks, which native kernels keep in float32."""

    def packed(self) -> Packed | None:
        """Describes the matrix, without a bias, to native kernels; None if it is not packed as they
        multiply by it, with results of whole rows."""

    def shards(self) -> Iterator[Shard]:
        """Yields this rank's parts of the checkpoint."""


def make_weight(parts: Sequence[MatrixPart], sharding: Sharding) -> Weight:
    """Returns a layer's weight, zero, in the format of the sharding's quantization.

    Raises:
        ConfigError: only some parts are quantized, or the numbers do not fill whole bytes.
    """
    quantization = sharding.quantization
    if quantization is None or not any(quantization.covers(part.name) for part in parts):
        return PlainWeight(parts, sharding)
    if not all(quantization.covers(part.name) for part in parts):
        names = ", ".join(part.name for part in parts)
        raise ConfigError(
            f"quantization_config: {names} are fused: all of them must be quantized or none"
        )
    if quantization.rounds:
        return Int8Weight(parts, sharding)
    return GroupedWeight(parts, sharding, quantization)


def make_table(part: MatrixPart, rows: int, sharding: Sharding) -> Table:
    """Returns a rank's `[rows, hidden]` of the vocabulary; the last rows may be padding. int8
    quantizes it, AWQ and GPTQ do not."""
    quantization = sharding.quantization
    if quantization is not None and quantization.rounds:
        return Int8Weight([part], sharding, rows)
    return PlainWeight([part], sharding, rows)


class WeightMatrix:
    """A matrix `[out, in]`, in row-major order while it is loaded. `pack` then reorders it in place
    for native kernels: they are faster, and a token's result does not depend on the batch."""

    def __init__(self, tensor: Tensor, kernels: Kernels, part: MatrixPart | None = None) -> None:
        """`part`: the checkpoint matrix, if its inputs are summed in blocks."""
        self._packer = kernels.packer
        whole_words = whole_words_of(tensor.itemsize)
        self._block = tensor.shape[1] if part is None else part.block(whole_words)
        self._memory = tensor if self._packer is None else self._packer.padded(tensor)
        self.tensor = self._memory[: len(tensor)]
        """The matrix, in the order of `dense()` until it is packed."""
        self.packed = False

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def pack(self) -> None:
        """Packs the matrix, once, after it was loaded."""
        if not self.packed and self._packer is not None and self._packer.takes(self._memory):
            self._packer.pack(self._memory)
            self.packed = True

    def dense(self) -> Tensor:
        """Returns `[out, in]`, read-only; a copy if packed."""
        if not self.packed or self._packer is None:
            return self.tensor
        return self._packer.unpack(self._memory)[: len(self.tensor)]

    def rows(self, ids: Tensor) -> Tensor:
        """Looks up rows: int64 `[T]` → `[T, in]`. Raises IndexError."""
        if not self.packed or self._packer is None:
            return F.embedding(ids, self.tensor)
        return self._packer.unpack(self._memory, ids)

    def linear(self, x: Tensor, bias: Tensor | None = None, partial: bool = False) -> Tensor:
        """Computes as `Weight.linear`; `x` has the matrix's dtype."""
        if not self.packed or self._packer is None:
            return F.linear(x, self.tensor, bias)
        return self._product(self._packer, x, bias, None, partial)

    def scaled_linear(
        self, x: Tensor, scales: Tensor, bias: Tensor | None, partial: bool = False
    ) -> Tensor | None:
        """Multiplies by an int8 matrix with `scales` per row; None if the kernels do not."""
        if not self.packed or self._packer is None or not self._packer.multiplies(x.dtype):
            return None
        return self._product(self._packer, x, bias, scales, partial)

    def described(self, scales: Tensor | None = None) -> Packed | None:
        """Returns the answer to `Weight.packed`."""
        if not self.packed or len(self._memory) > len(self.tensor):
            return None
        rows, inputs = self.tensor.shape
        words = self._memory.data_ptr()
        return Packed(rows, inputs, self._block, words, pointer(scales))

    def _product(
        self, packer: Packer, x: Tensor, bias: Tensor | None, scales: Tensor | None, partial: bool
    ) -> Tensor:
        rows = len(self.tensor)
        if missing := len(self._memory) - rows:
            bias = None if bias is None else F.pad(bias, (0, missing))
            scales = None if scales is None else F.pad(scales, (0, missing))
        out = packer.linear(x, self._memory, bias, scales, block=self._block, partial=partial)
        return out[:, :rows].contiguous() if missing else out


class PlainWeight:
    """A weight that is not quantized."""

    def __init__(
        self, parts: Sequence[MatrixPart], sharding: Sharding, rows: int | None = None
    ) -> None:
        """`rows`: number of rows if more than the parts'; the rest stays 0."""
        self.parts = parts
        columns = columns_of(parts)
        tensor = sharding.zeros(rows or rows_of(parts), columns.stop - columns.start)
        self.matrix = WeightMatrix(tensor, sharding.kernels, parts[0])

    def dense(self) -> Tensor:
        return self.matrix.dense()

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        return self.matrix.linear(x, bias, partial)

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids)

    def packed(self) -> Packed | None:
        return self.matrix.described()

    def shards(self) -> Iterator[Shard]:
        counts = [part.count for part in self.parts]
        targets = self.matrix.tensor[: sum(counts)].split(counts)
        for part, target in zip(self.parts, targets, strict=True):
            index = (part.rows, part.columns)
            name = f"{part.name}.weight"
            yield Shard(name, part.shape, index, target, finish=self.matrix.pack)


# ---- int8 ----


class Int8Matrix:
    """An int8 matrix `[out, in]` with a scale per output channel: symmetric, with ±127 for the
    channel's largest weight. Ranks that split a channel's inputs share its scale."""

    def __init__(
        self, values: Tensor, scales: Tensor, kernels: Kernels, part: MatrixPart | None = None
    ) -> None:
        self.matrix = WeightMatrix(values, kernels, part)
        self.scales = scales
        self._products = kernels.products
        row_major = self.matrix.tensor
        self._quantized = Quantized("int8", row_major, scales[None], size=row_major.shape[1])

    @classmethod
    def rounded_of(cls, dense: Tensor, largest: Tensor, kernels: Kernels) -> Int8Matrix:
        """Quantizes `[out, in]`. `largest` `[out]`: each channel's largest absolute weight, over
        all ranks that share its inputs."""
        scales = scales_of(largest, dense.dtype)
        values = torch.empty(dense.shape, dtype=torch.int8, device=dense.device)
        found = Int8Matrix(values, scales, kernels)
        found.matrix.tensor.copy_(rounded(dense, scales))
        found.matrix.pack()
        return found

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.scales.nbytes

    @property
    def outputs(self) -> int:
        return len(self.scales)

    @property
    def values(self) -> Tensor:
        """int8 `[out, in]`, read-only."""
        return self.matrix.dense()

    def dense(self) -> Tensor:
        return self.values * self.scales[:, None]

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        if self._products is None:
            product = self.matrix.scaled_linear(x, self.scales, bias, partial)
        else:
            product = self._products.linear(x, self._quantized, bias)
        return self._converted_linear(x, bias) if product is None else product

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids) * self.scales[ids, None]

    def packed(self) -> Packed | None:
        return self.matrix.described(self.scales)

    def _converted_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.float16:  # sums of products with ±127 could overflow it
            return F.linear(x, self.dense(), bias)
        # Scaling the output is cheaper than scaling the weights.
        out = F.linear(x, self.values.to(x.dtype)).mul_(self.scales)
        return out if bias is None else out.add_(bias)


class Int8Weight(Int8Matrix):
    """Weights quantized to int8 while they are loaded."""

    def __init__(
        self, parts: Sequence[MatrixPart], sharding: Sharding, rows: int | None = None
    ) -> None:
        """`rows`: as in `PlainWeight`."""
        self.parts = parts
        columns = columns_of(parts)
        shape = (rows or rows_of(parts), columns.stop - columns.start)
        values = sharding.zeros(*shape, dtype=torch.int8)
        super().__init__(values, sharding.zeros(shape[0]), sharding.kernels, parts[0])

    def shards(self) -> Iterator[Shard]:
        counts, dtype = [part.count for part in self.parts], self.scales.dtype
        whole = (each[: sum(counts)].split(counts) for each in (self.matrix.tensor, self.scales))
        targets = zip(*whole, strict=True)
        for part, (values, scales) in zip(self.parts, targets, strict=True):
            name, whole_rows = f"{part.name}.weight", (part.rows, slice(None))
            yield Shard(name, part.shape, whole_rows, scales, partial(channel_scales, dtype=dtype))
            round_part = partial(round_columns, columns=part.columns, dtype=dtype)
            yield Shard(name, part.shape, whole_rows, values, round_part, self.matrix.pack)


def channel_scales(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scale of each output channel of `[out, in]`, `[out]` in `dtype`; 1 if all weights
    of a channel are 0."""
    return scales_of(matrix.abs().amax(dim=1), dtype)


def scales_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales `[out]` of channels with these largest absolute weights."""
    scales = (largest.float() / INT8_MAX).to(dtype)
    return scales.masked_fill(scales == 0, 1.0)


def round_columns(matrix: Tensor, columns: slice, dtype: torch.dtype) -> Tensor:
    """Quantizes whole rows `[out, in]` to int8 `[out, columns]`, with scales rounded to `dtype`."""
    return rounded(matrix[:, columns], channel_scales(matrix, dtype))


def rounded(matrix: Tensor, scales: Tensor) -> Tensor:
    """Quantizes `[out, in]` to int8 with scales `[out]`."""
    steps = scales.float()[:, None]
    return (matrix / steps).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


Table = PlainWeight | Int8Weight
"""Weights with row look-up."""
