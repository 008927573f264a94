"""A checkpoint with one token that nothing can be computed from: its embedding is NaN, and so is
every logit of a sequence that contains it. Stands for whatever a model cannot stand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TOKEN = 499
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def poisoned(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint in which `TOKEN` is poison; its other tokens are as they were."""
    shutil.copytree(folder, target)
    shard = target / "model.safetensors"
    if not shard.exists():
        index = json.loads((target / "model.safetensors.index.json").read_text())
        shard = target / index["weight_map"][EMBEDDING]
    tensors = load_file(shard)
    config = json.loads((target / "config.json").read_text())
    if config.get("tie_word_embeddings"):  # the head stays as it was
        tensors[HEAD] = tensors[EMBEDDING].clone()
        config["tie_word_embeddings"] = False
        (target / "config.json").write_text(json.dumps(config))
    tensors[EMBEDDING][TOKEN] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    return target
