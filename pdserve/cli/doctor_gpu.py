"""The GPUs of `pdserve doctor --gpu`: seen by the driver, usable by torch, right, and fast."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from pdserve.cli.finding import Finding, Verdict
from pdserve.cli.topology import Topology, read_topology

SIZE = 512  # of the matrices that each GPU multiplies


def gpus() -> Iterator[Finding]:
    topology = read_topology()
    yield _driver(topology)
    yield _torch()
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        yield from _gpu(torch.device("cuda", index))
    yield Finding("topology", Verdict.OK, topology.advice)
    yield _flashinfer()


def _driver(topology: Topology) -> Finding:
    if not topology.gpus:
        mend = "install NVIDIA's driver; in a container pass --gpus all and the container toolkit"
        return Finding("driver", Verdict.FAILED, "shows no GPU", mend)
    names = ", ".join(f"{gpu.name} ({gpu.memory / 2**30:.0f} GiB)" for gpu in topology.gpus)
    return Finding("driver", Verdict.OK, names)


def _torch() -> Finding:
    cuda = torch.version.cuda
    if cuda is None:
        mend = "this is a CPU build: install one for CUDA (make TORCH=torch)"
        return Finding("torch for CUDA", Verdict.FAILED, torch.__version__, mend)
    if not torch.cuda.is_available():
        mend = "is the driver new enough for it, and CUDA_VISIBLE_DEVICES not empty?"
        return Finding("torch for CUDA", Verdict.FAILED, f"built for {cuda}, finds no GPU", mend)
    seen = f"{torch.__version__}, CUDA {cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return Finding("torch for CUDA", Verdict.OK, seen)


def _gpu(device: torch.device) -> Iterator[Finding]:
    subject = f"GPU {device.index}"
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    seen = f"compute capability {major}.{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if (major, minor) < (8, 0):
        yield Finding(subject, Verdict.WARNING, seen, "no bfloat16 before 8.0: --dtype float16")
    else:
        yield Finding(subject, Verdict.OK, seen)
    yield _computes(subject, device)
    yield _shares(subject, device)


def _computes(subject: str, device: torch.device) -> Finding:
    a, b = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    product = (a.to(device) @ b.to(device)).cpu()
    if torch.allclose(product, a @ b, rtol=1e-3, atol=1e-2):
        return Finding(subject, Verdict.OK, "computes right")
    error = float((product - a @ b).abs().max())
    mend = "the card, or its driver, is broken: do not serve with it"
    return Finding(subject, Verdict.FAILED, f"a product is wrong by {error:.3g}", mend)


def _shares(subject: str, device: torch.device) -> Finding:
    """As the connector cuda_ipc does with its cache."""
    try:
        torch.zeros(1, device=device).untyped_storage()._share_cuda_()
    except RuntimeError as error:
        mend = "--kv-connector cuda_ipc will not work here: use tcp"
        return Finding(subject, Verdict.WARNING, str(error).splitlines()[0], mend)
    return Finding(subject, Verdict.OK, "shares memory between processes (cuda_ipc)")


def _flashinfer() -> Finding:
    if find_spec("flashinfer") is None:
        mend = "attention is slower without it: pip install 'pdserve[cuda]'"
        return Finding("flashinfer", Verdict.WARNING, "not installed", mend)
    return Finding("flashinfer", Verdict.OK, "installed")
