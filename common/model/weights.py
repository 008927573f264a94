"""The matrix of a linear layer, in the form in which it stays in memory.

    PlainWeight     [out, in] in the dtype
    Int8Weight      [out, in] int8, and a scale for each output channel
    GroupedWeight   [out, in] 4- or 8-bit numbers, and a scale and a zero point for each group
                    of inputs of an output channel: AWQ and GPTQ checkpoints

CPUs with kernels of their own multiply by the first two as they are. Elsewhere int8 is turned into
the dtype anew for each product, and so are groups everywhere: time, but no lasting memory.
`common/planning/footprint.py` knows the bytes of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.quantization import Quantization
from pdserve.common.model.matrix import WeightMatrix
from pdserve.common.model.packing import PackedMatrix, pack_nibbles, unpack_nibbles
from pdserve.common.model.sharding import Shard, Sharding

INT8_MAX = 127


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """The part of a checkpoint's matrix that this rank keeps."""

    name: str  # of the module
    shape: tuple[int, int]  # of the whole matrix: outputs, inputs
    rows: slice
    columns: slice

    @property
    def count(self) -> int:
        """Rows."""
        return int(self.rows.stop - self.rows.start)


class Weight(Protocol):
    """Matrices `[out, in]` of one input, one below the other."""

    def dense(self) -> Tensor:
        """`[out, in]` in the dtype; not to be written to."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[T, in] → [T, out]`, in the dtype of `x`."""

    def shards(self) -> Iterator[Shard]:
        """This rank's parts of the checkpoint."""


def make_weight(parts: Sequence[MatrixPart], sharding: Sharding) -> Weight:
    """The weight of a layer, zero, in the form that the sharding's quantization asks for.

    Raises:
        ConfigError: the parts are not quantized alike, or numbers do not fill whole bytes.
    """
    quantization = sharding.quantization
    if quantization is None or not any(quantization.covers(part.name) for part in parts):
        return PlainWeight(parts, sharding)
    if not all(quantization.covers(part.name) for part in parts):
        names = ", ".join(part.name for part in parts)
        raise ConfigError(
            f"quantization_config: {names} are one product: all of them must be quantized or none"
        )
    if quantization.method == "int8":
        return Int8Weight(parts, sharding)
    return GroupedWeight(parts, sharding, quantization)


def make_table(part: MatrixPart, rows: int, sharding: Sharding) -> Table:
    """A rank's `[rows, hidden]` of the vocabulary, of which the last ones may stand for no token.
    int8 rounds it; AWQ and GPTQ checkpoints leave it as it is."""
    quantization = sharding.quantization
    if quantization is not None and quantization.method == "int8":
        return Int8Weight([part], sharding, rows)
    return PlainWeight([part], sharding, rows)


def _rows(parts: Sequence[MatrixPart]) -> int:
    return sum(part.count for part in parts)


def _columns(parts: Sequence[MatrixPart]) -> slice:
    """The inputs that this rank keeps, of all parts."""
    return parts[0].columns


class PlainWeight:
    """Not quantized."""

    def __init__(
        self, parts: Sequence[MatrixPart], sharding: Sharding, rows: int | None = None
    ) -> None:
        """`rows`: how many, if more than the parts'; the others stay 0."""
        self.parts = parts
        columns = _columns(parts)
        tensor = sharding.zeros(rows or _rows(parts), columns.stop - columns.start)
        self.matrix = WeightMatrix(tensor, sharding.kernels)

    def dense(self) -> Tensor:
        return self.matrix.dense()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.matrix.linear(x, bias)

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


class Int8Weight:
    """Unquantized weights, rounded while they are loaded: symmetric, so that the largest of an
    output channel is ±127. Ranks that split a channel's inputs share its scale."""

    def __init__(
        self, parts: Sequence[MatrixPart], sharding: Sharding, rows: int | None = None
    ) -> None:
        """`rows` as of `PlainWeight`."""
        self.parts = parts
        columns = _columns(parts)
        shape = (rows or _rows(parts), columns.stop - columns.start)
        values = sharding.zeros(*shape, dtype=torch.int8)
        self.matrix = WeightMatrix(values, sharding.kernels)
        self.scales = sharding.zeros(shape[0])

    @property
    def values(self) -> Tensor:
        """int8 `[out, in]`, not to be written to."""
        return self.matrix.dense()

    def dense(self) -> Tensor:
        return self.values * self.scales[:, None]

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = self.matrix.scaled_linear(x, self.scales, bias)
        return self._converted_linear(x, bias) if product is None else product

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids) * self.scales[ids, None]

    def _converted_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == torch.float16:  # which sums of products with ±127 could overflow
            return F.linear(x, self.dense(), bias)
        # Cheaper, since it scales tokens rather than weights.
        out = F.linear(x, self.values.to(x.dtype)).mul_(self.scales)
        return out if bias is None else out.add_(bias)

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
    """`[out, in]` → the step between neighbouring int8 numbers of each output channel, `[out]` in
    `dtype`; 1 where all weights are 0."""
    scales = (matrix.abs().amax(dim=1).float() / INT8_MAX).to(dtype)
    return scales.masked_fill(scales == 0, 1.0)


def round_columns(matrix: Tensor, columns: slice, dtype: torch.dtype) -> Tensor:
    """Whole rows `[out, in]` → int8 `[out, columns]`, nearest to what the scales, as they are
    rounded to `dtype`, make of them."""
    steps = channel_scales(matrix, dtype).float()[:, None]
    return (matrix[:, columns] / steps).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


Table = PlainWeight | Int8Weight
"""Weights whose rows are looked up as well."""


# ---- AWQ and GPTQ ----


class GroupedWeight:
    """`(number - zero point) * scale`.

    Groups are runs of `group_size` inputs, and a rank's share of the inputs is whole groups; or,
    where it is not (a split by ranks within a group, GPTQ's `desc_act`), `group_of` says which
    group each input is of.
    """

    def __init__(
        self, parts: Sequence[MatrixPart], sharding: Sharding, quantization: Quantization
    ) -> None:
        self.parts, self.quantization = parts, quantization
        self.dtype = sharding.dtype
        columns, inputs = _columns(parts), parts[0].shape[1]
        rows, count = _rows(parts), columns.stop - columns.start
        _check_packing(parts, count, quantization.bits)
        self.groups = slice(*quantization.groups(columns.start, columns.stop, inputs))
        shape = (rows, self.groups.stop - self.groups.start)
        packed = count // 2 if quantization.bits == 4 else count
        self.values = sharding.zeros(rows, packed, dtype=torch.uint8)
        self.zeros = sharding.zeros(*shape, dtype=torch.uint8)  # as stored: see `zero_offset`
        self.scales = sharding.zeros(*shape)
        self.group_of = self._group_of(columns, inputs, sharding.device)

    def _group_of(self, columns: slice, inputs: int, device: torch.device) -> Tensor | None:
        """int32 `[parts, in]`; with `desc_act` the checkpoint's, which is loaded later."""
        size = self.quantization.group_size or inputs
        if self.quantization.desc_act:
            count = columns.stop - columns.start
            return torch.zeros(len(self.parts), count, dtype=torch.int32, device=device)
        first, last = self.groups.start * size, self.groups.stop * size
        if size >= inputs or (first, last) == (columns.start, columns.stop):
            return None
        indices = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=device)
        return (indices // size - self.groups.start).expand(len(self.parts), -1)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dense(), bias)

    def dense(self) -> Tensor:
        if self.quantization.bits == 4:
            weight = unpack_nibbles(self.values, self.dtype)
        else:
            weight = self.values.to(self.dtype)
        zeros = self.zeros.to(self.dtype) + self.quantization.zero_offset
        if self.group_of is None:
            grouped = weight.view(*self.scales.shape, -1)
            grouped.sub_(zeros[:, :, None]).mul_(self.scales[:, :, None])
            return weight
        counts = [part.count for part in self.parts]
        per_part = (tensor.split(counts) for tensor in (weight, zeros, self.scales))
        for rows, zero, scale, index in zip(*per_part, self.group_of, strict=True):
            rows.sub_(zero.index_select(1, index)).mul_(scale.index_select(1, index))
        return weight

    def shards(self) -> Iterator[Shard]:
        counts = [part.count for part in self.parts]
        held = [tensor.split(counts) for tensor in (self.values, self.zeros, self.scales)]
        targets = zip(*held, strict=True)
        for index, (part, (values, zeros, scales)) in enumerate(
            zip(self.parts, targets, strict=True)
        ):
            yield from self._shards_of(part, values, zeros, scales)
            if self.quantization.desc_act and self.group_of is not None:
                check = partial(self._checked_groups, f"{part.name}.g_idx")
                shape, kept = part.shape[1:], (part.columns,)
                yield Shard(f"{part.name}.g_idx", shape, kept, self.group_of[index], check)

    def _shards_of(
        self, part: MatrixPart, values: Tensor, zeros: Tensor, scales: Tensor
    ) -> Iterator[Shard]:
        outputs, inputs = part.shape
        _, groups = self.quantization.groups(0, inputs, inputs)
        matrix = PackedMatrix.of(self.quantization.method, self.quantization.bits)
        to_bytes = pack_nibbles if self.quantization.bits == 4 else Tensor.contiguous
        kept, of_groups = (part.columns, part.rows), (self.groups, part.rows)
        shape = (groups, outputs)
        yield matrix.shard(f"{part.name}.qweight", (inputs, outputs), kept, values, to_bytes)
        yield matrix.along_outputs().shard(f"{part.name}.qzeros", shape, of_groups, zeros)
        yield Shard(f"{part.name}.scales", shape, of_groups, scales, torch.t)

    def _checked_groups(self, name: str, groups: Tensor) -> Tensor:
        """Raises ConfigError rather than leave it to an index out of range in a product."""
        if groups.amin() < 0 or groups.amax() >= self.groups.stop:
            raise ConfigError(f"{name} names groups beyond the {self.groups.stop} there are")
        return groups


def _check_packing(parts: Sequence[MatrixPart], count: int, bits: int) -> None:
    for part in parts:
        if part.shape[0] % 8 or part.shape[1] % 8:
            raise ConfigError(f"{part.name}: {part.shape} is not packed in whole 32-bit words")
    if bits == 4 and count % 2:
        raise ConfigError(
            f"--tensor-parallel-size leaves a rank {count} inputs of {parts[0].name}, whose "
            "4-bit weights need an even number"
        )
