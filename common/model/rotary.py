"""Rotary position embeddings (arXiv:2104.09864), half-split as in Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.common.core.rope_spec import RopeSpec

Angles = tuple[Tensor, Tensor]
"""cos and sin `[T, 1, head_dim/2]` of a step's positions."""


class RotaryEmbedding:
    """Computes the rotation angles of positions."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.inverse_frequencies = _inverse_frequencies(spec, head_dim).to(device)
        self._factor = spec.attention_factor

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Returns cos and sin of positions `[T]`, times the spec's `attention_factor`, once per
        step for all layers. Computed in float32: bfloat16 cannot represent large positions."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        return (angles.cos() * self._factor).to(dtype), (angles.sin() * self._factor).to(dtype)


def apply_rotary(x: Tensor, angles: Angles) -> Tensor:
    """Rotates heads `x` [T, H, D] by the step's angles."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _stretch_llama3(frequencies, spec)
    if spec.kind == "yarn":
        return _stretch_yarn(frequencies, spec, head_dim)
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.short_factors) * spec.theta**exponents)
    return frequencies  # "dynamic" too: it scales nothing within the original context


def _stretch_llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Applies Llama 3.1's scaling: wavelengths well inside the original context stay, those beyond
    it are scaled by `factor`, those between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = spec.original_max_position_embeddings / wavelengths  # rotations per original context
    low, high = spec.low_freq_factor, spec.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    # In the order in which transformers rounds, to the bit.
    return (1 - keep) * frequencies / spec.factor + keep * frequencies


def _stretch_yarn(frequencies: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
    """Applies YaRN's scaling (arXiv:2309.00071, section 3.2): dimensions that turn more than
    `beta_fast` times over the original context stay, those that turn less than `beta_slow` times
    are scaled by `factor`, and between them a ramp over the dimensions interpolates."""
    first = _dimension_of(spec.beta_fast, spec, head_dim)
    last = _dimension_of(spec.beta_slow, spec, head_dim)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001  # transformers' value for a ramp of length zero
    scaled = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return frequencies / spec.factor * scaled + frequencies * (1 - scaled)


def _dimension_of(turns: float, spec: RopeSpec, head_dim: int) -> float:
    """Returns the (fractional) dimension that rotates `turns` times over the original context."""
    context = spec.original_max_position_embeddings
    return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))
