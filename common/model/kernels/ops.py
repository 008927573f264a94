"""The operations between a layer's matrix products: the interface, and torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from pdserve.common.model.kernels.packed import Packer
from pdserve.common.model.kernels.quantized import Products


class Kernels(ABC):
    """The interface. Implementations round like torch: sums in float32, each result once to the
    dtype. Inputs are float32, bfloat16 or float16, and are not modified."""

    name: str
    packer: Packer | None = None
    """Packs the matrices of linear layers; None: torch multiplies by them directly."""
    attention_input: Callable[..., Tensor] | None = None
    """Norms and rotates queries and keys and writes the cache, in one kernel
    (`gpu/attention_input.py`); None: the attention does it in steps."""
    products: Products | None = None
    """Multiplies by quantized matrices on a GPU; None: they are dequantized for each product."""

    def read(self, x: Tensor) -> object:
        """Reads the memory of contiguous `x` once, as fast as the device can."""
        return x.sum()

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMS norm (arXiv:1910.07467) of `x` [..., size]; `weight` is [size]."""

    @abstractmethod
    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Returns (`residual + x` [T, size], its norm)."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Returns SwiGLU's product (arXiv:2002.05202) of [T, 2 · size]: silu(left) · right half."""


class TorchKernels(Kernels):
    """The kernels in torch, for every device."""

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
