"""Tells what a rank of a model of transformers holds. Its class says that, not arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.common.model.stages import Stage

Sizes = tuple[tuple[int, int], ...]
"""Outputs and inputs of matrices."""


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The weights of rank 0 of a stage, which holds most, before they are quantized."""

    nbytes: int
    linears: tuple[Sizes, ...]  # of linear layers; those of a module with as many inputs together
    experts: tuple[tuple[int, int, int], ...]  # experts, outputs and inputs of stacked matrices
    tables: Sizes  # the head, and an embedding that is tied to it


WeightsOf = Callable[[str, int, int, Stage], RankWeights]
"""Takes the dtype, the tensor- and the expert-parallel size, and the stage."""
