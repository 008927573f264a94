"""How the weights of linear layers are stored. Standard library only.

Checkpoints describe it under `quantization_config` in `config.json`, in the format of Hugging Face
transformers: AWQ (arXiv:2306.00978) as AutoAWQ writes it, GPTQ (arXiv:2210.17323) as AutoGPTQ and
GPTQModel do, and pack-quantized as compressed-tensors does. `stored_weights.py` reads the formats
that are dequantized while they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.common.core.config_values import GROUP, NAMES, check_pattern, check_values
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.printable import printable

SUPPORTED = (
    "AWQ checkpoints (version gemm, 4 bits, zero_point), GPTQ checkpoints (4 or 8 bits, "
    "checkpoint_format gptq or gptq_v2), FP8 (fp8, fbgemm_fp8, modelopt), compressed-tensors "
    "(pack-quantized of 4 or 8 bits, float-quantized, int-quantized), MXFP4, or "
    "--quantization int8 with an unquantized one"
)
GROUP_INDEX_BYTES = 4  # the group of an input, in checkpoints with `g_idx`
SCALE_BYTES = 4  # a float32 scale, in FP8 and INT8 checkpoints
MAX_SHOWN = 200  # characters of a value that is not supported
REGEX = "re:"  # prefix of a path that is a regular expression, matched at the start


@dataclass(frozen=True, slots=True)
class Quantization:
    """Linear layers with `bits` per weight. Embedding, head, norms and biases keep the dtype,
    except that `int8` also covers the head and an embedding tied to it.

    `int8` quantizes weights while they are loaded, with a scale per output channel and no zero
    points. With the other methods, every `group_size` inputs of an output channel share a scale and
    a zero point; `symmetric` files store no zero points: all of them equal `zero_offset`.
    """

    method: str  # "int8", "awq", "gptq", "compressed-tensors", or of `StoredWeights.kept`
    bits: int
    group_size: int | None = None  # None: all inputs
    desc_act: bool = False  # the tensor `g_idx` assigns inputs to groups, not their order
    zero_offset: int = 0  # added to stored zero points
    symmetric: bool = False  # whether no zero points are stored
    excluded: tuple[str, ...] = ()  # (parts of) paths of modules that keep the dtype
    included: tuple[str, ...] = ()  # (parts of) paths of quantized modules; empty: all others

    @property
    def rounds(self) -> bool:
        """Whether weights are quantized while they are loaded; with the other methods they are
        quantized in the checkpoint."""
        return self.method == "int8"

    @property
    def scaled(self) -> bool:
        """Whether the numbers are those of an FP8 or INT8 checkpoint (`StoredWeights.kept`)."""
        return self.method.startswith("stored")

    def nbytes(self, rows: int, columns: int, inputs: int, item: int, parts: int = 1) -> int:
        """Returns the bytes of a rank's `[rows, columns]` part of a weight with `inputs` inputs.
        `item`: bytes of an unquantized element. `parts`: fused matrices, each with its `g_idx`."""
        numbers = rows * columns
        if self.rounds:
            return numbers + rows * item
        first, last = self.groups(0, columns, inputs)
        groups = rows * (last - first)  # each with a scale and a zero point of one byte
        if self.scaled:
            return numbers + groups * SCALE_BYTES
        index = parts * columns * GROUP_INDEX_BYTES if self.desc_act else 0
        return numbers * self.bits // 8 + groups * (item + (not self.symmetric)) + index

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Quantization:
        """Reads a checkpoint's `quantization_config`.

        Raises:
            ConfigError: the format is not supported.
        """
        method = config.get("quant_method")
        readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _pack_quantized}
        reader = readers.get(str(method))
        if reader is None:
            raise unsupported("quant_method", method)
        found = reader(config)
        for path in (*found.excluded, *found.included):
            if path.startswith(REGEX):
                check_pattern(path.removeprefix(REGEX), "quantization_config")
        return found

    def covers(self, module: str) -> bool:
        """Returns whether the linear layer `module`, e.g. `model.layers.0.mlp.up_proj`, is
        quantized."""
        if self.included and not _names(self.included, module):
            return False
        return not _names(self.excluded, module)

    def groups(self, start: int, end: int, total: int) -> tuple[int, int]:
        """Returns the range `first, last` of groups that inputs `start … end-1` of `total` use."""
        size = self.group_size or total
        if self.desc_act:
            start, end = 0, total
        return start // size, -(-end // size)


QUANTIZATIONS = {
    "int8": Quantization("int8", 8),
    "int4": Quantization("awq", 4, group_size=128),  # the usual form of such checkpoints
}


def _awq(config: Mapping[str, Any]) -> Quantization:
    _check(config, "bits", 4)
    _check(config, "zero_point", True)
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise unsupported("awq version", version)
    return Quantization(
        method="awq",
        bits=4,
        group_size=_group_size(config),
        excluded=tuple(config.get("modules_to_not_convert") or ()),
    )


def _gptq(config: Mapping[str, Any]) -> Quantization:
    _check(config, "bits", 4, 8)
    _check(config, "checkpoint_format", "gptq", "gptq_v2", None)
    _check(config, "pack_dtype", "int32", None)
    _check(config, "lm_head", False, None)
    rules = config.get("dynamic") or {}
    if not all(rule.startswith("-:") for rule in rules):
        raise unsupported("gptq dynamic", rules)
    unchanged = tuple(REGEX + rule.removeprefix("-:") for rule in rules)
    blocks = config.get("modules_in_block_to_quantize") or ()
    if not (isinstance(blocks, list | tuple) and all(map(NAMES.fits, blocks))):
        raise unsupported("gptq modules_in_block_to_quantize", blocks)
    return Quantization(
        method="gptq",
        bits=config["bits"],
        group_size=_group_size(config),
        desc_act=bool(config.get("desc_act", False)),
        # The format `gptq` stores zero points minus one.
        zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1,
        excluded=tuple(config.get("modules_to_not_convert") or ()) + unchanged,
        included=tuple(name for names in blocks for name in names),
    )


def _pack_quantized(config: Mapping[str, Any]) -> Quantization:
    weights = compressed_weights(config)
    bits, symmetric, strategy = (weights.get(k) for k in ("num_bits", "symmetric", "strategy"))
    if bits not in (4, 8) or weights.get("type", "int") != "int":
        raise unsupported("pack-quantized num_bits", bits)
    if strategy not in ("group", "channel"):
        raise unsupported("pack-quantized strategy", strategy)
    return Quantization(
        method="compressed-tensors",
        bits=bits,
        group_size=_group_size(weights) if strategy == "group" else None,
        desc_act=weights.get("actorder") in ("group", "dynamic"),
        zero_offset=2 ** (bits - 1) if symmetric else 0,
        symmetric=bool(symmetric),
        excluded=tuple(config.get("ignore") or ()),
        included=compressed_targets(config),
    )


def compressed_weights(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns compressed-tensors' settings for weights, which must be one for all modules."""
    groups = list((config.get("config_groups") or {}).values())
    for group in groups:
        if not isinstance(group, Mapping) or not group.get("targets"):
            raise unsupported("compressed-tensors config_groups", config.get("config_groups"))
        check_values(group, GROUP, "quantization_config: config_groups")
    kinds = [group.get("weights") or {} for group in groups]
    if not kinds or any(kind != kinds[0] for kind in kinds):
        raise unsupported("compressed-tensors config_groups", config.get("config_groups"))
    return dict(kinds[0])


def compressed_targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the (parts of) paths of compressed-tensors' quantized modules; none: all linear."""
    targets = [name for group in config["config_groups"].values() for name in group["targets"]]
    return () if "Linear" in targets else tuple(targets)


def _group_size(config: Mapping[str, Any]) -> int | None:
    size = config.get("group_size")
    if isinstance(size, int) and (size == -1 or size > 0):
        return None if size == -1 else size
    raise unsupported("group_size", size)


def _check(config: Mapping[str, Any], key: str, *values: Any) -> None:
    if config.get(key) not in values:
        raise unsupported(f"{config['quant_method']} {key}", config.get(key))


def unsupported(what: str, value: Any) -> ConfigError:
    """Returns the error for a setting of `quantization_config`."""
    shown = printable(repr(value), MAX_SHOWN)
    return ConfigError(f"quantization_config: {what} {shown} is not supported; use {SUPPORTED}")


def _names(paths: Iterable[str], module: str) -> bool:
    """Returns whether one of the paths is a sequence of whole components of `module`, or a regular
    expression that fits its beginning."""
    return any(
        re.match(path.removeprefix(REGEX), module) is not None
        if path.startswith(REGEX)
        else f".{path}." in f".{module}."
        for path in paths
    )
