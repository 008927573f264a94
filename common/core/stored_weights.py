"""Which formats of stored weights the loader dequantizes. Standard library only.

`quantization_config` in `config.json` describes them. Their weights take the bytes of `--dtype` in
memory; on GPUs, FP8 and INT8 linear layers keep 8 bits. Activations are not rounded: results are
those of the dequantized model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.common.core.config_values import QUANTIZATION, check_pattern, check_values
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.quantization import (
    REGEX,
    Quantization,
    compressed_targets,
    compressed_weights,
    unsupported,
)

FP8, INT8, MXFP4, GGUF = "FP8", "INT8", "MXFP4", "GGUF"
_GGUF_GROUP = 32  # weights with one scale, of the types that stay packed
STORED_FP8, STORED_INT8 = "stored FP8", "stored INT8"
"""Methods of a `Quantization` that keeps the numbers of such a checkpoint (`scaled_weight.py`)."""
_PLAIN = ("lm_head", "kv_b_proj", "experts")  # modules that stay dequantized


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The format of weights that are dequantized while they are loaded.

    FP8 and INT8 weights have a scale per tensor, per output channel or per `block`; MXFP4 (Open
    Compute Project, Microscaling Formats 1.0) has one per 32 weights.
    """

    kind: str  # "FP8", "INT8", "MXFP4" or "GGUF …"
    block: tuple[int, int] | None = None  # outputs, inputs that share a scale
    excluded: tuple[str, ...] = ()  # modules that are not quantized, as `Quantization`'s
    included: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.block is None:
            return self.kind
        return f"{self.kind} in blocks of {self.block[0]}×{self.block[1]}"

    @property
    def kept(self) -> Quantization | None:
        """The format in memory of linear layers that keep their 8 bits; None if none do."""
        method = {FP8: STORED_FP8, INT8: STORED_INT8}.get(self.kind)
        if method is None:
            return None
        size = None if self.block is None else self.block[1]
        excluded = (*self.excluded, *_PLAIN)
        return Quantization(method, 8, size, excluded=excluded, included=self.included)


_NAMES = {
    "awq": ("awq", "awq_marlin"),
    "gptq": ("gptq", "gptq_marlin"),
    "compressed-tensors": ("compressed-tensors", "gguf"),  # GGUF's types of 4 and 8 bits, too
    "fp8": ("fp8", "compressed-tensors", "modelopt"),
    "int8": ("compressed-tensors",),
    "mxfp4": ("mxfp4",),
    "gguf": ("gguf",),
}
STORED_NAMES = tuple(dict.fromkeys(name for names in _NAMES.values() for name in names))
"""The names of vLLM's --quantization for formats of checkpoints."""


def format_name(quantization: Quantization | None, stored: StoredWeights | None) -> str:
    """Returns the name of a checkpoint's format, "" if it is not quantized."""
    if stored is not None:
        return stored.kind.partition(" ")[0].lower()
    return "" if quantization is None else quantization.method


def check_name(name: str, found: str) -> None:
    """Raises ConfigError if `--quantization NAME` is not what a checkpoint of the format `found`
    has."""
    if name in _NAMES.get(found, ()):
        return
    is_so = f"its format is {found}" if found else "it is not quantized, for which there is int8"
    raise ConfigError(
        f"--quantization {name} is not what the checkpoint says: {is_so}; leave the option out"
    )


def numbers_of(weight: str) -> str:
    """Returns the name by which the loader reads a weight's 8-bit numbers."""
    return f"{weight}#numbers"


def scales_of(weight: str) -> str:
    """Returns the name by which the loader reads a weight's scales, `[out, groups]`."""
    return f"{weight}#scales"


def weight_formats(
    config: Mapping[str, Any] | None,
) -> tuple[Quantization | None, StoredWeights | None]:
    """Reads a checkpoint's `quantization_config`: the format that linear layers keep in memory, and
    the one that is dequantized.

    Raises:
        ConfigError: the format is not supported.
    """
    if not config:
        return None, None
    check_values(config, QUANTIZATION, "quantization_config")
    method = config.get("quant_method")
    if method in ("bitsandbytes", "bnb"):
        raise ConfigError(
            "quantization_config: bitsandbytes weights are not supported: serve the unquantized "
            "model, with --quantization int8 for 8 bits"
        )
    if method == "compressed-tensors" and config.get("format") != "pack-quantized":
        return None, _compressed(config)
    if method == "gguf":
        return _gguf(config)
    reader = {"fp8": _fp8, "fbgemm_fp8": _fp8, "modelopt": _modelopt, "mxfp4": _mxfp4}
    if method in reader:
        return None, reader[method](config)
    return Quantization.from_config(config), None


def _fp8(config: Mapping[str, Any]) -> StoredWeights:
    kind = str(config.get("fmt") or "e4m3")
    if "e4m3" not in kind:
        raise unsupported("fp8 fmt", kind)
    excluded = _paths(config.get("modules_to_not_convert"))
    return StoredWeights(FP8, _block(config.get("weight_block_size")), excluded)


def _modelopt(config: Mapping[str, Any]) -> StoredWeights:
    if config.get("quant_algo") != "FP8":
        raise unsupported("modelopt quant_algo", config.get("quant_algo"))
    return StoredWeights(FP8, excluded=_paths(config.get("exclude_modules"), config.get("ignore")))


def _paths(*lists: Any) -> tuple[str, ...]:
    """Returns the paths of modules; those with `*`, as modelopt writes, as regular expressions."""
    paths = [path for paths in lists for path in paths or ()]
    found = tuple(
        REGEX + re.escape(path).replace(r"\*", ".*") if "*" in path and REGEX not in path else path
        for path in paths
    )
    for path in found:
        if path.startswith(REGEX):
            check_pattern(path.removeprefix(REGEX), "quantization_config")
    return found


def _mxfp4(config: Mapping[str, Any]) -> StoredWeights:
    return StoredWeights(MXFP4)


def _gguf(config: Mapping[str, Any]) -> tuple[Quantization | None, StoredWeights | None]:
    """Reads the settings that `pdserve/demo_model/gguf_folder.py` writes: types with one scale per
    32 weights are read like pack-quantized weights, the others are dequantized."""
    kinds, bits = config["dequantized"], config["bits"]
    stored = StoredWeights(f"{GGUF} {', '.join(kinds)}") if kinds else None
    if bits is None:
        return None, stored
    packed = Quantization(
        method="compressed-tensors",
        bits=bits,
        group_size=_GGUF_GROUP,
        zero_offset=2 ** (bits - 1),
        symmetric=True,
        included=tuple(config["modules"]),
    )
    return packed, stored


def _compressed(config: Mapping[str, Any]) -> StoredWeights:
    weights, format = compressed_weights(config), config.get("format")
    kinds = {("float", 8): FP8, ("int", 8): INT8}
    kind = kinds.get((weights.get("type", "int"), weights.get("num_bits", 8)))
    known = ("float-quantized", "int-quantized", "naive-quantized")
    if kind is None or format not in known:
        raise unsupported("compressed-tensors format", format)
    if not weights.get("symmetric", True):
        raise unsupported("compressed-tensors symmetric", False)
    if weights.get("strategy") not in ("tensor", "channel", "block"):
        raise unsupported("compressed-tensors strategy", weights.get("strategy"))
    block, excluded = _block(weights.get("block_structure")), _paths(config.get("ignore"))
    return StoredWeights(kind, block, excluded, _paths(compressed_targets(config)))


def _block(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(isinstance(each, int) and each > 0 for each in size)
    ):
        return size[0], size[1]
    raise unsupported("weight_block_size", size)
