"""Weight formats of linear layers in memory.

    PlainWeight     [out, in] in the dtype
    Int8Weight      [out, in] int8, and a scale per output channel
    GroupedWeight   [out, in] 4- or 8-bit numbers, and a scale and a zero point per group of inputs
                    of an output channel: AWQ, GPTQ and pack-quantized checkpoints

Native CPU kernels multiply by all of them directly. Otherwise int8 and grouped weights are
dequantized for each product, which costs time but no lasting memory. `common/planning/footprint.py`
computes the bytes of each format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.quantization import Quantization
from pdserve.common.model.grouped_matrix import GroupedMatrix
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.kernels.packed import Packer
from pdserve.common.model.packing import PackedMatrix, pack_nibbles
from pdserve.common.model.sharding import Shard, Sharding

INT8_MAX = 127


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """The part of a checkpoint's matrix that this rank keeps."""

    name: str  # module
    shape: tuple[int, int]  # of the whole matrix: outputs, inputs
    rows: slice
    columns: slice
    blocks: int = 1
    """Into how many blocks, a power of two, the inputs of the whole matrix are cut, each of which
    kernels sum up by itself."""

    @property
    def count(self) -> int:
        """The number of rows kept."""
        return int(self.rows.stop - self.rows.start)

    def block(self, fits: Callable[[int], bool]) -> int:
        """Returns the inputs of a block: for fewer blocks where their size does not fit; all that
        this rank keeps if they are not whole blocks."""
        blocks, own = self.blocks, self.columns.stop - self.columns.start
        while blocks > 1 and (self.shape[1] % blocks or not fits(self.shape[1] // blocks)):
            blocks //= 2
        block = self.shape[1] // blocks
        return int(own if own % block else block)


class Weight(Protocol):
    """Matrices `[out, in]` with the same input, stacked."""

    def dense(self) -> Tensor:
        """Returns `[out, in]` in the dtype; read-only."""

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        """Computes `[T, in] → [T, out]`, in the dtype of `x`; with `partial`, without bias, what is
        to be added to that of other ranks: in float32 by native kernels."""

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
    if quantization.method == "int8":
        return Int8Weight(parts, sharding)
    return GroupedWeight(parts, sharding, quantization)


def make_table(part: MatrixPart, rows: int, sharding: Sharding) -> Table:
    """Returns a rank's `[rows, hidden]` of the vocabulary; the last rows may be padding. int8
    quantizes it, AWQ and GPTQ do not."""
    quantization = sharding.quantization
    if quantization is not None and quantization.method == "int8":
        return Int8Weight([part], sharding, rows)
    return PlainWeight([part], sharding, rows)


def _rows(parts: Sequence[MatrixPart]) -> int:
    return sum(part.count for part in parts)


def _columns(parts: Sequence[MatrixPart]) -> slice:
    """Returns the inputs that this rank keeps, equal for all parts."""
    return parts[0].columns


def whole_words_of(itemsize: int) -> Callable[[int], bool]:
    """Returns whether so many numbers fill words of kernels."""
    return lambda inputs: inputs * itemsize % 4 == 0


class WeightMatrix:
    """A matrix `[out, in]`, in row-major order while it is loaded. `pack` then reorders it in place
    if the kernels multiply it in their own order, faster, and each token alike in every batch."""

    def __init__(self, tensor: Tensor, kernels: Kernels, part: MatrixPart | None = None) -> None:
        """`part`: of which the inputs are, all if None."""
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
        columns = _columns(parts)
        tensor = sharding.zeros(rows or _rows(parts), columns.stop - columns.start)
        self.matrix = WeightMatrix(tensor, sharding.kernels, parts[0])

    def dense(self) -> Tensor:
        return self.matrix.dense()

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        return self.matrix.linear(x, bias, partial)

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids)

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

    @classmethod
    def rounded_of(cls, dense: Tensor, largest: Tensor, kernels: Kernels) -> Int8Matrix:
        """Rounds `[out, in]`, whose channels' largest weights, with those of other ranks, are
        `largest` `[out]`."""
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
    def values(self) -> Tensor:
        """int8 `[out, in]`, read-only."""
        return self.matrix.dense()

    def dense(self) -> Tensor:
        return self.values * self.scales[:, None]

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        product = self.matrix.scaled_linear(x, self.scales, bias, partial)
        return self._converted_linear(x, bias) if product is None else product

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids) * self.scales[ids, None]

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
        columns = _columns(parts)
        shape = (rows or _rows(parts), columns.stop - columns.start)
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
    """Returns the scales of channels `[out]` whose largest weights are these."""
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


# ---- AWQ, GPTQ and pack-quantized ----


class GroupedWeight:
    """Weights of AWQ, GPTQ and pack-quantized files: `(number - zero point) * scale`.

    Groups are runs of `group_size` inputs. With GPTQ's `desc_act` the checkpoint assigns inputs to
    groups, for each part: then each has a matrix of its own.
    """

    def __init__(
        self, parts: Sequence[MatrixPart], sharding: Sharding, quantization: Quantization
    ) -> None:
        self.parts, self.quantization = parts, quantization
        columns, inputs = _columns(parts), parts[0].shape[1]
        _check_packing(parts, columns.stop - columns.start, quantization.bits)
        self.groups = slice(*quantization.groups(columns.start, columns.stop, inputs))
        size = quantization.group_size or inputs
        group_of = torch.arange(columns.start, columns.stop, device=sharding.device) // size
        rows = [part.count for part in parts] if quantization.desc_act else [_rows(parts)]
        count = self.groups.stop - self.groups.start
        block, own = parts[0].block(self._fits), group_of - self.groups.start
        self.matrices = [  # each with group ids of its own
            GroupedMatrix(number, own.int(), count, sharding, quantization, block)
            for number in rows
        ]

    def _fits(self, block: int) -> bool:
        """Returns whether blocks of so many inputs, in order, have whole groups or these blocks."""
        size = self.quantization.group_size or self.parts[0].shape[1]
        nested = block % size == 0 or size % block == 0
        words = block * self.quantization.bits % 32 == 0
        return nested and words and not self.quantization.desc_act

    def linear(self, x: Tensor, bias: Tensor | None, partial: bool = False) -> Tensor:
        if len(self.matrices) == 1:
            return self.matrices[0].linear(x, bias, partial)
        counts = [matrix.rows for matrix in self.matrices]
        biases = [None] * len(counts) if bias is None else bias.split(counts)
        pairs = zip(self.matrices, biases, strict=True)
        return torch.cat([matrix.linear(x, part, partial) for matrix, part in pairs], dim=1)

    def dense(self) -> Tensor:
        return torch.cat([matrix.dense() for matrix in self.matrices])

    def shards(self) -> Iterator[Shard]:
        counts = [part.count for part in self.parts]
        for index, part in enumerate(self.parts):
            matrix = self.matrices[index if self.quantization.desc_act else 0]
            first = 0 if self.quantization.desc_act else sum(counts[:index])
            rows = slice(first, first + part.count)
            yield from self._shards_of(part, matrix, rows)
            if self.quantization.desc_act:
                prefix = "weight_" if self._compressed else ""
                name = f"{part.name}.{prefix}g_idx"
                check = partial(self._checked_groups, name)
                yield Shard(name, part.shape[1:], (part.columns,), matrix.group_of, check)

    def _shards_of(self, part: MatrixPart, held: GroupedMatrix, rows: slice) -> Iterator[Shard]:
        outputs, inputs = part.shape
        _, groups = self.quantization.groups(0, inputs, inputs)
        matrix = PackedMatrix.of(self.quantization.method, self.quantization.bits)
        to_bytes = pack_nibbles if self.quantization.bits == 4 else Tensor.contiguous
        kept, of_groups = (part.rows, part.columns), (part.rows, self.groups)
        shape = (outputs, groups)
        values, scales = held.values[rows], held.scales[rows]
        shard = matrix.shard(part.name, (outputs, inputs), kept, values, to_bytes)
        yield replace(shard, finish=held.pack)
        if not self.quantization.symmetric:
            yield matrix.of_zeros().shard(part.name, shape, of_groups, held.zeros[rows])
        if self._compressed:
            yield Shard(f"{part.name}.weight_scale", shape, of_groups, scales)
        else:
            yield Shard(f"{part.name}.scales", shape[::-1], of_groups[::-1], scales, torch.t)

    @property
    def _compressed(self) -> bool:
        return self.quantization.method == "compressed-tensors"

    def _checked_groups(self, name: str, groups: Tensor) -> Tensor:
        """Raises ConfigError for group ids out of range, which would fail later in a product."""
        if groups.amin() < 0 or groups.amax() >= self.groups.stop:
            raise ConfigError(f"{name} has group ids beyond the {self.groups.stop} groups")
        return groups


def _check_packing(parts: Sequence[MatrixPart], count: int, bits: int) -> None:
    for part in parts:
        if part.shape[0] % 8 or part.shape[1] % 8:
            raise ConfigError(f"{part.name}: {part.shape} does not fill whole 32-bit words")
    if bits == 4 and count % 2:
        raise ConfigError(
            f"--tensor-parallel-size leaves a rank {count} inputs of {parts[0].name}, whose "
            "4-bit weights need an even number"
        )
