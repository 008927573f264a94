"""Describes a checkpoint of any decoder of transformers, from its `config.json` alone: its model is
built without memory and runs once, and each layer's attention says what it keeps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.generic_spec import Outline
from pdserve.common.core.model_spec import ModelSpec, RopeSpec, overridden, read_json
from pdserve.common.model.hf.attention import NAME, Answers, Style, answering

logger = logging.getLogger(__name__)

NUM_TOKENS = 3  # of the run


@dataclass(frozen=True, slots=True)
class _Call:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    style: Style


@dataclass(slots=True)
class _Recorder(Answers):
    calls: dict[int, _Call] = field(default_factory=dict)
    repeated: bool = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, style: Style) -> Tensor:
        self.repeated |= layer in self.calls
        self.calls[layer] = _Call(q.shape[1], k.shape[1], k.shape[2], v.shape[2], style)
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def model_class(config: Any) -> type[PreTrainedModel]:
    """Returns transformers' class for `config`. Raises ConfigError if there is none that fits."""
    name = (config.architectures or [type(config).__name__])[0]
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder with a decoder: only decoders are served")
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise ConfigError(f"{name} takes images or audio: only text models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{name} is not a causal language model of transformers")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not found._supports_attention_backend:
        raise ConfigError(f"{name} does not use transformers' attention interface")
    kind: type[PreTrainedModel] = found
    return kind


def read_config(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """Reads `config.json` with `overrides` merged into it; never runs code of the checkpoint.
    Raises ConfigError."""
    config = overridden(read_json(folder / "config.json"), overrides)
    if config.get("quantization_config"):
        raise ConfigError("quantized weights are served natively only, not through transformers")
    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"transformers has no model type {kind!r}, which config.json names")
    try:
        return CONFIG_MAPPING[kind].from_dict(config)
    except Exception as error:  # whatever a config class of transformers checks
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"transformers cannot read {folder}/config.json: {first}") from error


def build(config: Any) -> PreTrainedModel:
    """Returns the model on the meta device: without memory."""
    with torch.device("meta"):
        return model_class(config)._from_config(config, attn_implementation=NAME)


def describe(folder: Path, overrides: Mapping[str, Any]) -> ModelSpec:
    """Raises ConfigError, which says why, for a model that cannot run on the paged cache."""
    config = read_config(folder, overrides)
    model_class(config)
    outline = Outline.from_folder(folder, overrides)
    name = (config.architectures or [type(config).__name__])[0]
    config._experts_implementation = "batched_mm"  # without sizes that depend on the data
    recorder = _Recorder()
    try:
        model = build(config).eval()
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
        positions = torch.arange(NUM_TOKENS, device="meta")[None]
        with answering(recorder), torch.inference_mode():
            model(input_ids=tokens, position_ids=positions, use_cache=False)
    except ConfigError:
        raise
    except Exception as error:  # whatever a class of transformers does
        logger.debug("%s cannot be described", name, exc_info=True)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{name} cannot run on the paged cache: {first}") from error
    calls = _checked(name, config, recorder)
    first_call = calls[0]
    return ModelSpec(
        architecture=name,
        family=str(config.model_type),
        hidden_size=model.get_input_embeddings().weight.shape[1],
        num_layers=len(calls),
        num_heads=first_call.heads,
        num_kv_heads=first_call.kv_heads,
        head_dim=max(first_call.key_dim, first_call.value_dim),
        intermediate_size=_intermediate_size(config),
        vocab_size=outline.vocab_size,
        max_position_embeddings=outline.max_position_embeddings,
        rms_norm_eps=0.0,
        rope=RopeSpec(),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        layer_windows=tuple(call.style.window for call in calls),
        dtype=outline.dtype,
        eos_token_ids=outline.eos_token_ids,
        impl="transformers",
        num_parameters=sum(each.numel() for each in model.parameters()),
    )


def _checked(name: str, config: Any, recorder: _Recorder) -> list[_Call]:
    """Returns the calls in order of layers. Raises ConfigError unless every layer attends once, and
    all with the same heads."""
    text = config.get_text_config()
    layers, kinds = int(text.num_hidden_layers), getattr(text, "layer_types", None) or ()
    for layer in range(layers):
        if layer not in recorder.calls:
            kind = kinds[layer] if layer < len(kinds) else "a layer without attention"
            raise ConfigError(
                f"{name}: layer {layer} is {kind}, and only attention layers are supported"
            )
    calls = [recorder.calls[layer] for layer in range(layers)]
    if recorder.repeated or len(recorder.calls) != layers:
        raise ConfigError(f"{name}: its {layers} layers attend {len(recorder.calls)} times or more")
    for layer, call in enumerate(calls):
        if call.style.oddity:
            raise ConfigError(f"{name}: layer {layer}: {call.style.oddity}")
        sizes = (call.heads, call.kv_heads, call.key_dim, call.value_dim)
        if sizes != (calls[0].heads, calls[0].kv_heads, calls[0].key_dim, calls[0].value_dim):
            raise ConfigError(f"{name}: layer {layer} has other heads than layer 0")
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and chunk < text.max_position_embeddings:
        raise ConfigError(f"{name}: attention in chunks of {chunk} tokens is not supported")
    return calls


def _intermediate_size(config: Any) -> int:
    found = getattr(config.get_text_config(), "intermediate_size", None)
    return found if isinstance(found, int) else 4 * config.get_text_config().hidden_size
