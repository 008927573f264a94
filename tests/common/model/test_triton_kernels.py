"""The Triton kernels against torch: in the interpreter without a GPU, on the GPU where there is
one. And they compile for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fake_cuda import check_layout
from interpreted import DEVICE
from paths import HELPERS
from pdserve.common.model.kernels.gpu.activation import silu_and_mul
from pdserve.common.model.kernels.gpu.launch import launch
from pdserve.common.model.kernels.gpu.norms import MAX_BLOCK, add_rms_norm, rms_norm

# The last bit, since silu is rounded, too, and e^x is not the same everywhere.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (5, 100), (3, 1500), (0, 16)], ids=str)
def test_silu_and_mul_equals_torch(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(tokens, 2 * size, dtype=dtype, device=DEVICE)
    gate, up = gate_up.chunk(2, dim=-1)
    rtol = TOLERANCE[dtype]
    torch.testing.assert_close(silu_and_mul(gate_up), F.silu(gate) * up, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 8), (5, 100), (3, 1536), (2, MAX_BLOCK + 8), (0, 16)], ids=str
)
def test_norms_equal_torch(tokens: int, size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, tokens, size, device=DEVICE).to(dtype)
    weight = torch.rand(size, device=DEVICE).to(dtype)
    rtol = TOLERANCE[dtype]
    total, normed = add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(total, residual + x)
    for found, given in ((rms_norm(x, weight, 1e-5), x), (normed, total)):
        expected = F.rms_norm(given, (size,), weight, 1e-5)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)


def test_norms_read_views_where_they_are() -> None:
    """Query heads between others, classes' `[1, T, size]`, transposed heads, latents in a row."""
    qkv = torch.randn(5, 6, 64, device=DEVICE)
    weight = torch.rand(64, device=DEVICE)
    for x in (qkv[:, 1:4], qkv[:1, 2:], qkv[None], qkv[None].mT.mT.transpose(1, 2), qkv[:, 2]):
        torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (64,), weight, 1e-3))
    columns = qkv.mT[:, :, :6].contiguous().mT  # whose rows are not contiguous
    assert columns.stride(2) != 1
    torch.testing.assert_close(
        rms_norm(columns, weight, 1e-3), F.rms_norm(columns, (64,), weight, 1e-3)
    )


def test_a_poisoned_row_spoils_no_other() -> None:
    x, weight = torch.randn(4, 24, device=DEVICE), torch.rand(24, device=DEVICE)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    bad = torch.tensor([False, True, True, False], device=DEVICE)
    assert torch.equal(rms_norm(x, weight, 1e-5).isnan().any(1), bad)
    assert torch.equal(add_rms_norm(x, x, weight, 1e-5)[1].isnan().any(1), bad)


def test_kernels_are_launched_on_the_gpu_of_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the thread's GPU is: in a new thread it is the first."""
    entered: list[torch.Tensor] = []
    order: list[str] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        order.append("in")
        yield
        order.append("out")

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **constants: order.append("launched")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    tensor = torch.zeros(1)
    launch(Kernel(), (1,), 3, tensor, None, BLOCK=4)
    launch(Kernel(), (0,), 3, tensor, None, BLOCK=4)
    assert order == ["in", "launched", "out"] and entered[0] is tensor


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
    ("capability", "options"),
    [(90, ["--few"]), *(pytest.param(c, [], marks=pytest.mark.slow) for c in MAX_SHARED)],
)
def test_all_kernels_compile_for_gpus(capability: int, options: list[str], tmp_path: Path) -> None:
    script = HELPERS / "compile_gpu_kernels.py"
    command = [sys.executable, script, str(capability), tmp_path, *options]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=300)
    kernels = json.loads(done.stdout)
    assert len(kernels) > 1
    for name, used in kernels.items():
        assert used["stack"] == 0, f"{name} spills registers: {used}"
        assert used["shared"] <= MAX_SHARED[capability], f"{name}: {used}"
