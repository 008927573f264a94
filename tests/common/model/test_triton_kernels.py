"""The Triton kernels against torch: in the interpreter without a GPU, on the GPU where there is
one. And they compile for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fake_cuda import check_layout
from interpreted import DEVICE
from paths import HELPERS
from pdserve.common.model.kernels.gpu.activation import silu_and_mul

# The last bit, since silu is rounded, too, and e^x is not the same everywhere.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (5, 100), (3, 1500), (0, 16)], ids=str)
def test_silu_and_mul_equals_torch(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * size, dtype=dtype, device=DEVICE)
    gate, up = gate_up.chunk(2, dim=-1)
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(silu_and_mul(gate_up), F.silu(gate) * up, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "stride", "args", "known"),
    [
        ((3, 8), (8, 1), (), True),
        ((3, 8), (16, 1), (), False),
        ((3, 8), (16, 1), (16,), True),
        ((3, 8), (1, 3), (3,), False),
        ((3, 8), (1, 3), (3, 1), True),
        ((1, 8), (99, 1), (), True),
        ((2, 3, 8), (48, 8, 1), (), False),
        ((2, 3, 8), (48, 8, 1), (48,), True),
    ],
    ids=str,
)
def test_the_fake_launch_knows_which_layout_a_kernel_can_read(
    shape: tuple[int, ...], stride: tuple[int, ...], args: tuple[int, ...], known: bool
) -> None:
    tensor = torch.empty_strided(shape, stride)
    with nullcontext() if known else pytest.raises(AssertionError, match="stride"):
        check_layout(tensor, args)


MAX_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a program may have, by compute capability (CUDA's manual)."""


@pytest.mark.parametrize(
    "capability", [pytest.param(c, marks=[pytest.mark.slow] * (c != 90)) for c in MAX_SHARED]
)
def test_all_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    command = [sys.executable, HELPERS / "compile_gpu_kernels.py", str(capability), tmp_path]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=300)
    kernels = json.loads(done.stdout)
    assert len(kernels) > 1
    for name, used in kernels.items():
        assert used["stack"] == 0, f"{name} spills registers: {used}"
        assert used["shared"] <= MAX_SHARED[capability], f"{name}: {used}"
