"""Experts of transformers' classes, which it calls through its experts interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def experts_of(model: nn.Module) -> list[Any]:
    """Returns the modules that have the experts of a layer."""
    return [each for each in model.modules() if hasattr(each, "_is_expert_parallel")]


def sizes_of(experts: Any) -> Iterator[tuple[int, int]]:
    """Yields (outputs of all experts, inputs) of the matrices of such a module."""
    for each in experts.parameters():
        if each.ndim == 3:
            count, outputs, inputs = each.shape
            if experts.is_transposed:
                outputs, inputs = inputs, outputs
            yield count * outputs, inputs
