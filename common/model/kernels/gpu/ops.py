"""The operations between a layer's matrix products as Triton kernels."""

from __future__ import annotations

from torch import Tensor

from pdserve.common.model.kernels.gpu import activation, norms
from pdserve.common.model.kernels.gpu.attention_input import attention_input
from pdserve.common.model.kernels.gpu.products import GpuProducts
from pdserve.common.model.kernels.ops import Kernels


class TritonKernels(Kernels):
    """The kernels of GPUs. They round like torch; norms may differ from torch's in the last bit,
    because sums are in another order. Nothing waits for the GPU."""

    name = "triton"
    attention_input = staticmethod(attention_input)
    products = GpuProducts()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norms.add_rms_norm(residual, x, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return activation.silu_and_mul(gate_up)
