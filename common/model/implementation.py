"""Chooses the code that computes a model: native or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.checkpoint_config import check_folder, read_json
from pdserve.common.core.errors import ConfigError, InvalidCheckpoint
from pdserve.common.core.families import FAMILIES
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.towers import native_text
from pdserve.common.model.decoder import Decoder
from pdserve.common.model.folder import ModelFolder
from pdserve.common.model.loader import OnProgress, load_model
from pdserve.common.model.rank_weights import WeightsOf
from pdserve.common.model.sharding import Sharding
from pdserve.common.model.stages import Stage


def read_spec(folder: Path, impl: str, overrides: Mapping[str, Any]) -> ModelSpec:
    """Returns a checkpoint's spec, with `overrides` merged into its config, for `--model-impl`;
    "auto" is native where that is supported.

    Raises:
        ConfigError: the model is not supported; the message says why.
    """
    check_folder(folder)
    if impl == "transformers":
        return _describe(folder, overrides)
    try:
        return ModelSpec.from_folder(folder, overrides)
    except ConfigError as native:
        if impl == "native" or (isinstance(native, InvalidCheckpoint) and _has_native_code(folder)):
            raise
        try:
            return _describe(folder, overrides)
        except ConfigError:
            if _has_native_code(folder):
                raise native from None
            raise


def _has_native_code(folder: Path) -> bool:
    names = native_text(read_json(folder / "config.json")).get("architectures") or ()
    return any(name in FAMILIES for name in names)


def _describe(folder: Path, overrides: Mapping[str, Any]) -> ModelSpec:
    from pdserve.common.model.hf.describe import describe  # transformers takes seconds to import

    return describe(folder, overrides)


def read_weights_of(
    spec: ModelSpec, folder: Path, overrides: Mapping[str, Any]
) -> WeightsOf | None:
    """Returns the function for the ranks' weights if the model runs through transformers."""
    if spec.impl == "native":
        return None
    from pdserve.common.model.hf.outline import weights_of

    return weights_of(spec, folder, overrides)


def load_decoder(
    spec: ModelSpec,
    config: ModelConfig,
    sharding: Sharding,
    stage: Stage,
    on_progress: OnProgress | None = None,
    folder: ModelFolder | None = None,
) -> Decoder:
    """Loads this rank's part of `config.model`, or of `folder`. Raises ConfigError like
    `load_model`."""
    if spec.impl == "native":
        return load_model(spec, config, sharding, stage, on_progress, folder)
    from pdserve.common.model.hf.load import load_transformers_model

    return load_transformers_model(spec, config, sharding, stage, folder)
