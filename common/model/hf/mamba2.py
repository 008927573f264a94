"""Has transformers' Mamba-2 layers compute their states through the step: the classes' own code
takes all tokens as one sequence, and computes the first chunk differently from later ones."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.hf.attention import running
from pdserve.common.model.ssd import SSDInputs, SSDSizes


def take_mamba2(net: Any) -> bool:
    """Replaces the code of a layer, with or without loaded weights; returns whether the layer is
    supported."""
    if net.activation not in ("silu", "swish"):
        return False
    if net.conv1d.weight is not None:  # None: another stage's layer
        net.ssd = _constants(net)
    net.forward = MethodType(_forward, net)
    return True


def _constants(net: Any) -> SSDInputs:
    """Returns the part of a layer's inputs that does not depend on the tokens."""
    weights = net.conv1d.weight[:, 0].detach().t().float().contiguous()
    bias, none = net.conv1d.bias, weights.new_zeros(weights.shape[1])
    return SSDInputs(
        SSDSizes(
            net.num_heads, net.head_dim, net.n_groups, net.ssm_state_size, net.conv_kernel_size
        ),
        mixed=weights[:0],
        steps=weights[:0],
        rates=-net.A_log.detach().float().exp(),
        skips=net.D.detach().float(),
        weights=weights,
        bias=none if bias is None else bias.detach().float(),
    )


def _forward(net: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    """`[1, T, hidden]` → `[1, T, hidden]`."""
    if hasattr(net, "ssm_in_multiplier"):  # Falcon-H1
        projected = net.in_proj(hidden_states * net.ssm_in_multiplier) * net.mup_vector
    else:
        projected = net.in_proj(hidden_states)
    sizes = (net.intermediate_size, net.conv_dim, net.num_heads)
    gate, mixed, steps = projected.split(sizes, dim=-1)
    steps = F.softplus(steps.float() + net.dt_bias.float())
    least, most = net.time_step_limit
    inputs = replace(net.ssd, mixed=mixed[0], steps=torch.clamp(steps, least, most)[0])
    found = running().recur(net.layer_idx, inputs)[None]
    normed = getattr(net, "mamba_rms_norm", True)
    found = net.norm(found, gate) if normed else found * F.silu(gate)
    out: Tensor = net.out_proj(found.to(hidden_states.dtype))
    return out
