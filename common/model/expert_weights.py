"""Formats in memory of the matrices of a rank's experts.

StackedExperts     [experts, out, in] in the dtype, multiplied together where there is a kernel
QuantizedExperts   a weight for each expert, int8 or packed (`weights.py`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.sharding import MatrixPart, Shard, Sharding, shards_of, whole_words_of
from pdserve.common.model.weights import make_weight

Parts = Sequence[Sequence[MatrixPart]]
"""Per expert, the parts of its matrix, stacked along the outputs."""


class Experts(Protocol):
    """A matrix `[out, in]` for each expert."""

    @property
    def has_kernel(self) -> bool:
        """Whether one kernel computes all experts and reads the row counts on the device."""

    def linear(self, x: Tensor, counts: Tensor, partial: bool = False) -> Tensor:
        """Multiplies the first `counts[0]` rows of `[N, in]` by expert 0, the next by expert 1 …;
        returns `[N, out]`, with `partial` as `Weight.linear`. Experts without rows cost
        nothing."""

    def shards(self) -> Iterator[Shard]:
        """Yields this rank's parts of the checkpoint."""


def make_experts(parts: Parts, sharding: Sharding) -> Experts:
    """Returns the matrices, zero. Raises ConfigError as `make_weight`."""
    quantization, names = sharding.quantization, (each.name for part in parts for each in part)
    if quantization is not None and any(map(quantization.covers, names)):
        return QuantizedExperts(parts, sharding)
    return StackedExperts(parts, sharding)


class StackedExperts:
    """The matrices of all experts in one tensor."""

    def __init__(self, parts: Parts, sharding: Sharding) -> None:
        self.parts = parts
        rows = sum(part.count for part in parts[0])
        columns = parts[0][0].columns
        self.tensor = sharding.zeros(len(parts), rows, columns.stop - columns.start)
        """`[experts, out, in]`, in row-major order until it is packed."""
        self._packer = sharding.kernels.packer
        self._block = parts[0][0].block(whole_words_of(self.tensor.itemsize))
        self._packed = False

    @property
    def has_kernel(self) -> bool:
        return _has_kernel(self.tensor)

    def linear(self, x: Tensor, counts: Tensor, partial: bool = False) -> Tensor:
        packer, matrices, block = self._packer, self.tensor, self._block
        if packer is None or not self._packed:
            return grouped_linear(x, matrices, counts)
        out = _room(x, matrices.shape[1], partial)
        for i, rows, target in _by_expert(x, out, counts):
            packer.linear(rows, matrices[i], out=target, block=block, partial=partial)
        return out

    def shards(self) -> Iterator[Shard]:
        for parts, matrix in zip(self.parts, self.tensor, strict=True):
            targets = matrix.split([part.count for part in parts])
            for part, target in zip(parts, targets, strict=True):
                index = (part.rows, part.columns)
                yield Shard(f"{part.name}.weight", part.shape, index, target, finish=self._pack)

    def _pack(self) -> None:
        """Packs all matrices, once, if they can be packed."""
        packer = self._packer
        if packer is not None and not self._packed and packer.takes(self.tensor):
            packer.pack(self.tensor)
            self._packed = True


class QuantizedExperts:
    """Matrices in the format of the sharding's quantization. No grouped kernel takes them."""

    has_kernel = False

    def __init__(self, parts: Parts, sharding: Sharding) -> None:
        self.weights = [make_weight(each, sharding) for each in parts]
        self._outputs = sum(part.count for part in parts[0])

    def linear(self, x: Tensor, counts: Tensor, partial: bool = False) -> Tensor:
        out = _room(x, self._outputs, partial)
        for i, rows, target in _by_expert(x, out, counts):
            target.copy_(self.weights[i].linear(rows, None, partial))
        return out

    def shards(self) -> Iterator[Shard]:
        return shards_of(*self.weights)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiplies the first `counts[0]` rows of `[N, in]` by expert 0, the next by expert 1 …;
    returns `[N, out]`. `weight`: `[experts, out, in]`. Experts without rows cost nothing."""
    if len(x) and _has_kernel(weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    out = _room(x, weight.shape[1])
    for i, rows, target in _by_expert(x, out, counts):
        torch.mm(rows, weight[i].t(), out=target)
    return out


def _room(x: Tensor, outputs: int, partial: bool = False) -> Tensor:
    return x.new_empty(len(x), outputs, dtype=torch.float32 if partial else x.dtype)


def _by_expert(x: Tensor, out: Tensor, counts: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields each expert that has rows, and its rows of `x` and `out`."""
    sizes = counts.tolist()
    for i, (rows, target) in enumerate(zip(x.split(sizes), out.split(sizes), strict=True)):
        if len(rows):
            yield i, rows, target


def _has_kernel(weight: Tensor) -> bool:
    """Returns whether torch's grouped GEMM helps: bfloat16 on NVIDIA GPUs of compute capability 9
    or 10, with rows of a multiple of 16 bytes. Elsewhere it raises, or loops over experts as this
    module does and makes the host wait."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    return aligned and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
