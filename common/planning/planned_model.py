"""Reads the model that is planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.common.core.generic_spec import read_outline
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.model.rank_weights import WeightsOf


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A checkpoint's spec, and what ranks hold of a model of transformers."""

    spec: ModelSpec
    weights_of: WeightsOf | None = None

    @classmethod
    def from_folder(cls, folder: Path, impl: str, overrides: Mapping[str, Any]) -> PlannedModel:
        """Raises ConfigError if the model is not supported."""
        found = read_outline(folder, impl, overrides)
        if isinstance(found, ModelSpec):
            return cls(found)
        from pdserve.common.model.implementation import read_spec, read_weights_of  # torch

        spec = read_spec(folder, impl, overrides)
        return cls(spec, read_weights_of(spec, folder, overrides))
