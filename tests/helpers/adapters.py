"""LoRA adapters of the tiny models, with fixed random weights, and models with merged adapters as
the reference: W + scale · B · A."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

import reference
from pdserve.common.core.lora import AdapterFile, adapted_shapes
from pdserve.common.model.implementation import read_spec

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    model: Path,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    size: float = 0.6,
    **config: Any,
) -> Path:
    """Writes an adapter of the model in `folder`. `size`: of the change it makes, relative to a
    typical weight. `config`: goes into adapter_config.json."""
    folder.mkdir(parents=True)
    alpha = config.setdefault("lora_alpha", 8)
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, (outputs, inputs) in adapted_shapes(read_spec(model, "auto", {})).items():
        if name.rpartition(".")[2] in targets:
            a = torch.randn(rank, inputs, generator=generator)
            b = torch.randn(outputs, rank, generator=generator)
            typical = weights[f"{name}.weight"].std().item()
            b *= size * typical / (scale * math.sqrt(rank))
            tensors |= dict(zip(AdapterFile.tensor_names(name), (a, b), strict=True))
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": rank, "target_modules": list(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


@cache
def merged(adapter: Path, model: Path, target: Path) -> Path:
    """Writes a checkpoint of the model with the adapter merged into it, for `reference`."""
    file = json.loads((adapter / "adapter_config.json").read_text())
    rank = file["r"]
    scale = file["lora_alpha"] / (math.sqrt(rank) if file.get("use_rslora") else rank)
    base, tokenizer = reference.load.__wrapped__(model)  # an uncached copy, since it is changed
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in base.named_modules():
            names = AdapterFile.tensor_names(name)
            if names[0] in tensors:
                added = scale * tensors[names[1]] @ tensors[names[0]]
                module.weight.add_(added.T if isinstance(module, Conv1D) else added)
    base.save_pretrained(target)  # type: ignore[operator]
    tokenizer.save_pretrained(target)
    return target
