"""Which model serves when no --model is given."""

from __future__ import annotations

from dataclasses import replace

from common.config.schema import ModelConfig
from common.model.embedded import NAME, ensure_embedded_model


def resolve_model(config: ModelConfig) -> ModelConfig:
    """The config itself, or with no `model` the embedded one, made ready on first use.

    Raises:
        ConfigError: the embedded model is not installed.
    """
    if config.model is not None:
        return config
    name = config.served_model_name or NAME
    return replace(config, model=str(ensure_embedded_model()), served_model_name=name)
