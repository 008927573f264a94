"""FlashInfer's decode kernel is compiled for an H100 without a GPU, and FlashInfer loads it without
nvcc. About a minute."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paths import ROOT

NVIDIA = find_spec("nvidia")
FOLDERS = (NVIDIA and NVIDIA.submodule_search_locations) or ()
NVCC = any((Path(folder) / "cu13" / "bin" / "nvcc").exists() for folder in FOLDERS)
pytestmark = pytest.mark.skipif(
    not (NVCC and find_spec("flashinfer")),
    reason="needs FlashInfer and nvcc (make test-cuda-build)",
)

# On a host with an H100 and without nvcc.
LOAD = """
import sys, pathlib, torch
from flashinfer.jit import env, gen_batch_decode_module
env.FLASHINFER_AOT_DIR = pathlib.Path(sys.argv[1])
half = torch.bfloat16
spec = gen_batch_decode_module(half, half, half, torch.int32, 128, 128, 0, False, False)
assert spec.is_aot, spec.aot_path
print(spec.build_and_load().plan)
"""


def test_a_module_compiled_without_a_gpu_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.flashinfer_kernels", str(tmp_path)]
    flags = ["--kernels", "decode", "--no-windows"]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, timeout=600)
    (archive,) = tmp_path.glob("flashinfer-kernels-*-90a.tgz")
    subprocess.run(["tar", "xzf", archive, "--one-top-level=aot"], cwd=tmp_path, check=True)
    environment = {
        **os.environ,
        "CUDA_HOME": str(tmp_path / "none"),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "cache"),
    }
    subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "aot")],
        env=environment,
        check=True,
        timeout=120,
    )
