"""Has transformers' layers of Mamba leave their states to the step: the classes' own code takes a
step's tokens for one sequence, and several of them for its first ones."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdserve.common.core.errors import ConfigError
from pdserve.common.model.hf.attention import running
from pdserve.common.model.selective import SelectiveInputs, SelectiveSizes

_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


def take_mamba(net: Any) -> None:
    """Replaces the code of a layer whose weights are loaded, or that has none. Raises ConfigError
    for one that no checkpoint is known to have."""
    if net.activation not in ("silu", "swish"):
        raise ConfigError(f"Mamba layers with {net.activation!r} are not supported, only silu")
    if net.conv1d.weight is not None:  # None: of another stage
        net.selective = _constants(net)
    net.forward = MethodType(_forward, net)


def _constants(net: Any) -> SelectiveInputs:
    """Returns a layer's inputs but for a step's tokens."""
    chooses, lengths = net.x_proj.weight.detach()[None], net.dt_proj.weight.detach()[None]
    _, inner, rank = lengths.shape
    sizes = SelectiveSizes(inner, 1, net.ssm_state_size, rank, net.conv_kernel_size)
    weights = net.conv1d.weight[:, 0].detach().t().float().contiguous()
    none = weights.new_zeros(inner)
    eps, norms = _norms(net, sizes, chooses)
    return SelectiveInputs(
        sizes,
        eps=eps,
        mixed=chooses.new_empty(0, inner),
        weights=weights,
        bias=none if net.conv1d.bias is None else net.conv1d.bias.detach().float(),
        chooses=chooses,
        norms=norms,
        lengths=lengths,
        length_bias=none if net.dt_proj.bias is None else net.dt_proj.bias.detach().float(),
        rates=-net.A_log.detach().float().exp(),
        skips=net.D.detach().float(),
    )


def _norms(net: Any, sizes: SelectiveSizes, like: Tensor) -> tuple[float | None, Tensor]:
    """Returns `SelectiveInputs.eps` and `norms`. Falcon Mamba's norms have no weights."""
    counts = (sizes.rank, sizes.state_dim, sizes.state_dim)
    found = [getattr(net, name, None) for name in _NORMS]
    weights = [getattr(each, "weight", None) for each in found]
    known = [
        weight.detach() if isinstance(weight, nn.Parameter) else like.new_ones(count)
        for weight, count in zip(weights, counts, strict=True)
    ]
    eps = getattr(found[0], "eps", getattr(found[0], "variance_epsilon", None))
    return eps, torch.cat(known)


def _forward(net: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    """`[1, T, hidden]` → `[1, T, hidden]`."""
    mixed, gate = net.in_proj(hidden_states).chunk(2, dim=-1)
    inputs = replace(net.selective, mixed=mixed[0])
    found = running().recur(net.layer_idx, inputs)[None]
    out: Tensor = net.out_proj(found * F.silu(gate))
    return out
