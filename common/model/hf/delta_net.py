"""Has transformers' gated delta net layers compute their states through the step: the classes' own
code takes all tokens as one sequence."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.delta_net import DeltaInputs, DeltaSizes
from pdserve.common.model.hf.attention import running

MODEL_TYPES = frozenset({"olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Text models whose linear attention layers are gated delta nets of the form below."""


_ENDS = (("norm", "o_norm"), ("out_proj", "o_proj"))


def take_delta_nets(model: Any) -> None:
    """Replaces the code of these layers, in a model with or without loaded weights."""
    if model.config.model_type not in MODEL_TYPES:
        return
    for net in model.modules():
        if hasattr(net, "A_log") and net.conv1d.weight is not None:  # None: another stage's layer
            net.by_unit = _by_unit(net, net.conv1d.weight[:, 0].detach().T).permute(1, 2, 0)
            net.by_unit = net.by_unit.float().contiguous()
            net.forward = MethodType(_forward, net)


def _sizes(net: Any) -> DeltaSizes:
    ratio = net.num_v_heads // net.num_k_heads
    return DeltaSizes(ratio, net.head_k_dim, net.head_v_dim, net.conv_kernel_size)


def _by_unit(net: Any, mixed: Tensor) -> Tensor:
    """`[T, queries + keys + values]` → `[T, units, width]`."""
    parts = mixed.split((net.key_dim, net.key_dim, net.value_dim), dim=-1)
    return torch.cat([each.unflatten(-1, (net.num_k_heads, -1)) for each in parts], dim=-1)


def _forward(net: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    """`[1, T, hidden]` → `[1, T, hidden]`."""
    if hasattr(net, "g_proj"):  # OLMo Hybrid
        products = (net.q_proj, net.k_proj, net.v_proj)
        mixed = torch.cat([each(hidden_states) for each in products], dim=-1)
        z, b, a = (each(hidden_states) for each in (net.g_proj, net.b_proj, net.a_proj))
    elif hasattr(net, "in_proj_qkvz"):  # Qwen3-Next
        projected = net.in_proj_qkvz(hidden_states), net.in_proj_ba(hidden_states)
        *parts, z, b, a = net.fix_query_key_value_ordering(*projected)
        mixed = torch.cat([each.flatten(2) for each in parts], dim=-1)
    else:
        mixed, z = net.in_proj_qkv(hidden_states), net.in_proj_z(hidden_states)
        b, a = net.in_proj_b(hidden_states), net.in_proj_a(hidden_states)
    decays = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
    betas = b.sigmoid().float()
    if getattr(net, "allow_neg_eigval", False):
        betas = betas * 2.0
    units = net.num_k_heads
    inputs = DeltaInputs(
        _sizes(net),
        _by_unit(net, mixed[0]),
        decays[0].unflatten(-1, (units, -1)),
        betas[0].unflatten(-1, (units, -1)),
        net.by_unit,
    )
    found = running().recur(net.layer_idx, inputs).unflatten(-1, (-1, net.head_v_dim))
    norm, project = (getattr(net, a, None) or getattr(net, b) for a, b in _ENDS)
    found = norm(found.flatten(0, 1), z.reshape(-1, net.head_v_dim))
    out: Tensor = project(found.view(*hidden_states.shape[:2], -1))
    return out
