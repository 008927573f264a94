"""Multimodal models (with towers for images or audio) of which the text model alone is served.
Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TYPES = """
    aria cohere_compass deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu gemma3 gemma4 gemma4_unified
    got_ocr2 hyperclovax_vision_v2 idefics2 idefics3 internvl janus kimi_k25 lighton_ocr llama4
    llava llava_next llava_onevision mistral3 ovis2 qianfan_ocr qwen3_5 qwen3_5_moe smolvlm
    video_llama_3 vipllava
"""
WITH_TOWERS = frozenset(_TYPES.split())
"""Their model types. `tests/models/sweep.py` checks that for text the text model alone gives what
the whole model gives. PaliGemma is not among them: its prompts attend to later tokens."""

_ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Native architectures of text models whose config does not name one, by model type."""


_TEXT_NAME = re.compile(
    r"(?:(?:model\.)?language_model\.)?(?P<head>lm_head\..+)"
    r"|(?:model\.)?(?:language|text)_model\.(?:model\.)?(?P<rest>.+)"
)


def text_name(name: str) -> str | None:
    """Returns the name that a module or tensor of a nested text model has in a text-only
    checkpoint; None for other modules and tensors."""
    found = _TEXT_NAME.fullmatch(name)
    return None if found is None else found["head"] or f"model.{found['rest']}"


def has_towers(config: Mapping[str, Any]) -> bool:
    """Returns whether `config.json` describes one of these models."""
    inner = config.get("text_config")
    return config.get("model_type") in WITH_TOWERS and isinstance(inner, Mapping)


def native_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the nested text model's config, or `config` itself if none is nested. End tokens,
    dtype, tied embeddings and quantization that it omits are taken from the outer config."""
    if not has_towers(config):
        return config
    text = dict(config["text_config"])
    for key in ("eos_token_id", "dtype", "torch_dtype", "quantization_config"):
        if key in config:
            text.setdefault(key, config[key])
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    if not text.get("architectures"):
        named = _ARCHITECTURES.get(text.get("model_type", ""))
        text["architectures"] = [named] if named else config.get("architectures")
    return text
