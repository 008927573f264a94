"""The checks of `pdserve doctor --gpu`: driver, torch, a computation on each GPU, Triton,
FlashInfer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from pdserve.cli.finding import Finding, Verdict
from pdserve.cli.topology import Topology, read_topology

FLASHINFER = "pdserve.common.model.attention_check"
TRITON = "pdserve.common.model.kernels.gpu.check"
COMPILE_SECONDS = 300  # on few cores
ATTENTION_TOLERANCE = 0.03  # of bfloat16
KERNEL_TOLERANCE = 1e-5  # of float32
SIZE = 512  # rows and columns of the matrices that each GPU multiplies


def gpus() -> Iterator[Finding]:
    topology = read_topology()
    yield _driver(topology)
    yield _torch()
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        yield from _gpu(torch.device("cuda", index))
    yield Finding("topology", Verdict.OK, topology.advice)
    yield _triton()
    yield _flashinfer()


def _driver(topology: Topology) -> Finding:
    if not topology.gpus:
        fix = "install NVIDIA's driver; for a container also its container toolkit, and --gpus all"
        return Finding("driver", Verdict.FAILED, "shows no GPU", fix)
    names = ", ".join(f"{gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in topology.gpus)
    return Finding("driver", Verdict.OK, names)


def _torch() -> Finding:
    cuda = torch.version.cuda
    if cuda is None:
        fix = "this is a CPU build: install one for CUDA (make TORCH=torch)"
        return Finding("torch for CUDA", Verdict.FAILED, torch.__version__, fix)
    if not torch.cuda.is_available():
        fix = "check that the driver is new enough, and CUDA_VISIBLE_DEVICES not empty"
        return Finding("torch for CUDA", Verdict.FAILED, f"built for {cuda}, finds no GPU", fix)
    seen = f"{torch.__version__}, CUDA {cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return Finding("torch for CUDA", Verdict.OK, seen)


def _gpu(device: torch.device) -> Iterator[Finding]:
    subject = f"GPU {device.index}"
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    seen = f"compute capability {major}.{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if (major, minor) < (8, 0):
        yield Finding(subject, Verdict.WARNING, seen, "use --dtype float16: bfloat16 needs 8.0")
    else:
        yield Finding(subject, Verdict.OK, seen)
    yield _computes(subject, device)
    yield _shares(subject, device)


def _computes(subject: str, device: torch.device) -> Finding:
    a, b = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    product = (a.to(device) @ b.to(device)).cpu()
    if torch.allclose(product, a @ b, rtol=1e-3, atol=1e-2):
        return Finding(subject, Verdict.OK, "computes correctly")
    error = float((product - a @ b).abs().max())
    fix = "do not serve with this GPU: it or its driver is broken"
    return Finding(subject, Verdict.FAILED, f"a matrix product is wrong by {error:.3g}", fix)


def _shares(subject: str, device: torch.device) -> Finding:
    """Shares GPU memory with CUDA IPC, as the connector cuda_ipc shares the KV cache."""
    try:
        torch.zeros(1, device=device).untyped_storage()._share_cuda_()
    except RuntimeError as error:
        fix = "use --kv-connector tcp: cuda_ipc does not work here"
        return Finding(subject, Verdict.WARNING, str(error).splitlines()[0], fix)
    return Finding(subject, Verdict.OK, "shares memory between processes (cuda_ipc)")


def _triton() -> Finding:
    """Compiles a kernel, unless an earlier start has, and runs it."""
    subject = "triton"
    found = _computed(TRITON)
    if isinstance(found, str):
        fix = next((fix for sign, fix in TRITON_FIXES.items() if sign in found), TRITON_FIXES[""])
        return Finding(subject, Verdict.FAILED, _last_line(found), fix)
    if why := found.get("why"):
        lack, _, fix = why.rpartition(": ")
        return Finding(subject, Verdict.FAILED, lack, fix)
    if not found["error"] < KERNEL_TOLERANCE:  # NaN is not
        fix = "do not serve with this version: reinstall torch, which brings Triton"
        return Finding(subject, Verdict.FAILED, f"a kernel is wrong by {found['error']:.3g}", fix)
    seen = f"compiles and computes correctly ({found['seconds']:.0f} s)"
    return Finding(subject, Verdict.OK, seen)


# By what the output of a failed run contains, the last by default.
TRITON_FIXES = {
    "libcuda.so": "run ldconfig as root, or name the folder of libcuda.so.1 in TRITON_LIBCUDA_PATH",
    "Python.h": "install Python's headers (python3-dev)",
    "No space left": "free some space, or name another folder in TRITON_CACHE_DIR",
    "": "check that gcc works, and that torch and triton are versions made for each other",
}


def _flashinfer() -> Finding:
    """Compiles FlashInfer's kernels, unless an earlier start has, and computes two steps."""
    subject, found = "flashinfer", _computed(FLASHINFER)
    if isinstance(found, str):
        fix = "check that nvcc is there (CUDA_HOME), or pip uninstall flashinfer-python"
        if "Permission denied" in found or "Read-only file system" in found:
            fix = "set FLASHINFER_WORKSPACE_BASE to a folder that this user may write to"
        return Finding(subject, Verdict.FAILED, _last_line(found), fix)
    if why := found.get("why"):
        return Finding(subject, Verdict.WARNING, "not used: attention is slower", why)
    if not found["error"] < ATTENTION_TOLERANCE:  # NaN is not
        fix = "do not serve with this version: pip uninstall flashinfer-python"
        return Finding(subject, Verdict.FAILED, f"attention is wrong by {found['error']:.3g}", fix)
    seen = f"compiles and attends correctly ({found['seconds']:.0f} s)"
    return Finding(subject, Verdict.OK, seen)


def _computed(module: str) -> dict[str, Any] | str:
    """Runs a check in a process of its own. Returns its answer, or a failed one's output."""
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer in {COMPILE_SECONDS} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return done.stderr.strip() or f"exit code {done.returncode}"
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _last_line(output: str) -> str:
    return f"cannot be compiled or run: {output.splitlines()[-1]}"
