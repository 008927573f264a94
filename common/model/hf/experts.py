"""Experts of transformers' classes, which it calls through its experts interface."""

from __future__ import annotations

from typing import Any

from torch import nn


def experts_of(model: nn.Module) -> list[Any]:
    """Returns the modules that have the experts of a layer."""
    return [each for each in model.modules() if hasattr(each, "_is_expert_parallel")]
