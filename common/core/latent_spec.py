"""Reads multi-head latent attention from a checkpoint's `config.json`. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.common.core.config_values import LATENT_ROPE, check_values
from pdserve.common.core.moe_spec import required_int


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434).

    A layer caches one latent of `size` elements per token: `kv_rank` elements, from which a matrix
    computes the keys and values of all heads, and `rope_dim` rotated ones that all heads share. The
    key of a head is `nope_dim` elements of its own, followed by the shared ones.
    """

    query_rank: int | None  # of the queries' own latent; None: they are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool  # whether rotated pairs are adjacent, instead of D/2 apart
    scale: float  # softmax scale

    @classmethod
    def from_config(cls, config: Mapping[str, Any], rope: Mapping[str, Any]) -> LatentSpec:
        """Reads the config and its rotary settings; raises ConfigError if a key is missing."""
        nope, rotated = (
            required_int(config, "qk_nope_head_dim"),
            required_int(config, "qk_rope_head_dim"),
        )
        query_rank: int | None = config.get("q_lora_rank")
        return cls(
            query_rank=query_rank,
            kv_rank=required_int(config, "kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rotated,
            value_dim=required_int(config, "v_head_dim"),
            interleaved=bool(config.get("rope_interleave", True)),
            scale=(nope + rotated) ** -0.5 * _yarn_scale(rope) ** 2,
        )

    @property
    def size(self) -> int:
        """The elements that a layer caches per token."""
        return self.kv_rank + self.rope_dim

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """Returns YaRN's factor (arXiv:2309.00071) for queries and for keys, where the model applies it
    to the scores instead of to the rotation."""
    check_values(rope, LATENT_ROPE)
    all_dims, factor = rope.get("mscale_all_dim") or 0, float(rope.get("factor") or 1.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default" or not all_dims or factor <= 1:
        return 1.0
    return 0.1 * all_dims * math.log(factor) + 1.0
