"""Makes a checkpoint with a token whose embedding is NaN, so that all logits of a sequence with
this token are NaN. It stands for any input that a model cannot compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.soak.asks import POISON

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def poisoned(folder: Path, target: Path) -> Path:
    """Writes a copy of a checkpoint in which the embedding of `POISON` is NaN."""
    shutil.copytree(folder, target)
    shard = target / "model.safetensors"
    if not shard.exists():
        index = json.loads((target / "model.safetensors.index.json").read_text())
        shard = target / index["weight_map"][EMBEDDING]
    tensors = load_file(shard)
    config = json.loads((target / "config.json").read_text())
    if config.get("tie_word_embeddings"):  # the head keeps its weights
        tensors[HEAD] = tensors[EMBEDDING].clone()
        config["tie_word_embeddings"] = False
        (target / "config.json").write_text(json.dumps(config))
    tensors[EMBEDDING][POISON] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    return target
