"""Translates a GGUF file's metadata to transformers' `config.json`.

Keys are llama.cpp's: `qwen3.block_count`, `qwen3.attention.head_count` …
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pdserve.common.core.errors import ConfigError
from pdserve.demo_model.gguf_file import GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ROPE_FACTORS = "rope_freqs.weight"
# Rope scaling of Llama 3.1 and later; a file has only the factors that result from it.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_CONTROL = 3  # type of tokens that are not text
# Tokens that end an answer, even if the file names only one of them.
ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end|>",
        "</s>",
    }
)


def architecture_of(file: GGUFFile) -> str:
    """Returns transformers' name of the model's class.

    Raises:
        ConfigError: no native code computes the architecture.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF files of architecture {name!r} are not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return "MixtralForCausalLM"
    return ARCHITECTURES[name]


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Returns `config.json` without `quantization_config`.

    Raises:
        ConfigError: a key is missing, or the model is one that no native code computes.
    """
    architecture, prefix = architecture_of(file), file.architecture
    _check_layers(file)
    heads, hidden = file.require(f"{prefix}.attention.head_count"), _hidden(file)
    head_dim = file.metadata.get(f"{prefix}.attention.key_length", hidden // heads)
    _check(file, head_dim)
    config = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": hidden,
        "intermediate_size": file.require(f"{prefix}.feed_forward_length"),
        "num_hidden_layers": file.require(f"{prefix}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.metadata.get(f"{prefix}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.require(f"{prefix}.context_length"),
        # A float32 in the file: 1e-5 reads as 9.999999747e-6.
        "rms_norm_eps": round(file.require(f"{prefix}.attention.layer_norm_rms_epsilon"), 10),
        "rope_parameters": _rope(file, head_dim),
        "vocab_size": file.shape_of("token_embd.weight")[0],
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config | _experts(file, architecture)


def _hidden(file: GGUFFile) -> int:
    return int(file.require(f"{file.architecture}.embedding_length"))


def _check(file: GGUFFile, head_dim: int) -> None:
    """Raises ConfigError for settings that native code does not support."""
    prefix, metadata = file.architecture, file.metadata
    expected = {
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "leading_dense_block_count": 0,
        "attention.sliding_window": 0,
    }
    for key, value in expected.items():
        if (found := metadata.get(f"{prefix}.{key}", value)) != value:
            raise ConfigError(
                f"{file.path}: {prefix}.{key} {found} is not supported; supported: {value}"
            )


def _check_layers(file: GGUFFile) -> None:
    """Raises ConfigError for sizes that are a list."""
    prefix, metadata = file.architecture, file.metadata
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(metadata.get(f"{prefix}.{key}"), list):
            raise ConfigError(f"{file.path}: {prefix}.{key} differs from layer to layer")


def _dtype(file: GGUFFile) -> str:
    """Returns the dtype of the matrices; bfloat16 if some are quantized."""
    kinds = file.kinds(name for name, each in file.tensors.items() if len(each.shape) > 1)
    return {("F32",): "float32", ("F16",): "float16", ("F16", "F32"): "float16"}.get(
        tuple(kinds), "bfloat16"
    )


def _experts(file: GGUFFile, architecture: str) -> dict[str, Any]:
    prefix = file.architecture
    if not file.metadata.get(f"{prefix}.expert_count"):
        return {}
    count = "num_local_experts" if architecture == "MixtralForCausalLM" else "num_experts"
    inner = file.shape_of("blk.0.ffn_gate_exps.weight")[1]
    found = {
        count: file.require(f"{prefix}.expert_count"),
        "num_experts_per_tok": file.require(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": inner,
        # Not in the file: llama.cpp has it in the code of each architecture.
        "norm_topk_prob": architecture != "Qwen2MoeForCausalLM",
    }
    if architecture == "MixtralForCausalLM":
        found["intermediate_size"] = inner
    if architecture == "Qwen2MoeForCausalLM":
        found["shared_expert_intermediate_size"] = file.shape_of("blk.0.ffn_gate_shexp.weight")[0]
    return found


# ---- rotary positions ----


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    key = f"{file.architecture}.rope"
    theta = float(file.metadata.get(f"{key}.freq_base", 10000.0))
    kind = file.metadata.get(f"{key}.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{file.path}: {key}.scaling.type {kind!r} is not supported; supported: linear, yarn"
        )
    found = {
        "rope_theta": theta,
        "rope_type": kind,
        "factor": float(file.require(f"{key}.scaling.factor")),
    }
    if kind == "yarn":
        original = file.require(f"{key}.scaling.original_context_length")
        found["original_max_position_embeddings"] = original
    return found


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Returns the rope settings that give the file's factors, `[head_dim / 2]`."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind != "F32" or tensor.shape != (head_dim // 2,):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} is {tensor.kind} {tensor.shape}")
    found = np.fromfile(file.path, np.float32, head_dim // 2, offset=tensor.offset)
    settings = {"rope_type": "llama3", "factor": round(float(found.max()), 4), **_LLAMA3}
    if not np.allclose(found, _factors(settings, theta, head_dim), rtol=1e-4):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} has other factors than those of Llama 3")
    return settings


def _factors(settings: Mapping[str, Any], theta: float, head_dim: int) -> Any:
    """Returns the factor by which each frequency is divided (Llama 3.1, arXiv:2407.21783): `factor`
    for long wavelengths, 1 for short ones, interpolated in between."""
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = settings["original_max_position_embeddings"] / waves
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (share + (1 - share) / settings["factor"])


# ---- the end of answers ----


def generation_config_of(file: GGUFFile) -> dict[str, Any]:
    """Returns `generation_config.json`: all tokens that end an answer."""
    named = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    types = file.metadata.get("tokenizer.ggml.token_type", ())
    found = {each for each in named if each is not None} | {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in ENDS
    }
    return {"eos_token_id": sorted(found)} if found else {}
