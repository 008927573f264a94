"""Makes AWQ and GPTQ checkpoint folders from unquantized ones, for benchmarks and tests.

The files have AutoAWQ's and AutoGPTQ's layout; values are rounded to nearest, which is worse than
those methods. Shares no code with the readers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, from its low bits on


MODULES: tuple[str, ...] = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
)
MODULES += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Scheme:
    """The fields of a `quantization_config`."""

    method: str  # "awq" or "gptq"
    bits: int = 4
    group_size: int = 32  # -1: all inputs
    sym: bool = False
    desc_act: bool = False
    v2: bool = False  # zero points are stored as they are, not minus one
    skipped: tuple[str, ...] = ()  # of MODULES

    @property
    def config(self) -> dict[str, Any]:
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            skipped = {"modules_to_not_convert": list(self.skipped) or None}
            return {**common, **skipped, "version": "gemm", "zero_point": True}
        kept = [[name] for name in MODULES if name not in self.skipped]
        return {
            **common,
            "sym": self.sym,
            "desc_act": self.desc_act,
            "lm_head": False,
            "checkpoint_format": "gptq_v2" if self.v2 else "gptq",
            "modules_in_block_to_quantize": kept if self.skipped else None,
        }

    @property
    def zero_offset(self) -> int:
        return int(self.method == "gptq" and not self.v2)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder's files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def quantize_folder(source: Path, target: Path, scheme: Scheme) -> Path:
    """Writes a copy of the folder with quantized linear layers."""
    skip = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(source, target, ignore=skip)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = scheme.config
    (target / "config.json").write_text(json.dumps(config))
    weights = dict(_quantized_tensors(load_weights(source), scheme))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _quantized_tensors(
    weights: Mapping[str, Tensor], scheme: Scheme
) -> Iterator[tuple[str, Tensor]]:
    for index, (name, tensor) in enumerate(weights.items()):
        module = name.removesuffix(".weight")
        if not module.endswith(MODULES) or module.endswith(scheme.skipped):
            yield name, tensor
            continue
        for kind, part in quantize_matrix(tensor.float(), scheme, seed=index).items():
            yield f"{module}.{kind}", part


def quantize_matrix(matrix: Tensor, scheme: Scheme, seed: int = 0) -> dict[str, Tensor]:
    """`[out, in]` → the tensors of a quantized linear layer, by the last part of their names."""
    inputs = matrix.shape[1]
    size = inputs if scheme.group_size == -1 else scheme.group_size
    group_of = torch.arange(inputs) // size
    if scheme.desc_act:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    scales, zeros, numbers = _rounded(matrix, group_of, scheme)
    tensors = {"scales": scales.t().contiguous().half()}
    stored = zeros.t() - scheme.zero_offset
    if scheme.method == "awq":
        qweight, qzeros = _pack_awq(numbers.t()), _pack_awq(stored)
        return {**tensors, "qweight": qweight, "qzeros": qzeros}
    qweight = _pack(numbers, scheme.bits).t().contiguous()
    qzeros = _pack(stored, scheme.bits)
    return {**tensors, "qweight": qweight, "qzeros": qzeros, "g_idx": group_of.int()}


def _rounded(matrix: Tensor, group_of: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor]:
    """Returns scales and zero points `[out, groups]`, and values `[out, in]`."""
    top, scales, zeros = 2**scheme.bits - 1, [], []
    for group in range(int(group_of.max()) + 1):
        part = matrix[:, group_of == group]
        high, low = part.amax(1).clamp_min(1e-5), part.amin(1).clamp_max(-1e-5)
        if scheme.sym:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / top).half().float()
        least = 1 if scheme.zero_offset else 0  # the first format cannot store a zero point of 0
        zero = (-low / scale).round().clamp(least, top)
        scales.append(scale)
        zeros.append(torch.full_like(zero, (top + 1) // 2) if scheme.sym else zero)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    numbers = (matrix / scale[:, group_of] + zero[:, group_of]).round().clamp(0, top)
    return scale, zero.int(), numbers.int()


def _pack(numbers: Tensor, bits: int) -> Tensor:
    """Packs `[m, n]` to int32 `[m, n * bits / 32]`, the first value in the lowest bits."""
    per_word = 32 // bits
    words = numbers.long().unflatten(1, (-1, per_word))
    shifted = words << (torch.arange(per_word) * bits)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def _pack_awq(numbers: Tensor) -> Tensor:
    words = numbers.unflatten(1, (-1, 8))[:, :, list(AWQ_OUTPUTS)]
    return _pack(words.flatten(1), bits=4)
