"""Reads a checkpoint's `config.json` as a transformers config, and finds its class of models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from pdserve.common.core.checkpoint_config import overridden, read_json
from pdserve.common.core.config_values import CONFIG, GENERIC, ROPE, check_values
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.rope_spec import rope_settings
from pdserve.common.core.towers import UNSCALED, WITH_TOWERS, native_text

MAX_REASON = 160  # characters of another library's error


def model_class(config: Any) -> type[PreTrainedModel]:
    """Returns transformers' class for a config of `read_config`. Raises ConfigError if there is
    none that fits."""
    name = name_of(config)
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder with a decoder: only decoders are served")
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise ConfigError(f"{name} takes images or audio and has no text model of its own")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = f"{name} (model type {config.model_type})"
        raise ConfigError(f"{kind} is not a causal language model of transformers")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def name_of(config: Any) -> str:
    """Returns the architecture that `config.json` names."""
    return str((config.architectures or [type(config).__name__])[0])


def first_line(error: Exception) -> str:
    """Returns the first line of another library's error in a bounded length, and the second line if
    the first ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    found = " ".join(map(str.strip, lines[: 1 + lines[0].endswith(":")]))
    return found if len(found) <= MAX_REASON else f"{found[:MAX_REASON]} …"


def read_config(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """Reads `config.json` with `overrides` merged into it; of a multimodal model only the text
    model's part. Never runs code of the checkpoint. Raises ConfigError."""
    config = overridden(read_json(folder / "config.json"), overrides)
    check_values(config, CONFIG)
    text = native_text(config)
    check_values(text, GENERIC)
    for settings in _ropes(text):
        check_values(settings, ROPE, "config.json: the rope")
    config.pop("quantization_config", None)  # `_formats` reads it
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"transformers has no model type {kind!r}, which config.json names")
    try:
        known = CONFIG_MAPPING[kind]
        found = known.from_dict(known._decode_special_floats(config))  # e.g. its form of infinity
    except Exception as error:  # config classes raise errors of any type
        why = first_line(Exception(str(error.__cause__ or error).partition(". Errors:")[0]))
        raise ConfigError(f"transformers cannot read {folder}/config.json: {why}") from error
    return _text_of(found)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the rotary settings; some classes have them by type of layer."""
    yield (found := rope_settings(config))
    yield from (each for each in found.values() if isinstance(each, Mapping))


def _text_of(config: Any) -> Any:
    text = getattr(config, "text_config", None)
    if not isinstance(text, PretrainedConfig) or config.is_encoder_decoder:
        return config
    if config.model_type not in WITH_TOWERS:
        raise ConfigError(
            f"{name_of(config)} takes images or audio, and its text model alone gives other output "
            "or has not been compared"
        )
    if config.model_type in UNSCALED:
        text.logit_scale = 1.0
    text.architectures = config.architectures
    text.tie_word_embeddings = config.tie_word_embeddings
    return text
