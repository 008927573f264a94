"""Makes a checkpoint folder for a GGUF file in the cache: config, tokenizer, a link to the file,
and `gguf.json`, the index of its tensors. The weights stay in the file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdserve.common.config.engine import ModelConfig
from pdserve.common.core.apart import Bounds, try_files
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.families import FAMILIES
from pdserve.common.core.gguf_index import (
    INDEX_FILE,
    LINK,
    PACKED_BITS,
    IndexEntry,
    block_of,
)
from pdserve.common.core.host import default_cache_dir
from pdserve.common.core.moe_spec import MoEFamily
from pdserve.common.core.private_folder import open_private
from pdserve.demo_model.cache import ensure_folder
from pdserve.demo_model.gguf_config import (
    ROPE_FACTORS,
    architecture_of,
    config_of,
    generation_config_of,
)
from pdserve.demo_model.gguf_file import GGUFFile, GGUFTensor
from pdserve.demo_model.gguf_tokenizer import write_tokenizer

# The tokenizer of an honest file takes a few seconds.
_BOUNDS = Bounds(cpu_seconds=120.0, memory=2 * 2**30, wall_seconds=300)
FORMAT = 2  # part of the cache folder's name: raise it when the conversion changes

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # multiplied as one matrix


def is_gguf(model: str) -> bool:
    """Returns whether `model` names a GGUF file, which may not exist."""
    return model.lower().endswith(".gguf") and not Path(model).is_dir()


def resolve_gguf(config: ModelConfig) -> ModelConfig:
    """Returns the config with the folder of the file `model`, made if the cache lacks it. By
    default clients use the file's name.

    Raises:
        ConfigError: the file cannot be served, or the cache is not writable or not private.
    """
    assert config.model is not None
    path = Path(config.model)
    if config.revision is not None or config.download_dir is not None:
        raise ConfigError("--revision and --download-dir need --model to be a name (org/name)")
    folder = _folder_of(path, config.tokenizer is None)
    ensure_folder(folder, lambda partial: _write_apart(path, partial, config.tokenizer is None))
    return replace(
        config, model=str(folder), served_model_name=config.served_model_name or [path.stem]
    )


def _folder_of(path: Path, with_tokenizer: bool) -> Path:
    """Returns the folder for this version of the file: its name depends on the file's state."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read the file {path}: {error.strerror}") from error
    parts = (FORMAT, path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns)
    digest = hashlib.blake2b(repr((*map(str, parts), with_tokenizer)).encode(), digest_size=8)
    parent = default_cache_dir() / "gguf"
    try:
        os.close(open_private(parent))
    except OSError as error:
        raise ConfigError(f"{error}: set PDSERVE_CACHE to another folder than {parent}") from error
    return parent / f"{path.stem}-{digest.hexdigest()}"


def _write_apart(path: Path, folder: Path, with_tokenizer: bool) -> None:
    """Calls `write_folder` in a child with bounds, as a hostile file may make it take any time."""

    def work() -> bytes:
        write_folder(path, folder, with_tokenizer)
        return b""

    try_files(f"converting {path}", work, _BOUNDS)


def write_folder(path: Path, folder: Path, with_tokenizer: bool) -> None:
    """Writes the checkpoint's files into `folder`. Raises ConfigError like `resolve_gguf`."""
    file = GGUFFile.read(path)
    config = config_of(file)
    index = index_of(file, config)
    config["quantization_config"] = _quantization(index)
    if with_tokenizer:
        _write(folder / "tokenizer_config.json", write_tokenizer(file, folder))
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", generation_config_of(file))
    _write(folder / INDEX_FILE, {name: entry.as_json() for name, entry in index.items()})
    (folder / LINK).symlink_to(path.resolve())


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- tensors ----


def index_of(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, IndexEntry]:
    """Returns the tensors by their names in a checkpoint.

    Raises:
        ConfigError: a tensor has an unknown name or type.
    """
    architecture = architecture_of(file)
    moe = FAMILIES[architecture].moe
    interleaved = file.architecture == "llama"
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    index = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        if block_of(tensor.kind) is None:
            raise ConfigError(f"{file.path}: {name} is of type {tensor.kind}: not supported")
        paired = heads.get(_kind(name)) if interleaved else None
        for part, each in _parts(name, tensor, moe):
            if part is None:
                raise ConfigError(
                    f"{file.path}: the tensor {name} is not known in architecture "
                    f"{file.architecture!r}"
                )
            index[part] = IndexEntry(each.kind, each.shape, each.offset, paired)
    return _with_packed(index)


def _kind(name: str) -> str:
    """Returns "attn_q" for "blk.3.attn_q.weight"."""
    return name.split(".")[2] if name.startswith("blk.") and name.count(".") == 3 else ""


def _parts(
    name: str, tensor: GGUFTensor, moe: MoEFamily | None
) -> Iterator[tuple[str | None, GGUFTensor]]:
    """Yields (name in a checkpoint or None, tensor); stacked experts one by one."""
    kind, suffix = _kind(name), name.rpartition(".")[2]
    if not kind:
        outer = _OUTER.get(name.removesuffix(".weight"))
        yield (None if outer is None else f"{outer}.weight"), tensor
        return
    layer = f"model.layers.{name.split('.')[1]}"
    if kind in _LAYER:
        yield f"{layer}.{_LAYER[kind]}.{suffix}", tensor
        return
    if moe is None:
        yield None, tensor
        return
    block = f"{layer}.{moe.block}"
    if kind == "ffn_gate_inp":
        yield f"{block}.gate.weight", tensor
    elif kind == "ffn_gate_inp_shexp":
        yield f"{block}.{moe.shared_expert}_gate.weight", replace(tensor, shape=(1, *tensor.shape))
    elif matrix := {"ffn_gate_shexp": "gate", "ffn_up_shexp": "up", "ffn_down_shexp": "down"}.get(
        kind
    ):
        yield f"{block}.{moe.shared_expert}.{matrix}_proj.weight", tensor
    else:
        yield from _experts(block, kind, tensor, moe)


def _experts(
    block: str, kind: str, tensor: GGUFTensor, moe: MoEFamily
) -> Iterator[tuple[str | None, GGUFTensor]]:
    names = {
        "ffn_gate_exps": moe.gate_proj,
        "ffn_up_exps": moe.up_proj,
        "ffn_down_exps": moe.down_proj,
    }
    if kind not in names or len(tensor.shape) != 3:
        yield None, tensor
        return
    count, *shape = tensor.shape
    size = tensor.nbytes // count
    for expert in range(count):
        part = GGUFTensor(tensor.kind, tuple(shape), tensor.offset + expert * size, size)
        yield f"{block}.experts.{expert}.{names[kind]}.weight", part


# ---- what stays packed ----


def _with_packed(index: dict[str, IndexEntry]) -> dict[str, IndexEntry]:
    """Marks the matrices that stay packed in memory: those of the type with the most bytes."""
    found = [list(_packable(index, kind)) for kind in PACKED_BITS]
    most = max(found, key=lambda names: sum(index[name].numbers for name in names))
    return index | {name: replace(index[name], packed=True) for name in most}


def _packable(index: Mapping[str, IndexEntry], kind: str) -> Iterator[str]:
    """Yields the linear layers of the type `kind`, without head and experts, if all matrices that
    are fused with them have it too."""
    for name, entry in index.items():
        if ".experts." in name or not name.startswith("model.layers.") or len(entry.shape) != 2:
            continue
        module, _, last = name.removesuffix(".weight").rpartition(".")
        fused = next((group for group in _FUSED if last in group), (last,))
        entries = [index.get(f"{module}.{each}.weight") for each in fused]
        if last.endswith("_proj") and all(
            each is not None and each.kind == kind and each.shape[0] % 8 == 0 for each in entries
        ):
            yield name


def _quantization(index: Mapping[str, IndexEntry]) -> dict[str, Any]:
    """Returns `quantization_config`: the packed modules, and the types to dequantize."""
    packed = {name: entry.kind for name, entry in index.items() if entry.packed}
    others = {entry.kind for entry in index.values() if not entry.packed}
    return {
        "quant_method": "gguf",
        "bits": next((PACKED_BITS[kind] for kind in packed.values()), None),
        "modules": sorted(name.removesuffix(".weight") for name in packed),
        "dequantized": sorted(others - {"F32", "F16", "BF16"}),
    }
