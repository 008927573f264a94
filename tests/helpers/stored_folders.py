"""Makes checkpoints with FP8, INT8 and pack-quantized weights, and for each one the checkpoint with
the weights that it encodes. Shares no code with the readers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quantized_folder import MODULES, load_weights

FP8 = torch.float8_e4m3fn
EXPERTS = ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8, "symmetric": True, **weights}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*\.block_sparse_moe\.gate$"],
    }


SCALED: dict[str, dict[str, Any]] = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [48, 32]},
    "per-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "compressed-tensor": compressed("float-quantized", type="float", strategy="tensor"),
    "compressed-channel": compressed("float-quantized", type="float", strategy="channel"),
    "compressed-int8": compressed("int-quantized", type="int", strategy="channel"),
}


def scaled(matrix: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Returns (the tensors of a quantized linear layer, the weight that they encode)."""
    rows, columns = matrix.shape
    block = {
        "blocks": (48, 32),
        "compressed-channel": (1, columns),
        "compressed-int8": (1, columns),
    }
    height, width = block.get(kind, (rows, columns))
    scale = torch.ones(-(-rows // height), -(-columns // width))
    dtype, most = (torch.int8, 127.0) if kind == "compressed-int8" else (FP8, 448.0)
    numbers, dense = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale[i, j] = matrix[here].abs().max() / most
            part = matrix[here] / scale[i, j]
            numbers[here] = (part.round() if dtype == torch.int8 else part).to(dtype)
            dense[here] = numbers[here].to(torch.float32) * scale[i, j]
    name = "weight_scale_inv" if kind == "blocks" else "weight_scale"
    stored = scale.reshape(()) if kind in ("per-tensor", "modelopt") else scale
    more = {"input_scale": torch.ones(())} if "tensor" in kind else {}
    return {"weight": numbers, name: stored, **more}, dense


def pack_quantized(matrix: Tensor, bits: int, symmetric: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Like `scaled`, with groups of 32 weights, packed along inputs from the low bits on."""
    groups = matrix.unflatten(1, (-1, 32))
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    high, low = groups.amax(2).clamp_min(0), groups.amin(2).clamp_max(0)
    scale = (2 * torch.maximum(high, -low) if symmetric else high - low) / (most - least)
    scale = scale.bfloat16()
    zero = torch.zeros_like(high) if symmetric else (least - low / scale.float()).round()
    zero = zero.clamp(least, most)
    numbers = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(least, most)
    dense = ((numbers - zero[..., None]) * scale.float()[..., None]).flatten(1)
    tensors = {
        "weight_packed": words(numbers.flatten(1) - least, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words((zero - least).t(), bits).t().contiguous()
    return tensors, dense


def words(numbers: Tensor, bits: int) -> Tensor:
    parts = numbers.long().unflatten(1, (-1, 32 // bits))
    return (parts << (torch.arange(32 // bits) * bits)).sum(-1).to(torch.uint32).view(torch.int32)


Quantize = Callable[[Tensor, int], tuple[dict[str, Tensor], Tensor]]
"""(matrix, seed) → (the tensors of its module, the weight that they encode)."""


def folders(
    source: Path,
    target: Path,
    settings: Mapping[str, Any],
    quantize: Quantize,
    others: tuple[str, ...] = (),
) -> Path:
    """Makes `target`, quantized, and `target`-dense with the weights that it encodes. `others`:
    suffixes of further modules to quantize."""
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32"}
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for seed, (name, tensor) in enumerate(load_weights(source).items()):
        module = name.removesuffix(".weight")
        dense[name] = tensor.float()
        if module.endswith((*MODULES, *EXPERTS, *LATENT, *others)):
            parts, dense[name] = quantize(tensor.float(), seed)
            stored |= {f"{module}.{part}": each for part, each in parts.items()}
        else:
            stored[name] = tensor.float()
    plain = target.with_name(f"{target.name}-dense")
    for folder, tensors, more in (
        (target, stored, {"quantization_config": settings}),
        (plain, dense, {}),
    ):
        skipped = shutil.ignore_patterns("*.safetensors", "*.index.json")
        shutil.copytree(source, folder, ignore=skipped)
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return target
