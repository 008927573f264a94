"""The C++ kernels, prebuilt or compiled for this machine, called through their C interface.

They do not use torch's headers, which take half a minute to compile. They are linked with the
OpenMP library that torch has loaded: a second one would have a second thread pool, which would
compete for the cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_double, c_int64, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.common.core import native
from pdserve.common.model.kernels import KERNELS
from pdserve.common.model.kernels.ops import Kernels
from pdserve.common.model.kernels.packed import Packer

LINES = 256  # bytes of which `read_memory` reads a multiple
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `DType` of vec.h

# Arguments of each function after dtype and number of threads: P pointer, I integer, D double.
SIGNATURES = {
    "rms_norm": "IIPIPDP",
    "add_rms_norm": "IIPPPDPP",
    "silu_and_mul": "IIPP",
    "rotate_and_cache": "IIIIIIPPPDPPPPP",
    "paged_attention": "IIIIIIIIDPIPPPPPPPIP",
    "delta_net": "IIIIIIIPPPPPPPPPIP",
    "ssd": "IIIIIIIPPPPPPPPPPPIP",
    "convolve": "IIIIIIPPPPPPPPIP",
    "selective_scan": "IIIIIIPPPPPPPPPPIP",
    "read_memory": "IPP",
    "linear": "IIIIPIPPPIP",
    "pack_rows": "IIIP",
    "unpack_rows": "IIIPPP",
    "grouped_linear": "IPIPPIP",
    "pack_grouped": "IIIPP",
    "unpack_grouped": "IIIPPP",
    "run_layers": "IIPPP",
}
_TYPES: dict[str, Any] = {"P": c_void_p, "I": c_int64, "D": c_double}


class NativeKernels(Kernels):
    """The kernels in C++, for CPUs, with torch's number of threads."""

    name = "native"

    def __init__(self, cache_dir: Path | None = None, use_prebuilt: bool = True) -> None:
        """Loads the library, as `native.load_library` does. Raises BuildError."""
        self.library = load_library(cache_dir, use_prebuilt)
        self._rms_norm = self.function("rms_norm")
        self._add_rms_norm = self.function("add_rms_norm")
        self._silu_and_mul = self.function("silu_and_mul")
        self._read_memory = self.function("read_memory")
        self.delta_net, self.ssd = self.function("delta_net"), self.function("ssd")
        self.convolve = self.function("convolve")
        self.selective_scan = self.function("selective_scan")
        self.packer = Packer(self.function)

    def function(self, name: str) -> Callable[..., None]:
        """Returns a function of `SIGNATURES`. It releases the GIL and does not check arguments."""
        function = self.library[name]
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

    def read(self, x: Tensor) -> int:
        total = c_uint64()
        lines = x.nbytes // LINES * LINES // 64
        self._read_memory(*call_of(x), lines, x.data_ptr(), byref(total))
        return total.value


def call_of(x: Tensor) -> tuple[int, int]:
    """Returns the first arguments of every function: dtype and number of threads."""
    return DTYPES[x.dtype], torch.get_num_threads()


def load_library(cache_dir: Path | None = None, use_prebuilt: bool = True) -> ctypes.CDLL:
    """Loads the kernels, compiled first if necessary.

    Raises:
        BuildError: they cannot be compiled on this machine.
    """
    openmp = _loaded_openmp()
    library = replace(KERNELS, linked=() if openmp is None else (openmp,))
    return native.load_library(library, cache_dir, use_prebuilt)


def _loaded_openmp() -> str | None:
    """Returns the path of the OpenMP runtime that torch has loaded, None if it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path and Path(path).name.startswith(("libgomp", "libiomp5")):
            return f"/{path}"
    return None
