"""Makes model folders without weights, with the sizes that a first run on a GPU measures, for
`--load-format dummy`; their tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# From Qwen3's configs: hidden size, layers, query heads, KV heads, MLP, tied embeddings.
SHAPES = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "tiny": (64, 2, 4, 2, 128, True),
}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}  # as in Qwen3-8B-FP8


def make_shape(
    folder: Path, shape: tuple[int, int, int, int, int, bool], weights: str = ""
) -> Path:
    """Writes the config of a shape. `weights`: "fp8" stores linear layers so."""
    hidden, layers, heads, kv_heads, inner, tied = shape
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": inner,
        "tie_word_embeddings": tied,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 0,
    }
    if weights == "fp8":
        config["quantization_config"] = FP8
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
