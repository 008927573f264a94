"""Reads what all roles need of any decoder's `config.json`. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.common.core.checkpoint_config import check_folder, overridden, read_json
from pdserve.common.core.config_values import CONFIG, MAX_INT, check_values
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec, dtype_of, eos_of
from pdserve.common.core.rope_spec import LENGTH_DEPENDENT, ORIGINAL, rope_settings

_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "max_target_positions",
    "model_max_length",
)
_DEFAULT_CONTEXT = {
    "bloom": 2048,
    "falcon": 2048,
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), 32768),  # states have no limit
}
"""Context window of model types whose config may omit it."""
_NUMBERED_FROM_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
"""Model types that number positions from the padding token's id + 1."""
_TEXT_DEFAULTS = {
    "gemma3_text": (262208, 131072),
    "gemma4_text": (262144, 131072),
    "gemma4_unified_text": (262144, 262144),
    "llama": (32000, 2048),
    "llama4_text": (202048, 131072),
    "mistral": (32000, 131072),
    "qwen3_5_moe_text": (248320, 32768),
    "qwen3_5_text": (248320, 32768),
}
"""Default vocabulary size and context window of text models nested in a multimodal config that may
omit them, such as Gemma 3's. The values are transformers' defaults."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The properties of a decoder that every architecture's config states."""

    vocab_size: int
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path, overrides: Mapping[str, Any]) -> Outline:
        """Reads config.json with `overrides` merged in. Raises ConfigError if a key is missing."""
        check_folder(folder)
        config = overridden(read_json(folder / "config.json"), overrides)
        check_values(config, CONFIG)
        generation = folder / "generation_config.json"
        text = _text_of(config)
        return cls(
            vocab_size=_first_int(text, "vocab_size"),
            max_position_embeddings=_exact_context(text),
            dtype=dtype_of(text),
            eos_token_ids=eos_of(
                {**text, **(read_json(generation) if generation.is_file() else {})}
            ),
        )

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raises ConfigError if the model has fewer positions."""
        if max_model_len > self.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {max_model_len} exceeds the model's "
                f"{self.max_position_embeddings} positions"
            )


def read_outline(folder: Path, impl: str, overrides: Mapping[str, Any]) -> Outline | ModelSpec:
    """Returns a ModelSpec if there is native code and `impl` allows it, else an Outline.

    Raises:
        ConfigError: `impl` is "native" and there is none; else as `Outline.from_folder`.
    """
    if impl == "transformers":
        return Outline.from_folder(folder, overrides)
    try:
        return ModelSpec.from_folder(folder, overrides)
    except ConfigError:
        if impl == "native":
            raise
        return Outline.from_folder(folder, overrides)


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config") or {}
    text = {**config, **inner}
    if (kind := str(inner.get("model_type"))) in _TEXT_DEFAULTS:
        vocabulary, positions = _TEXT_DEFAULTS[kind]
        text.setdefault("vocab_size", vocabulary)
        text.setdefault("max_position_embeddings", positions)
    return text


def _exact_context(config: Mapping[str, Any]) -> int:
    """Returns the context window within which a token's rotation does not depend on the longest
    sequence of its step."""
    stated = {"n_ctx": _DEFAULT_CONTEXT.get(str(config.get("model_type"))), **config}
    longest, settings = _first_int(stated, *_CONTEXT), rope_settings(config)
    by_layer_type = [each for each in settings.values() if isinstance(each, Mapping)]
    for rope in (settings, *by_layer_type):
        if (rope.get("rope_type") or rope.get("type")) in LENGTH_DEPENDENT:
            original = rope.get(ORIGINAL) or config.get(ORIGINAL) or longest
            longest = min(longest, int(original))
    if config.get("model_type") in _NUMBERED_FROM_PADDING:
        longest -= _first_int(config, "pad_token_id", least=0) + 1
    return longest


def _first_int(config: Mapping[str, Any], *keys: str, least: int = 1) -> int:
    for key in keys:
        if isinstance(value := config.get(key), int) and not isinstance(value, bool):
            if not least <= value <= MAX_INT:
                raise ConfigError(f"config.json: {key} must be from {least} to {MAX_INT}")
            return value
    raise ConfigError(f"config.json: {' or '.join(keys)} must be an integer")
