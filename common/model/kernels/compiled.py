"""The operations between products, fused by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pdserve.common.model.kernels.ops import Kernels, TorchKernels

# Round where the uncompiled operations do, as far as inductor can.
OPTIONS = {"emulate_precision_casts": True}


class CompiledKernels(Kernels):
    """`TorchKernels`, one kernel for each operation, for any number of tokens: compiled at the
    first call, for one token once more."""

    name = "compiled"

    def __init__(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """`backend` as of torch.compile."""
        plain, options = TorchKernels(), OPTIONS if backend == "inductor" else None
        how: dict[str, Any] = {"dynamic": True, "backend": backend, "options": options}
        self._rms_norm = torch.compile(plain.rms_norm, **how)
        self._add_rms_norm = torch.compile(plain.add_rms_norm, **how)
        self._silu_and_mul = torch.compile(plain.silu_and_mul, **how)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x, weight, eps)

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._add_rms_norm(residual, x, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._silu_and_mul(gate_up)
