"""A checkpoint with heads of 128, which FlashInfer supports; the trained ones have heads of 32. Its
weights are random, so its text is meaningless, but transformers can check it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from paths import MODELS

TOKENIZER = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
SHAPE: dict[str, Any] = {
    "head_dim": 128,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def make_wide_model(folder: Path) -> Path:
    """Writes the checkpoint, 20 MB in bfloat16, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    given = json.loads((MODELS / "qwen3" / "config.json").read_text())
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**{**given, **SHAPE}))
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODELS / "qwen3" / name, folder)
    return folder
