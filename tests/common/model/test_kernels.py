"""The C++ kernels: how they are built, and that they say what float64 and plain torch say."""

from __future__ import annotations

import functools
import logging
import operator
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.common.core import native as compiler
from pdserve.common.core.errors import ConfigError
from pdserve.common.model import device
from pdserve.common.model.kernels import native
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import Kernels, TorchKernels
from tiny_engine import CPU

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HAS_COMPILER = bool(shutil.which("g++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no g++ here")


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return TorchKernels() if request.param == "torch" else NativeKernels()


# ---- building ----


@needs_compiler
def test_the_library_shares_torchs_pool_of_threads() -> None:
    native.load_library()
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split()[-1] for line in lines if "libgomp" in line or "libiomp" in line}
    assert len(names) <= 1


def test_without_a_compiler_the_torch_ones_are_used_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    assert device.choose_kernels("auto", CPU, rank=1).name == "torch"
    assert not caplog.records
    assert device.choose_kernels("auto", CPU).name == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "install a C++ compiler" in record.getMessage()
    with pytest.raises(ConfigError, match=r"--cpu-kernels native: no C\+\+ compiler"):
        device.choose_kernels("native", CPU)


def test_a_gpu_has_triton_s_kernels_unless_told_otherwise() -> None:
    cuda = torch.device("cuda", 0)
    assert [device.choose_kernels(name, cuda).name for name in ("auto", "torch")] == [
        "triton",
        "torch",
    ]


# ---- norms and activations ----

SHAPES = [(1, 576), (3, 100), (7, 5), (40, 1537), (0, 64)]


def some(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: Tensor, exact: Tensor) -> None:
    """`actual` is within a rounding or two of the float64 `exact`."""
    tolerance = 3 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, weight.double(), eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = some(*shape, dtype=dtype), some(*shape, dtype=dtype, seed=1)
    weight = some(shape[1], dtype=dtype, seed=2)
    assert_rounded(kernels.rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5))
    total, normed = kernels.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert_rounded(normed, exact_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_and_mul(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = 3 * some(shape[0], 2 * shape[1], dtype=dtype)
    gate, up = x.chunk(2, dim=-1)
    silu = F.silu(gate.double()).to(dtype)  # rounded before the product, as in torch
    assert_rounded(kernels.silu_and_mul(x), silu.double() * up.double())


@pytest.mark.parametrize("threads", [1, 3])
def test_all_memory_is_read(threads: int) -> None:
    """The exclusive or is that of all numbers."""
    x = torch.randint(-(2**62), 2**62, (5 * 64 * 1024 + 32,))
    expected = functools.reduce(operator.xor, x.tolist())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert NativeKernels().read(x.view(torch.float32)) == expected % 2**64
    finally:
        torch.set_num_threads(before)


def test_views_with_strides(kernels: Kernels) -> None:
    wide = some(6, 3, 40, dtype=torch.float32)
    weight = some(40, dtype=torch.float32)
    for x in (wide[:, 1], wide.transpose(0, 1), some(40, 6, dtype=torch.float32).t()):
        assert_rounded(kernels.rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6))
    x, residual = wide[:, 0], wide[:, 1]
    total, normed = kernels.add_rms_norm(residual, x, weight, 1e-6)
    assert torch.equal(total, residual + x)
    assert_rounded(normed, exact_norm(total, weight, 1e-6))
    assert torch.equal(kernels.silu_and_mul(x), kernels.silu_and_mul(x.contiguous()))


def test_nan_stays_in_its_row(kernels: Kernels) -> None:
    x, weight = torch.ones(3, 64), torch.ones(64)
    x[1, 40] = float("nan")
    bad = torch.tensor([False, True, False])
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5).isnan().all(1), bad)
    assert torch.equal(kernels.add_rms_norm(x, x, weight, 1e-5)[1].isnan().all(1), bad)
    assert torch.equal(kernels.silu_and_mul(x).isnan().any(1), bad)


@needs_compiler
def test_threads_do_not_change_a_result() -> None:
    kernels, before = NativeKernels(), torch.get_num_threads()
    x, weight = some(300, 576, dtype=torch.bfloat16), some(576, dtype=torch.bfloat16)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(kernels.rms_norm(x, weight, 1e-5))
    torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
