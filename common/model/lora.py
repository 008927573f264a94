"""LoRA adapters in a model (arXiv:2106.09685): y = W x + scale · B A x, for the rows of a step that
have one. All rows share the product with W; then each adapter's product is added to its rows.

A linear layer's fused matrices share their input, so their adapters form one pair: the As stacked,
and the scaled Bs block-diagonal. Tensor-parallel ranks split them like W: rows of B if W is split
by outputs, columns of A if by inputs; then the ranks add up A x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

from pdserve.common.core.lora import AdapterFile
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.decoder import Decoder
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.layers import LoRA
from pdserve.common.model.sharding import MatrixPart
from pdserve.common.model.weights import WeightMatrix


@dataclass(frozen=True, slots=True)
class Pair:
    """This rank's part of an adapter for one linear layer."""

    a: WeightMatrix  # [R, in]
    b: WeightMatrix  # [out, R]

    def __call__(self, x: Tensor, dtype: torch.dtype, group: GroupCoordinator | None) -> Tensor:
        own = self.a.tensor.dtype
        if group is None or group.size == 1:
            inner = self.a.linear(x.to(own))
        else:
            inner = group.all_reduce(self.a.linear(x.to(own), partial=True)).to(own)
        return self.b.linear(inner).to(dtype)


Pairs = Mapping[str, Pair]  # name of a layer's first matrix → pair


@dataclass(frozen=True, slots=True)
class StepLoRA(LoRA):
    """A step's adapters, and the rows of each: int64 `[n]`, None: all rows."""

    groups: Sequence[tuple[Pairs, Tensor | None]]

    def add(self, name: str, x: Tensor, y: Tensor, group: GroupCoordinator | None = None) -> None:
        for pairs, rows in self.groups:
            pair = pairs.get(name)
            if pair is None:
                continue
            if rows is None:
                y += pair(x, y.dtype, group)
            else:
                y.index_add_(0, rows, pair(x.index_select(0, rows), y.dtype, group))


def load_pairs(model: Decoder, file: AdapterFile) -> dict[str, Pair]:
    """Loads this rank's part of an adapter, on the model's device and in its dtype."""
    device, dtype = model.device, model.dtype
    tensors = safetensors.torch.load(file.weights)
    pairs = {}
    for parts in model.adapted():
        changed = {part.name for part in parts}.intersection(file.modules)
        if not changed:
            continue
        a, b = [], []
        for part in parts:
            rank = file.rank if part.name in changed else 0
            whole_a, whole_b = torch.zeros(0, part.shape[1]), torch.zeros(part.shape[0], 0)
            if rank:
                whole_a, whole_b = (
                    tensors[name].float() for name in file.tensor_names(file.modules[part.name])
                )
            a.append(whole_a[:, part.columns])
            b.append(whole_b[part.rows] * file.scale)
        pairs[parts[0].name] = Pair(
            _packed(torch.cat(a).to(device, dtype), model.kernels, parts[0]),
            _packed(torch.block_diag(*b).to(device, dtype), model.kernels),
        )
    return pairs


def _packed(values: Tensor, kernels: Kernels, part: MatrixPart | None = None) -> WeightMatrix:
    """`part`: has the same inputs."""
    matrix = WeightMatrix(torch.empty_like(values), kernels, part)
    matrix.tensor.copy_(values)
    matrix.pack()
    return matrix
