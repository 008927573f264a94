"""Multimodal models (with towers for images or audio) of which the text model alone is served.
Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES = """
    aria aya_vision cohere2_vision cohere_compass deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu
    gemma3 gemma4 gemma4_unified got_ocr2 hyperclovax_vision_v2 idefics2 idefics3 internvl janus
    kimi_k25 lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision
    minicpmv4_6 mistral3 ovis2 qianfan_ocr qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl
    smolvlm video_llama_3 video_llava vipllava
"""
WITH_TOWERS = frozenset(_TYPES.split())
"""Their model types. `tests/models/sweep.py` checks that for text the text model alone gives what
the whole model gives. PaliGemma is not among them: its prompts attend to later tokens."""
UNSCALED = {"aya_vision", "cohere2_vision"}
"""The types that, as transformers runs them, do not multiply logits by the `logit_scale` of their
text model."""
_FLAT = {"qwen2_5_vl", "qwen2_vl"}
"""The types whose config on the Hub may be the text model's, with `vision_config` within it."""

_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Native architectures of text models whose config does not name one, by model type."""
_WITH_MROPE = {
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""Native architectures that text models are but for their rotation by the time, height and width of
images: all three are a token's position where there is no image."""


_TEXT_NAME = re.compile(
    r"(?:(?:model\.)?language_model\.)?(?P<head>lm_head\..+)"
    r"|(?:model\.)?(?:language|text)_model\.(?:model\.)?(?P<rest>.+)"
    r"|model\.(?P<own>(?:layers|embed_tokens|norm)\..+)"  # Qwen2-VL
)


def text_name(name: str) -> str | None:
    """Returns the name that a module or tensor of a nested text model has in a text-only
    checkpoint; None for other modules and tensors."""
    found = _TEXT_NAME.fullmatch(name)
    return None if found is None else found["head"] or f"model.{found['rest'] or found['own']}"


def has_towers(config: Mapping[str, Any]) -> bool:
    """Returns whether `config.json` describes one of these models."""
    kind, inner = str(config.get("model_type")), config.get("text_config")
    return kind in WITH_TOWERS and (isinstance(inner, Mapping) or (inner is None and kind in _FLAT))


def native_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the nested text model's config, or `config` itself if none is nested. End tokens,
    dtype, tied embeddings and quantization that it omits are taken from the outer config."""
    if not has_towers(config):
        return config
    inner = config.get("text_config")
    text = dict(inner or {**config, "model_type": f"{config['model_type']}_text"})
    for key in ("eos_token_id", "dtype", "torch_dtype", "quantization_config"):
        if key in config:
            text.setdefault(key, config[key])
    kind = str(text.get("model_type"))
    if kind in _WITH_MROPE:
        tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        return {
            **_without_mrope(text),
            "architectures": [_WITH_MROPE[kind]],
            "tie_word_embeddings": bool(tied),
        }
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    if not text.get("architectures"):
        named = _ARCHITECTURES.get(kind)
        text["architectures"] = [named] if named else config.get("architectures")
    return text


def _without_mrope(text: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the rotation of a model of text."""
    for place in ("rope_scaling", "rope_parameters"):
        if isinstance(given := text.get(place), Mapping):
            kept = {
                k: v for k, v in given.items() if k not in ("mrope_section", "mrope_interleaved")
            }
            for key in ("type", "rope_type"):
                if kept.get(key) == "mrope":
                    kept[key] = "default"
            text[place] = kept
    return text
