"""Experts of transformers classes that use its experts interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pdserve.common.distributed.all2all import occurrences
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.model.grouped_weight import GroupedWeight
from pdserve.common.model.hf.parallel import Cut
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.weights import Int8Matrix


def experts_of(model: nn.Module) -> dict[str, Any]:
    """Returns name → module with the experts of a layer."""
    named = model.named_modules()
    return {name: each for name, each in named if hasattr(each, "_is_expert_parallel")}


def matrices_of(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name, parameter) of the experts' matrices, `[experts, out, in]` or transposed; none
    if the layer belongs to another stage."""
    for key in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        if (found := module._parameters[key]) is not None:
            yield key, found


def sizes_of(module: Any) -> Iterator[tuple[int, int, int]]:
    """Yields (experts, outputs, inputs) of each parameter."""
    for _, each in matrices_of(module):
        count, rows, columns = each.shape
        yield (count, columns, rows) if module.is_transposed else (count, rows, columns)


class Experts:
    """A call of a layer's experts: `[T, hidden]`, the experts of each token and their weights,
    `[T, k]` each → `[T, hidden]`."""

    def __init__(self, name: str, module: Any) -> None:
        self._name, self._module = name, module
        self._run: Callable[..., Tensor] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._run(*args, **kwargs)

    def round(self, cuts: Mapping[str, Cut], ranks: GroupCoordinator, kernels: Kernels) -> int:
        """Quantizes the matrices to int8; returns the bytes that this saves. All ranks call this
        together, because they may share the inputs of a matrix."""
        module = self._module
        before, run = 0, MatrixExperts(module)
        for key, parameter in list(matrices_of(module)):
            cut = cuts.get(f"{self._name}.{key}")
            inputs = 1 if module.is_transposed else 2
            group = ranks if cut is not None and cut.dim == inputs else GroupCoordinator()
            run.matrices[key] = _rounded(parameter.data, module.is_transposed, group, kernels)
            before += parameter.nbytes
            module._parameters[key] = None
        if run.matrices:
            self._run = run
        return before - run.nbytes


def _rounded(
    stacked: Tensor, transposed: bool, ranks: GroupCoordinator, kernels: Kernels
) -> list[Int8Matrix]:
    matrices = [each.t() if transposed else each for each in stacked]
    largest = torch.stack([each.abs().amax(dim=1) for each in matrices])
    largest = ranks.all_gather(largest[..., None], dim=2).amax(dim=2)
    pairs = zip(matrices, largest, strict=True)
    return [Int8Matrix.rounded_of(each, most, kernels) for each, most in pairs]


class MatrixExperts:
    """Computes experts one at a time, like transformers' experts interface, with matrices that are
    not parameters. `matrices`: those of each expert, by the parameter's name."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.matrices: dict[str, Sequence[Int8Matrix | GroupedWeight]] = {}

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for matrices in self.matrices.values() for each in matrices)

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x `[T, hidden]`, index and weights `[T, k]`; skips indices of other ranks' experts."""
        module, (tokens, k) = self._module, index.shape
        up = "gate_up_proj" if module.has_gate else "up_proj"
        experts = len(self.matrices[up])
        counts = occurrences(index, experts + 1)[:experts].tolist()
        order = index.reshape(-1).argsort(stable=True)[: sum(counts)]
        inner = self._product(x[order // k], up, counts)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out = self._product(inner, "down_proj", counts)
        if module.has_post_expert_norm:
            out = module.post_expert_norm(out)
        out = out * weights.reshape(-1)[order, None]
        slots = out.new_zeros(tokens * k, out.shape[1])
        slots[order] = out
        return slots.view(tokens, k, -1).sum(dim=1).to(x.dtype)

    def _product(self, rows: Tensor, name: str, counts: list[int]) -> Tensor:
        matrices = self.matrices[name]
        none: list[Tensor | None] = [None] * len(matrices)
        biases = getattr(self._module, f"{name}_bias") if self._module.has_bias else none
        parts = zip(matrices, biases, rows.split(counts), strict=True)
        found = [each.linear(part, bias) for each, bias, part in parts if len(part)]
        return torch.cat(found) if found else rows.new_empty(0, matrices[0].outputs)
