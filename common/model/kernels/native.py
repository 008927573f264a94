"""The C++ kernels, called through their C interface."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.common.core.host import cpu_flags
from pdserve.common.model.kernels.build import load_library
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.kernels.packed import Packer

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `DType` of vec.h

# Arguments of each function, after its dtype and how many threads it may use: P a pointer, I an
# integer, D a double.
SIGNATURES = {
    "rms_norm": "IIPIPDP",
    "add_rms_norm": "IIPPPDPP",
    "silu_and_mul": "IIPP",
    "rotate_and_cache": "IIIIIPPPDPPPPP",
    "paged_decode": "IIIIIDPIPPPPPIP",
    "paged_prefill": "IIIIIDPIPPPPPPIP",
    "linear": "IIIPIPPPP",
    "pack_rows": "IIIP",
    "unpack_rows": "IIIPPP",
}
_TYPES: dict[str, Any] = {"P": c_void_p, "I": c_int64, "D": c_double}


class NativeKernels(Kernels):
    """See `Kernels`. On the CPU, with as many threads as torch has."""

    name = "native"

    def __init__(self, cache_dir: Path | None = None) -> None:
        """Builds them at first use on this machine. Raises BuildError."""
        self._library = load_library(cache_dir)
        self._rms_norm = self.function("rms_norm")
        self._add_rms_norm = self.function("add_rms_norm")
        self._silu_and_mul = self.function("silu_and_mul")
        self.packer = Packer(self.function, amx="amx_bf16" in cpu_flags())

    def function(self, name: str) -> Callable[..., None]:
        """One of `SIGNATURES`. It neither holds the GIL nor checks what it is given."""
        function = self._library[name]
        function.argtypes = [c_int64, c_int64, *(_TYPES[kind] for kind in SIGNATURES[name])]
        function.restype = None
        return function

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._rms_norm(
            *call_of(x), len(rows), size, rows.data_ptr(), rows.stride(0),
            weight.data_ptr(), eps, out.data_ptr(),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual, x = residual.contiguous(), x.contiguous()
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._add_rms_norm(
            *call_of(x), *x.shape, residual.data_ptr(), x.data_ptr(), weight.data_ptr(), eps,
            total.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return total, out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        self._silu_and_mul(*call_of(gate_up), rows, size, gate_up.data_ptr(), out.data_ptr())
        return out


def call_of(x: Tensor) -> tuple[int, int]:
    """What each function is told first: the dtype, and the threads it may use."""
    return DTYPES[x.dtype], torch.get_num_threads()
