"""Weights of AWQ, GPTQ and pack-quantized checkpoints, which stay packed in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.quantization import Quantization
from pdserve.common.model.grouped_matrix import GroupedMatrix
from pdserve.common.model.kernels.packed import Packed
from pdserve.common.model.packing import PackedMatrix, pack_nibbles
from pdserve.common.model.sharding import MatrixPart, Shard, Sharding, columns_of, rows_of


class GroupedWeight:
    """Weights of AWQ, GPTQ and pack-quantized files: `(number - zero point) * scale`.

    Groups are runs of `group_size` inputs. With GPTQ's `desc_act` the checkpoint assigns inputs to
    groups, differently in each fused part, so each part has a `GroupedMatrix` of its own.
    """

    def __init__(
        self, parts: Sequence[MatrixPart], sharding: Sharding, quantization: Quantization
    ) -> None:
        self.parts, self.quantization, self._sharding = parts, quantization, sharding
        columns, inputs = columns_of(parts), parts[0].shape[1]
        _check_packing(parts, columns.stop - columns.start, quantization.bits)
        self.groups = slice(*quantization.groups(columns.start, columns.stop, inputs))
        size = quantization.group_size or inputs
        group_of = torch.arange(columns.start, columns.stop, device=sharding.device) // size
        rows = [part.count for part in parts] if quantization.desc_act else [rows_of(parts)]
        count = self.groups.stop - self.groups.start
        block, own = parts[0].block(self._fits), group_of - self.groups.start
        self.matrices = [  # with desc_act one per part
            GroupedMatrix(number, own.int(), count, sharding, quantization, block)
            for number in rows
        ]

    @classmethod
    def joined(cls, weights: Sequence[GroupedWeight]) -> GroupedWeight:
        """Returns one weight with the rows of several loaded weights that have the same input."""
        if len(weights) == 1:
            return weights[0]
        first = weights[0]
        parts = [part for each in weights for part in each.parts]
        found = cls(parts, first._sharding, first.quantization)
        matrices = [matrix for each in weights for matrix in each.matrices]
        if first.quantization.desc_act:
            found.matrices = matrices
        else:
            found.matrices[0].take(matrices)
        return found

    @property
    def outputs(self) -> int:
        return rows_of(self.parts)

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    def _fits(self, block: int) -> bool:
        """Returns whether `block` inputs are whole groups, or a group is whole blocks."""
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

    def packed(self) -> Packed | None:
        return self.matrices[0].described() if len(self.matrices) == 1 else None

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
