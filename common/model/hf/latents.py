"""Multi-head latent attention (MLA) of transformers' classes: layers keep the latents, from which
the keys and values of all heads are computed, as native models do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pdserve.common.core.latent_spec import LatentSpec

UP = "kv_b_proj"  # the matrix from latents to keys and values


def keeps_latents(module: nn.Module) -> bool:
    return hasattr(module, "expand_kv") and hasattr(module, UP)


def of_latents(model: nn.Module, name: str) -> bool:
    """Returns whether `name` is a layer's matrix from latents to the keys and values of heads."""
    owner, _, leaf = name.rpartition(".")
    return leaf == UP and keeps_latents(model.get_submodule(owner))


def take_latents(model: nn.Module) -> None:
    """Has layers pass latents to attention instead of keys and values."""
    for module in model.modules():
        if keeps_latents(module):
            module.__dict__["expand_kv"] = _as_they_are


def _as_they_are(latents: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys `[1, 1, T, kv_rank + rope_dim]` and values `[1, 1, T, kv_rank]`."""
    return torch.cat((latents, turned), dim=-1), latents


def latent_of(module: Any, scale: float) -> LatentSpec | None:
    """Returns the sizes of a layer's latents; None if it keeps keys and values."""
    if "expand_kv" not in module.__dict__:
        return None
    return LatentSpec(
        query_rank=None,
        kv_rank=module.kv_lora_rank,
        nope_dim=module.qk_nope_head_dim,
        rope_dim=module.qk_rope_head_dim,
        value_dim=module.v_head_dim,
        interleaved=False,
        scale=scale,
    )


def up_projection(module: Any, latent: LatentSpec) -> Tensor:
    """Returns `[heads, nope_dim + value_dim, kv_rank]` of this rank's heads."""
    weight: Tensor = getattr(module, UP).weight
    return weight.view(-1, latent.nope_dim + latent.value_dim, latent.kv_rank)
