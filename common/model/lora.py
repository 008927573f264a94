"""LoRA adapters in a model (arXiv:2106.09685): y = W x + scale · B A x, for the rows of a step that
have one. The product with W is one for all rows; those of each adapter then get its part.

A linear layer's matrices share their input, so their adapters are one pair: the As below each
other and the Bs, scaled, on a diagonal. Ranks of a tensor-parallel group cut them as they cut W:
rows of B where W is split by outputs, columns of A where by inputs, whose parts the layer's
all-reduce adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core.lora import AdapterFile
from pdserve.common.model.decoder import CausalLM
from pdserve.common.model.layers import MLP, LoRA
from pdserve.common.model.weights import MatrixPart


@dataclass(frozen=True, slots=True)
class Pair:
    """Of one linear layer, this rank's part."""

    a: Tensor  # [R, in]
    b: Tensor  # [out, R]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.a), self.b)


Pairs = Mapping[str, Pair]  # by the name of a layer's first matrix


@dataclass(frozen=True, slots=True)
class StepLoRA(LoRA):
    """A step's adapters, and the rows of each: int64 `[n]`, None: all there are."""

    groups: Sequence[tuple[Pairs, Tensor | None]]

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        for pairs, rows in self.groups:
            pair = pairs.get(name)
            if pair is None:
                continue
            if rows is None:
                y += pair(x)
            else:
                y.index_add_(0, rows, pair(x.index_select(0, rows)))


def load_pairs(model: CausalLM, file: AdapterFile) -> dict[str, Pair]:
    """This rank's part of an adapter, on the model's device and in its dtype."""
    device, dtype = model.attention.device, model.dtype
    tensors = safetensors.torch.load(file.weights)
    pairs = {}
    for parts in _linear_layers(model):
        changed = {part.name for part in parts}.intersection(file.modules)
        if not changed:
            continue
        a, b = [], []
        for part in parts:
            rank = file.rank if part.name in changed else 0
            whole_a, whole_b = torch.zeros(0, part.shape[1]), torch.zeros(part.shape[0], 0)
            if rank:
                whole_a, whole_b = (tensors[name].float() for name in file.tensor_names(part.name))
            a.append(whole_a[:, part.columns])
            b.append(whole_b[part.rows] * file.scale)
        pairs[parts[0].name] = Pair(
            torch.cat(a).to(device, dtype), torch.block_diag(*b).to(device, dtype)
        )
    return pairs


def _linear_layers(model: CausalLM) -> Iterator[tuple[MatrixPart, ...]]:
    for layer in model.layers:
        yield layer.attention.qkv_proj.parts
        yield layer.attention.o_proj.parts
        if isinstance(layer.mlp, MLP):
            yield layer.mlp.gate_up_proj.parts
            yield layer.mlp.down_proj.parts
