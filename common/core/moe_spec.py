"""Reads the experts from a checkpoint's `config.json` into `MoESpec`. Standard library only.

In a mixture of experts (arXiv:1701.06538) some layers have many MLPs, the experts; a router chooses
the few that each token uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    shared_expert: bool = False


MIXTRAL = MoEFamily("block_sparse_moe", "w1", "w3", "w2", "intermediate_size", norm_topk_prob=True)
QWEN2_MOE = MoEFamily("mlp", "gate_proj", "up_proj", "down_proj", shared_expert=True)
QWEN3_MOE = MoEFamily("mlp", "gate_proj", "up_proj", "down_proj")


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

    @classmethod
    def from_config(cls, config: Mapping[str, Any], family: MoEFamily) -> MoESpec:
        """Reads the config; raises ConfigError if a key is missing or a number is invalid."""
        experts = required_int(config, "num_local_experts", "num_experts")
        top_k = required_int(config, "num_experts_per_tok")
        if not 1 <= top_k <= experts:
            raise ConfigError(f"config.json: num_experts_per_tok {top_k} of {experts} experts")
        shared, norm = family.shared_expert, family.norm_topk_prob
        return cls(
            family=family,
            num_experts=experts,
            top_k=top_k,
            intermediate_size=required_int(config, family.intermediate_size),
            shared_intermediate_size=(
                required_int(config, "shared_expert_intermediate_size") if shared else 0
            ),
            norm_topk_prob=bool(config.get("norm_topk_prob")) if norm is None else norm,
            sparse_layers=_sparse_layers(config),
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


def _sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    layers = range(required_int(config, "num_hidden_layers"))
    dense = config.get("mlp_only_layers") or ()
    step = config.get("decoder_sparse_step") or 1
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def required_int(config: Mapping[str, Any], *keys: str) -> int:
    """Returns the integer under the first of `keys` that exists; raises ConfigError if none
    does."""
    for key in keys:
        if isinstance(value := config.get(key), int):
            return value
    raise ConfigError(f"config.json: {' or '.join(keys)} must be an integer")
