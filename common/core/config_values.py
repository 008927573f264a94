"""Checks the types and bounds of what a checkpoint's `config.json` says. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.common.core.errors import InvalidCheckpoint
from pdserve.common.core.printable import printable

MAX_INT = 2**31 - 1
MAX_LAYERS = 1024  # describing that many takes seconds
MAX_EXPERTS = 4096  # per layer
MAX_NUMBER = 1e12  # largest scaling factor
MAX_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The type and bounds of a value, and their description for error messages."""

    says: str
    fits: Callable[[Any], bool]


def whole(least: int, most: int = MAX_INT) -> ValueKind:
    """Returns the kind of whole numbers within these bounds."""

    def fits(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return ValueKind(f"a whole number from {least} to {most}", fits)


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= MAX_NUMBER


def _list_of(kind: type, says: str) -> ValueKind:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and all(type(each) is kind for each in value)

    return ValueKind(f"a list of {says}", fits)


SIZE, COUNT = whole(1), whole(0)
POSITIVE = ValueKind("a positive number", _is_number)
FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
TEXT = ValueKind("a string", lambda value: isinstance(value, str))
OBJECT = ValueKind("an object", lambda value: isinstance(value, Mapping))
NAMES, NUMBERS = _list_of(str, "strings"), _list_of(int, "whole numbers")
TOKENS = ValueKind(
    "a token's number or a list of them",
    lambda value: COUNT.fits(value) or (NUMBERS.fits(value) and all(map(COUNT.fits, value))),
)

CONFIG = {
    "architectures": NAMES,
    "model_type": TEXT,
    "text_config": OBJECT,
    "quantization_config": OBJECT,
    "eos_token_id": TOKENS,
}
"""Keys that every role reads, of any architecture."""

_SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_experts_per_tok", "n_group", "topk_group",
)  # fmt: skip
_COUNTS = (
    "sliding_window", "max_window_layers", "first_k_dense_replace", "n_shared_experts",
    "decoder_sparse_step",
)  # fmt: skip
_FLAGS = (
    "attention_bias", "qkv_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window",
    "norm_topk_prob", "rope_interleave",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
NATIVE = {
    **CONFIG,
    **dict.fromkeys(_SIZES, SIZE),
    **dict.fromkeys(_COUNTS, COUNT),
    **dict.fromkeys(_FLAGS, FLAG),
    **dict.fromkeys(_EXPERTS, whole(0, MAX_EXPERTS)),
    "num_hidden_layers": whole(1, MAX_LAYERS),
    "num_nextn_predict_layers": whole(0, MAX_LAYERS),
    "rms_norm_eps": POSITIVE,
    "routed_scaling_factor": POSITIVE,
    "hidden_act": TEXT,
    "layer_types": NAMES,
    "mlp_layer_types": NAMES,
    "mlp_only_layers": NUMBERS,
}
"""Keys that native models read, besides the rotary settings."""

SMALL = ValueKind(
    "a number from 0 to 1", lambda value: value == 0 or (_is_number(value) and value < 1)
)
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
GENERIC = dict.fromkeys(_EPSILONS, SMALL)
"""Keys of which models that run through transformers have one or more."""
ROPE = {"rope_theta": POSITIVE, "factor": POSITIVE}
LATENT_ROPE = {"factor": POSITIVE, "mscale_all_dim": POSITIVE}
QUANTIZATION = {
    "quant_method": TEXT,
    "format": TEXT,
    "modules_to_not_convert": NAMES,
    "ignore": NAMES,
    "exclude_modules": NAMES,
    "dynamic": OBJECT,
    "config_groups": OBJECT,
}
GROUP = {"weights": OBJECT, "targets": NAMES}  # of `config_groups`


def check_values(
    config: Mapping[str, Any], kinds: Mapping[str, ValueKind], where: str = "config.json"
) -> None:
    """Raises InvalidCheckpoint if a key's value is not of its kind. Null counts as absent."""
    for key, kind in kinds.items():
        value = config.get(key)
        if value is not None and not kind.fits(value):
            shown = printable(repr(value), MAX_SHOWN)
            raise InvalidCheckpoint(f"{where}: {key} must be {kind.says}, not {shown}")


def check_pattern(pattern: str, where: str) -> None:
    """Raises InvalidCheckpoint if `pattern` is not a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        shown = printable(pattern, MAX_SHOWN)
        raise InvalidCheckpoint(f"{where}: {shown} is not a regular expression: {error}") from error
