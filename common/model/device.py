"""Chooses a rank's device, dtype, kernels and attention backend."""

from __future__ import annotations

import logging

import torch

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import cpu_flags
from pdserve.common.core.kv_groups import KV_AUTO
from pdserve.common.core.native_library import BuildError
from pdserve.common.model import flashinfer_limits
from pdserve.common.model.attention import AttentionBackend, AttentionShape
from pdserve.common.model.attention_native import NativeAttention, can_attend
from pdserve.common.model.attention_torch import TorchAttention
from pdserve.common.model.kernels.native import NativeKernels
from pdserve.common.model.kernels.ops import Kernels, TorchKernels

logger = logging.getLogger(__name__)


_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_FAST_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86, x86, Arm


def device_type(requested: str) -> str:
    """Resolves --device to "cpu" or "cuda"; auto takes CUDA if this host has it."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return requested


def gpu_bytes() -> int:
    """Returns the bytes of this host's first GPU; 0 without one: ranks may be on other hosts."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)


def choose_device(requested: str, rank: int) -> torch.device:
    """Resolves --device to a device: rank r of a host uses GPU r, or the CPU. Replica i of w ranks
    has the node's ranks i·w … (i + 1)·w - 1. Does not initialize the device.

    Raises:
        ConfigError: the host has too few GPUs.
    """
    if device_type(requested) == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if rank >= count:
        raise ConfigError(
            f"rank {rank} of the node has no GPU of its own (found {count}): lower "
            "--tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size, join hosts "
            "to a Ray cluster (--distributed-executor-backend), or pass --device cpu"
        )
    return torch.device("cuda", rank)


def choose_dtype(requested: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """Resolves --dtype. "auto" is the checkpoint's, except on CPUs without instructions for it,
    where half precision is many times slower than float32.

    Raises:
        ConfigError: `requested` is not a dtype.
    """
    name = checkpoint_dtype if requested == "auto" else requested
    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    if requested == "auto" and device.type == "cpu":
        fast = name == "bfloat16" and cpu_has_fast_bf16()
        return torch.bfloat16 if fast else torch.float32
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype's name without "torch."."""
    return str(dtype).removeprefix("torch.")


def cpu_has_fast_bf16() -> bool:
    """Returns whether this CPU multiplies bfloat16 matrices in hardware; False if unknown."""
    return not _FAST_BF16_FLAGS.isdisjoint(cpu_flags())


def choose_kernels(requested: str, device: torch.device, rank: int = 0) -> Kernels:
    """Resolves --cpu-kernels. A GPU has Triton's unless "torch" was requested; `gpu/needs.py` says
    what the host must have for them. Rank 0 logs why a CPU falls back to torch.

    Raises:
        ConfigError: native kernels were requested and cannot be built.
    """
    if requested == "torch" or device.type not in ("cpu", "cuda"):
        return TorchKernels()
    if device.type == "cuda":
        # A host without a GPU may have no Triton.
        from pdserve.common.model.kernels.gpu.ops import TritonKernels

        return TritonKernels()
    try:
        return NativeKernels(use_prebuilt=requested != "native")
    except BuildError as error:
        if requested == "native":
            raise ConfigError(f"--cpu-kernels native: {error}") from error
        if rank == 0:
            logger.warning("using torch kernels, which are slower: %s", error)
        return TorchKernels()


def make_backend(
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels | None = None,
    kv_cache_dtype: str = KV_AUTO,
) -> AttentionBackend:
    """Returns FlashInfer on a GPU if it is installed and has kernels for it, native attention with
    native `kernels` on a CPU; else torch, with a warning on a GPU, where it is slower.

    Raises:
        ConfigError: only native attention has this `kv_cache_dtype`.
    """
    if device.type == "cpu" and isinstance(kernels, NativeKernels) and can_attend(shape):
        return NativeAttention(shape, device, dtype, kernels, kv_cache_dtype)
    if kv_cache_dtype != KV_AUTO and device.type != "meta":
        raise ConfigError(
            f"--kv-cache-dtype {kv_cache_dtype} needs the native kernels of a CPU (--device cpu "
            "and a C++ compiler): leave the option out"
        )
    if device.type != "cuda":
        return TorchAttention(shape, device, dtype)
    if missing := flashinfer_limits.why_not(shape, dtype):
        logger.warning("using torch attention, which is slower: %s", missing)
        return TorchAttention(shape, device, dtype)
    # Importing flashinfer takes seconds and needs a GPU.
    from pdserve.common.model.attention_flashinfer import FlashInferAttention

    fused = None if kernels is None else kernels.attention_input
    return FlashInferAttention(shape, device, dtype, fused)
