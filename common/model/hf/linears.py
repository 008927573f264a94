"""The linear layers of a model of transformers, which LoRA adapters may change."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pdserve.common.model.hf.attention import running
from pdserve.common.model.hf.packed import PackedLinear
from pdserve.common.model.hf.parallel import Cut
from pdserve.common.model.sharding import MatrixPart


def linears_of(model: Any) -> dict[str, nn.Module]:
    """Returns the linear layers that this stage has, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is PackedLinear
        or (type(module) in (nn.Linear, Conv1D) and module.weight is not None)
    }


def size_of(module: Any) -> tuple[int, int]:
    """Returns (outputs, inputs)."""
    shape = module.weight.shape
    return (shape[1], shape[0]) if isinstance(module, Conv1D) else (shape[0], shape[1])


def let_adapt(linears: Mapping[str, nn.Module]) -> None:
    """Has the run's `Answers` add LoRA products to outputs, before ranks exchange these."""

    def adapt(name: str, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        running().adapt(name, args[0], out)

    for name, module in linears.items():
        module.register_forward_hook(partial(adapt, name), prepend=True)


def part_of(
    name: str, module: nn.Module, whole: tuple[int, int], cuts: Mapping[str, Cut]
) -> MatrixPart:
    """Returns the rank's part of a linear layer; `whole`: (outputs, inputs) before the split."""
    kept = [slice(0, whole[0]), slice(0, whole[1])]
    if (cut := cuts.get(f"{name}.weight")) is not None:
        ((start, end),) = cut.ranges
        kept[cut.dim ^ isinstance(module, Conv1D)] = slice(start, end)
    return MatrixPart(name, whole, kept[0], kept[1])
