"""Launches the Triton kernels (Tillet et al., MAPL 2019) of this package.

Torch for CUDA brings Triton. Importing a module of this package needs no GPU; on a CPU its kernels
run only in Triton's interpreter, which the tests use.
"""

from __future__ import annotations

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Queues `grid` programs of a Triton `kernel` on the current stream of the first tensor's
    device, whatever the thread's device is. Tensors in `args` are passed as addresses, so callers
    check shapes, strides, dtypes and devices.

    `constants`: compile-time constants, and Triton's `num_warps` and `num_stages`.
    """
    if all(grid):  # CUDA refuses an empty grid
        _run(kernel, grid, args, constants)


def _run(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Tests replace this to run without a GPU."""
    # Triton launches on the thread's device, which in a new thread is GPU 0.
    with torch.cuda.device_of(next(arg for arg in args if isinstance(arg, torch.Tensor))):
        kernel[grid](*args, **constants)
