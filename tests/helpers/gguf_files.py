"""Writes GGUF files of checkpoints, and for each the checkpoint with the weights that it encodes.
Names and types are those of the package `gguf`; shares no code with the reader."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.quantized_folder import load_weights
from paths import MODELS

Choose = Callable[[str], str]  # name of a matrix in the checkpoint → its type in the file

ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
NORMAL, CONTROL = 1, 3


def tiny_folder(folder: Path, config: Any, scale: float = 0.25) -> Path:
    """Writes a checkpoint with random weights and the tokenizer of the tests' models."""
    from transformers import AutoModelForCausalLM  # ranks that import this file do not need it

    torch.manual_seed(0)
    config.initializer_range = scale
    with torch.inference_mode(False), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:  # weights that start as 0 or 1 must have an effect
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODELS / "qwen2" / name, folder / name)
    return folder


def write_gguf(
    source: Path,
    file: Path,
    choose: Choose,
    dense: Path | None = None,
    metadata: Mapping[str, Any] = {},
    without: str = "",
    more: Mapping[str, NDArray[Any]] = {},
) -> Path:
    """Writes the checkpoint `source` to `file`, and to `dense` a checkpoint with the weights that
    the file encodes. `metadata`: changed values, None removes one. `without`: a tensor to omit.
    `more`: tensors to add."""
    config = json.loads((source / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, str(metadata.get("general.architecture", arch)))
    _write_metadata(writer, arch, config, source, metadata)
    key_of = gguf.get_tensor_name_map(
        next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == arch), 8
    )
    plain: dict[str, Tensor] = {}
    stacks: dict[tuple[str, str], list[NDArray[Any]]] = defaultdict(list)
    for seed, name in enumerate(sorted(weights := load_weights(source), key=_in_order)):
        matrix = weights[name].float().numpy()
        kind = Kind[choose(name)] if matrix.ndim > 1 and "gate.weight" not in name else Kind.F32
        stored, values = _stored(matrix, kind, seed, _heads(arch, name, config))
        plain[name] = torch.from_numpy(values.copy())
        module, _, suffix = name.rpartition(".")
        if ".experts." in name:
            before, _, after = module.partition(".experts.")
            number, matrix_name = after.split(".")
            module = f"{before}.experts.{matrix_name}"
            stacks[module, kind.name].append(stored)
            if int(number) + 1 < (config.get("num_local_experts") or config["num_experts"]):
                continue
            stored = np.stack(stacks[module, kind.name])
        found = f"{key_of.get_name(module)}.{suffix}"
        if found != without:
            writer.add_tensor(found, stored[0] if "expert_gate" in name else stored, raw_dtype=kind)
    for name, factors in more.items():
        writer.add_tensor(name, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dense is not None:
        shutil.copytree(source, dense)
        save_file(plain, dense / "model.safetensors", metadata={"format": "pt"})
    return file


def _stored(
    matrix: NDArray[Any], kind: Kind, seed: int, heads: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns (the stored form of a matrix, the values that it encodes)."""
    stored = _quantize(_interleaved(matrix, heads) if heads else matrix, kind, seed)
    values = gguf.dequantize(stored, kind).reshape(matrix.shape).astype(np.float32)
    return stored, _halved(values, heads) if heads else values


def _in_order(name: str) -> list[tuple[int, str]]:
    """Returns a sort key by which expert 10 comes after expert 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def _heads(arch: str, key: str, config: dict[str, Any]) -> int:
    kind = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return config[kind[key.split(".")[-2]]] if arch == "llama" and key.split(".")[-2] in kind else 0


def _interleaved(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    halves = weights.reshape(heads, 2, -1, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _halved(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    pairs = weights.reshape(heads, -1, 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def _quantize(weights: NDArray[Any], kind: Kind, seed: int) -> NDArray[Any]:
    """Quantizes a matrix. The package cannot make blocks of 256: those get random bytes, which are
    all valid except for non-finite scales."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(weights, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    rows = weights.reshape(-1, weights.shape[-1])
    blocks = rng.integers(0, 256, (len(rows), rows.shape[1] // block, size), dtype=np.uint8)
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for place in places:
        scale = np.full(blocks.shape[:2], 4e-4, np.float16) * rng.uniform(0.5, 2, blocks.shape[:2])
        blocks[..., place : place + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*weights.shape[:-1], -1)


def _write_metadata(
    writer: Any, arch: str, config: dict[str, Any], source: Path, changes: Mapping[str, Any]
) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "llama":
        writer.add_rope_dimension_count(
            head_dim or config["hidden_size"] // config["num_attention_heads"]
        )
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted({**vocab, **special}.items(), key=lambda item: item[1])
    settings = json.loads((source / "tokenizer_config.json").read_text())
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [CONTROL if t in special else NORMAL for t, _ in tokens],
        "tokenizer.ggml.merges": [" ".join(each) for each in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings["chat_template"],
        **changes,
    }
    add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32}
    for key, value in fields.items():
        if value is not None and key != "general.architecture":
            add.get(type(value), writer.add_string)(key, value)
