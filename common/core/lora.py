"""Reads and validates LoRA adapters (arXiv:2106.09685) in peft's format.

Reads no executable formats, and no more bytes than an adapter of the model can have.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.model_spec import ModelSpec
from pdserve.common.core.printable import cut
from pdserve.common.core.towers import text_name

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 2**20  # bytes
MAX_WEIGHTS = 2**32  # bytes, for models whose layer sizes are unknown
MAX_SHOWN = 100  # characters of a file's content that an error quotes
_LENGTH = struct.Struct("<Q")  # the length of a safetensors header, which precedes it
_MAX_HEADER = 2**24  # bytes
_PREFIX = "base_model.model."  # prefix of tensor names in peft
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes
_TARGETS = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
# Keys of adapter_config.json that are supported. Any other key could change what is computed.
_KNOWN = frozenset({
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout",
    "bias", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern",
    "megatron_core", "runtime_config", "eva_config", "loftq_config", "qalora_group_size",
    "fan_in_fan_out",  # layout of the base model's weights, not of the adapter's
})  # fmt: skip
# Values of init_lora_weights that leave the base model's weights unchanged.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A validated adapter."""

    digest: str  # 32 hex digits over rank, scale and weights: its identity
    rank: int
    scale: float  # factor of B·A
    modules: Mapping[str, str]  # changed module of the model → its name in the file
    weights: bytes = field(repr=False)  # the safetensors file

    @staticmethod
    def tensor_names(module: str) -> tuple[str, str]:
        """Returns the names of the tensors A `[rank, inputs]` and B `[outputs, rank]`; `module` is
        the module's name in the file."""
        return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def adapted_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Returns module → (outputs, inputs) of the modules that adapters may change."""
    if spec.impl != "native":
        return {name: (outputs, inputs) for name, outputs, inputs in spec.linears}
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = _attention_shapes(spec)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in attention.items()}
        if not spec.is_sparse(layer):
            shapes |= {f"{prefix}.mlp.{name}": shape for name, shape in mlp.items()}
    return shapes


def _attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    hidden, latent = spec.hidden_size, spec.latent
    if latent is None:
        queries, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return {
            "q_proj": (queries, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, queries),
        }
    # Not kv_b_proj: where queries are absorbed there is no product that an adapter could add to.
    shapes = {
        "kv_a_proj_with_mqa": (latent.size, hidden),
        "o_proj": (hidden, spec.num_heads * latent.value_dim),
    }
    queries = spec.num_heads * latent.key_dim
    if latent.query_rank is None:
        return {"q_proj": (queries, hidden), **shapes}
    rank = latent.query_rank
    return {"q_a_proj": (rank, hidden), "q_b_proj": (queries, rank), **shapes}


def read_adapter(folder: str | Path, spec: ModelSpec | None, max_rank: int) -> AdapterFile:
    """Reads an adapter for the model `spec`; with None the layer sizes are unknown here, and the
    nodes check them. Checks the header before it reads the weights.

    Raises:
        ConfigError: the adapter is invalid or not supported.
    """
    folder = Path(folder)
    try:
        config = _read_config(folder / CONFIG_FILE)
        rank, scale = _check_config(config, max_rank)
        weights = _read_weights(folder / WEIGHTS_FILE, spec, rank)
    except ConfigError as error:
        raise ConfigError(f"adapter {folder}: {error.message}") from None
    except OSError as error:
        raise ConfigError(f"adapter {folder}: {error.strerror or error}") from error
    header = _header(weights)
    named, changed = _names_in(header, spec), _check_tensors(header, spec, rank)
    modules = {module: named[module] for module in changed}
    digest = hashlib.blake2b(f"{rank} {scale!r}".encode(), digest_size=16)
    digest.update(weights)
    return AdapterFile(digest.hexdigest(), rank, scale, modules, weights)


# ---- adapter_config.json ----


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing")
    if path.stat().st_size > MAX_CONFIG:
        raise ConfigError(f"{path.name} has more than {MAX_CONFIG} bytes")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path.name} does not hold a JSON object")
    return config


def _check_config(config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    """Returns (rank, scale)."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"its peft_type is {_shown(config.get('peft_type'))}, not 'LORA'")
    unknown = sorted(name for name in config.keys() - _KNOWN if config[name])
    if unknown:
        raise ConfigError(f"it sets {cut(', '.join(unknown), MAX_SHOWN)}, which is not supported")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"its bias is {_shown(config['bias'])}; biases are not supported")
    if config.get("init_lora_weights", True) not in _PLAIN_INITS:
        raise ConfigError(
            f"init_lora_weights {_shown(config['init_lora_weights'])} has changed the model's own "
            "weights: convert it to plain LoRA (peft: path_initial_model_for_weight_conversion)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"r must be a whole number of at least 1, not {_shown(rank)}")
    if rank > max_rank:
        raise ConfigError(f"its rank {_shown(rank)} is more than --max-lora-rank {max_rank}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not _finite(alpha):
        raise ConfigError(f"lora_alpha must be a number, not {_shown(alpha)}")
    return rank, float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _shown(value: object) -> str:
    return cut(repr(value), MAX_SHOWN)


def _finite(number: float) -> bool:
    try:
        return math.isfinite(float(number))
    except OverflowError:
        return False


# ---- adapter_model.safetensors ----


def _read_weights(path: Path, spec: ModelSpec | None, rank: int) -> bytes:
    """Reads the file after its header has shown that its size is within bounds."""
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing; only safetensors weights are read")
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size or _LENGTH.unpack(start)[0] > min(size, _MAX_HEADER):
            raise ConfigError(f"{path.name} is not a safetensors file")
        header = start + file.read(_LENGTH.unpack(start)[0])
        end = len(header) + sum(_check_tensors(_header(header), spec, rank).values())
        if spec is None and end > MAX_WEIGHTS:
            raise ConfigError(f"{path.name} has more than {MAX_WEIGHTS} bytes")
        weights = header + file.read(end - len(header) + 1) if end == size else b""
    if len(weights) != end:
        raise ConfigError(f"{path.name} has another size than its header says")
    return weights


def _header(file: bytes) -> dict[str, Any]:
    """Returns the header's entry per tensor."""
    try:
        header = json.loads(file[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(file)[0]])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{WEIGHTS_FILE} is not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{WEIGHTS_FILE} is not a safetensors file")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _check_tensors(header: Mapping[str, Any], spec: ModelSpec | None, rank: int) -> dict[str, int]:
    """Returns module → bytes of its two tensors.

    Raises:
        ConfigError: a tensor is missing, unknown or of another shape.
    """
    sizes: dict[str, int] = {}
    left = dict(header)
    known = _stated_shapes(header) if spec is None else adapted_shapes(spec)
    named = _names_in(header, spec)
    for module, (outputs, inputs) in known.items():
        names = AdapterFile.tensor_names(named.get(module, module))
        if not any(name in left for name in names):
            continue
        shapes = ([rank, inputs], [outputs, rank])
        sizes[module] = sum(
            _nbytes(name, left.pop(name, None), shape)
            for name, shape in zip(names, shapes, strict=True)
        )
    if left:
        raise ConfigError(f"it has {cut(sorted(left)[0], MAX_SHOWN)}: only {_targets(spec)}")
    if not sizes:
        raise ConfigError("it has no tensors")
    return sizes


def _names_in(header: Mapping[str, Any], spec: ModelSpec | None) -> dict[str, str]:
    """Returns module of the model → its name in the file, which is that of a nested text model if
    the adapter was trained on a multimodal model."""
    known = () if spec is None else adapted_shapes(spec)
    names: dict[str, str] = {}
    for tensor in header:
        name = tensor.removeprefix(_PREFIX).partition(".lora_")[0]
        module = name if spec is None or name in known else text_name(name) or name
        names.setdefault(module, name)
    return names


def _stated_shapes(header: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns module → (outputs, inputs) from the shapes of A and B."""
    found = {}
    for name in header:
        module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        names = AdapterFile.tensor_names(module)
        if name == names[0]:
            a, b = (_shape(header.get(each)) for each in names)
            found[module] = b[0], a[1]
    return found


def _shape(entry: Any) -> tuple[int, int]:
    match entry:
        case {"shape": [int(first), int(second)]} if min(first, second) > 0:
            return first, second
    return 0, 0


def _targets(spec: ModelSpec | None) -> str:
    if spec is None or spec.impl != "native":
        return "linear layers within decoder layers are supported"
    return f"{_TARGETS} of dense layers are supported, in {spec.num_layers} layers"


def _nbytes(name: str, entry: Any, shape: list[int]) -> int:
    if entry is None:
        raise ConfigError(f"it lacks {name}")
    found, dtype = (
        (entry.get("shape"), entry.get("dtype")) if isinstance(entry, dict) else (None, None)
    )
    if found != shape:
        raise ConfigError(f"{name} has the shape {_shown(found)}, not {shape}")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"{name} has the dtype {cut(str(dtype), MAX_SHOWN)}, not {', '.join(_DTYPES)}"
        )
    return math.prod(shape) * _DTYPES[dtype]
