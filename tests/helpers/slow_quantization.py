"""Reads AWQ and GPTQ checkpoints slowly, bit by bit as the formats are published."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quantized_folder import Scheme, load_weights

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, from its low bits on


def dequantized_folder(folder: Path, target: Path, scheme: Scheme) -> Path:
    """Writes a copy of the folder with dequantized float32 weights."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    weights = load_weights(folder)
    modules = {name.removesuffix(".qweight") for name in weights if name.endswith(".qweight")}
    dense = {f"{each}.weight": dequantize(weights, each, scheme) for each in sorted(modules)}
    others = {
        name: tensor.float()
        for name, tensor in weights.items()
        if name.rpartition(".")[0] not in modules or name.endswith(".bias")
    }
    save_file({**others, **dense}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def dequantize(weights: Mapping[str, Tensor], module: str, scheme: Scheme) -> Tensor:
    """Returns a linear layer's weight, float32 `[out, in]`."""
    words, zeros = (weights[f"{module}.{kind}"].tolist() for kind in ("qweight", "qzeros"))
    scales = weights[f"{module}.scales"].float().tolist()
    outputs, per_word, mask = len(scales[0]), 32 // scheme.bits, 2**scheme.bits - 1
    inputs = len(words) if scheme.method == "awq" else len(words) * per_word
    size = inputs if scheme.group_size == -1 else scheme.group_size
    groups = [index // size for index in range(inputs)]
    if scheme.desc_act:
        groups = weights[f"{module}.g_idx"].tolist()

    def number(word: int, place: int) -> int:
        return word >> place * scheme.bits & mask

    def place_of(output: int) -> int:
        return AWQ_OUTPUTS.index(output % 8) if scheme.method == "awq" else output % per_word

    def weight(output: int, row: int) -> float:
        group = groups[row]
        zero = number(zeros[group][output // per_word], place_of(output)) + scheme.zero_offset
        if scheme.method == "awq":
            stored = number(words[row][output // 8], place_of(output))
        else:
            stored = number(words[row // per_word][output], row % per_word)
        return (stored - zero) * scales[group][output]

    return torch.tensor([[weight(o, i) for i in range(inputs)] for o in range(outputs)])
