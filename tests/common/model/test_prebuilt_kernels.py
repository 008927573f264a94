"""A wheel's kernels compute the bits of those compiled for this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paths import MODELS
from pdserve.common.core import prebuilt
from pdserve.common.core.host import cpu_flags
from pdserve.common.model.kernels import KERNELS
from pdserve.common.model.kernels.native import NativeKernels
from tiny_engine import load, new_cache, some_tokens, step

FITTING = [each for each in prebuilt.VARIANTS if each.needs <= cpu_flags()]

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.slow,  # it compiles all kernels, for a minute
    pytest.mark.skipif(
        not shutil.which("g++") or not FITTING, reason="no compiler, or another CPU"
    ),
]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    """The kernels that a wheel has for this CPU."""
    folder = tmp_path_factory.mktemp("prebuilt")
    list(prebuilt.make(KERNELS, folder, frozenset({FITTING[-1].name})))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prebuilt, "FOLDER", str(folder))
        patched.setenv("PATH", "")
        patched.delenv("CXX", raising=False)
        return NativeKernels(folder / "cache")


def logits(name: str, kernels: NativeKernels, dtype: torch.dtype) -> Tensor:
    model = load(MODELS / name, kernels=kernels, dtype=dtype)
    return step(model, new_cache(model), [(some_tokens(40), 0, [4, 2, 6])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe", "mixtral"])
def test_prebuilt_kernels_compute_the_same_bits(
    name: str, dtype: torch.dtype, wheels: NativeKernels, tmp_path: Path
) -> None:
    native = NativeKernels(use_prebuilt=False)
    assert native.library._name != wheels.library._name
    assert torch.equal(logits(name, wheels, dtype), logits(name, native, dtype))
