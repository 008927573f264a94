"""Reads the experts from a checkpoint's `config.json` into `MoESpec`. Standard library only.

In a mixture of experts (arXiv:1701.06538) some layers have many MLPs, the experts; a router chooses
the few that each token uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pdserve.common.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MoEFamily:
    """How an architecture names its experts, and settings that its config does not have."""

    block: str  # the submodule of a layer, beside "self_attn"
    gate_proj: str
    up_proj: str
    down_proj: str
    intermediate_size: str = "moe_intermediate_size"  # the key in config.json
    norm_topk_prob: bool | None = None  # None: from the config
    shared_expert: str = ""  # its submodule of the block; "": none
    shared_gate: bool = False  # whether a gate scales the shared expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False  # whether experts are chosen by their score plus a bias
    first_layers_dense: int | None = None  # default of `first_k_dense_replace`, if it counts
    precise_router: bool = False  # whether the router computes in float32 throughout


MIXTRAL = MoEFamily("block_sparse_moe", "w1", "w3", "w2", "intermediate_size", norm_topk_prob=True)
QWEN2_MOE = MoEFamily(
    "mlp", "gate_proj", "up_proj", "down_proj", shared_expert="shared_expert", shared_gate=True
)
QWEN3_MOE = MoEFamily("mlp", "gate_proj", "up_proj", "down_proj")
DEEPSEEK_V2 = MoEFamily(
    "mlp",
    "gate_proj",
    "up_proj",
    "down_proj",
    norm_topk_prob=False,
    shared_expert="shared_experts",
    first_layers_dense=0,
    precise_router=True,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    norm_topk_prob=None,
    first_layers_dense=3,
    scoring="sigmoid",
    correction_bias=True,
)
GLM4_MOE = replace(DEEPSEEK_V3, first_layers_dense=1)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Group-limited routing (DeepSeek-V2, arXiv:2405.04434): the experts of a token come from `top`
    of `count` equal groups, those whose `best` best experts have the highest sum of scores."""

    count: int
    top: int
    best: int


@dataclass(frozen=True, slots=True)
class MoESpec:
    """The experts of one model; sizes are of the whole model, not of a rank."""

    family: MoEFamily
    num_experts: int  # in each sparse layer
    top_k: int  # experts per token
    intermediate_size: int  # of one expert
    shared_intermediate_size: int  # of the shared expert; 0: none
    norm_topk_prob: bool  # whether a token's `top_k` weights are scaled to sum to one
    sparse_layers: tuple[int, ...]  # the other layers have one dense MLP
    groups: ExpertGroups | None = None
    weight_scale: float = 1.0  # factor of the routed experts' sum

    @classmethod
    def from_config(cls, config: Mapping[str, Any], family: MoEFamily) -> MoESpec:
        """Reads the config; raises ConfigError if a key is missing or a number is invalid."""
        experts = required_int(config, "num_local_experts", "num_experts", "n_routed_experts")
        top_k = required_int(config, "num_experts_per_tok")
        if not 1 <= top_k <= experts:
            raise ConfigError(f"config.json: num_experts_per_tok {top_k} of {experts} experts")
        norm = family.norm_topk_prob
        return cls(
            family=family,
            num_experts=experts,
            top_k=top_k,
            intermediate_size=required_int(config, family.intermediate_size),
            shared_intermediate_size=_shared_size(config, family),
            norm_topk_prob=bool(config.get("norm_topk_prob")) if norm is None else norm,
            sparse_layers=_sparse_layers(config, family),
            groups=_groups(config, family, experts, top_k),
            weight_scale=float(config.get("routed_scaling_factor") or 1.0),
        )

    def validate(self, tp: int, ep: int) -> None:
        """Raises ConfigError unless the experts can be spread over `ep` ranks, with each expert
        split over `tp / ep` ranks."""
        flag, split = f"--expert-parallel-size {ep}", tp // ep
        if tp % ep:
            raise ConfigError(
                f"{flag} does not divide --tensor-parallel-size {tp}: experts are spread over the "
                "ranks of a tensor-parallel group"
            )
        if self.num_experts % ep:
            raise ConfigError(f"{flag} does not divide the model's {self.num_experts} experts")
        if self.intermediate_size % split:
            raise ConfigError(
                f"--tensor-parallel-size {tp} with {flag} splits each expert over {split} ranks, "
                f"which do not divide its intermediate size {self.intermediate_size}"
            )
        if self.shared_intermediate_size % tp:
            raise ConfigError(
                f"--tensor-parallel-size {tp} does not divide shared_expert_intermediate_size "
                f"{self.shared_intermediate_size}"
            )


def _shared_size(config: Mapping[str, Any], family: MoEFamily) -> int:
    if not family.shared_expert:
        return 0
    if family.shared_gate:
        return required_int(config, "shared_expert_intermediate_size")
    count = config.get("n_shared_experts") or 0  # all of them are one MLP
    return count * required_int(config, family.intermediate_size)


def _sparse_layers(config: Mapping[str, Any], family: MoEFamily) -> tuple[int, ...]:
    """Returns the sparse ones of `mlp_layer_types`; without it all after the first
    `first_k_dense_replace`, or every `decoder_sparse_step`-th that is not in `mlp_only_layers`."""
    layers = range(required_int(config, "num_hidden_layers"))
    if kinds := config.get("mlp_layer_types"):
        if len(kinds) != len(layers) or not set(kinds) <= {"dense", "sparse"}:
            raise ConfigError(
                f"config.json: mlp_layer_types {kinds!r} do not fit {len(layers)} layers"
            )
        return tuple(layer for layer in layers if kinds[layer] == "sparse")
    if family.first_layers_dense is not None:
        if config.get("moe_layer_freq", 1) != 1:
            raise ConfigError("config.json: moe_layer_freq other than 1 is not supported")
        first = config.get("first_k_dense_replace")
        return tuple(layers[family.first_layers_dense if first is None else first :])
    dense = config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step") or 1
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def _groups(
    config: Mapping[str, Any], family: MoEFamily, experts: int, top_k: int
) -> ExpertGroups | None:
    if family.first_layers_dense is None:
        return None
    best = 2
    if not family.correction_bias:
        method, best = config.get("topk_method", "greedy"), 1
        if method == "greedy":
            return None
        if method != "group_limited_greedy":
            raise ConfigError(
                f"topk_method {method!r} is not supported; supported: greedy, group_limited_greedy"
            )
    groups = ExpertGroups(required_int(config, "n_group"), required_int(config, "topk_group"), best)
    size = experts // max(1, groups.count)
    if groups.count < 1 or experts % groups.count or size < best:
        raise ConfigError(f"config.json: n_group {groups.count} does not divide {experts} experts")
    if not (1 <= groups.top <= groups.count and top_k <= groups.top * size):
        raise ConfigError(
            f"config.json: topk_group {groups.top} of {groups.count} groups leaves no "
            f"{top_k} experts to choose"
        )
    return groups


def required_int(config: Mapping[str, Any], *keys: str) -> int:
    """Returns the integer under the first of `keys` that exists; raises ConfigError if none
    does."""
    for key in keys:
        if isinstance(value := config.get(key), int) and not isinstance(value, bool):
            return value
    raise ConfigError(f"config.json: {' or '.join(keys)} must be an integer")
