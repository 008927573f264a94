"""Rotary position embeddings (arXiv:2104.09864), half-split as in Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.common.core.model_spec import RopeSpec

Angles = tuple[Tensor, Tensor]
"""cos and sin `[T, 1, head_dim/2]` of a step's positions."""


class RotaryEmbedding:
    """Computes the rotation angles of positions."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.inverse_frequencies = _inverse_frequencies(spec, head_dim).to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Returns cos and sin of positions `[T]`, once per step for all layers. Computed in
        float32: bfloat16 cannot represent large positions."""
        angles = positions.to(torch.float32)[:, None, None] * self.inverse_frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


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
    return frequencies


def _stretch_llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Applies Llama 3.1's scaling: wavelengths well inside the original context stay, those beyond
    it are scaled by `factor`, those between are interpolated."""
    context = spec.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)  # over the original context
    low, high = spec.low_freq_factor, spec.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / spec.factor
