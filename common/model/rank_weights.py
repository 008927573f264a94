"""The weights of a rank of a transformers model, read from its class (`hf/outline.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.common.model.stages import Stage

Sizes = tuple[tuple[int, int], ...]
"""(outputs, inputs) of matrices."""


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The weights of rank 0 of a stage, which holds most, before they are quantized."""

    nbytes: int
    linears: tuple[Sizes, ...]  # linear layers; those of a module with equal inputs are fused
    experts: tuple[tuple[int, int, int], ...]  # experts, outputs and inputs of stacked matrices
    tables: Sizes  # the head, and an embedding that is tied to it


WeightsOf = Callable[[str, int, int, Stage], RankWeights]
"""(dtype, tensor-parallel size, expert-parallel size, stage) → the weights of rank 0."""
