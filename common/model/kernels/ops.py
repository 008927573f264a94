"""The operations between a layer's matrix products: the interface, and plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.kernels.packed import Packer


class Kernels(ABC):
    """Implementations round where torch does: sums in float32, each result once to the dtype.
    Inputs are float32, bfloat16 or float16; none is changed."""

    name: str
    packer: Packer | None = None
    """Of the matrices that layers multiply by; None: torch multiplies them as they are."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm (arXiv:1910.07467) of `x` [..., size] over the last dimension;
        `weight` [size]."""

    @abstractmethod
    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`residual + x` [T, size], and its norm."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU's product (arXiv:2002.05202): [T, 2 · size] → silu(left half) · right half."""


class TorchKernels(Kernels):
    """For every device."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, self.rms_norm(total, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
