"""Runs the Triton kernels of `common/model/kernels/gpu` where the tests run: on the GPU if there is
one, else on the CPU in Triton's interpreter. Import this before a module of that package."""

from __future__ import annotations

import torch
import triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    triton.knobs.runtime.interpret = True  # read where a kernel is defined
