"""One rank's KV cache: how many blocks it has, and the memory they lie in."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from dataclasses import dataclass, replace
from math import prod

import torch

from common.config.schema import EngineConfig
from common.core.errors import ConfigError
from common.engine.messages import CacheShape

CPU_MEMORY_SHARE = 0.1  # of the available RAM, per rank, unless --kv-cache-memory says more
CPU_MEMORY_LIMIT = 4 * 2**30

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """Bytes in "2GiB", "512 MB" or "4096".

    Raises:
        ConfigError: another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise ConfigError(f"--kv-cache-memory {text!r} is not a size such as 2GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def dimensions(shape: CacheShape) -> tuple[int, int, int, int, int, int]:
    """`[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]`; 2 = key, value."""
    return (
        shape.layer_end - shape.layer_start,
        2,
        shape.num_blocks,
        shape.head_end - shape.head_start,
        shape.block_size,
        shape.head_dim,
    )


def torch_dtype(shape: CacheShape) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return dtype


def resized(shape: CacheShape, num_blocks: int) -> CacheShape:
    return replace(shape, num_blocks=num_blocks)


def cache_bytes(shape: CacheShape) -> int:
    return prod(dimensions(shape)) * torch_dtype(shape).itemsize


def plan_num_blocks(
    config: EngineConfig, block_bytes: int, max_model_len: int, available_bytes: int, device: str
) -> int:
    """How many blocks a rank has room for: as many as --num-gpu-blocks-override or
    --kv-cache-memory say, else what fits into `available_bytes`. On a CPU, where memory is
    shared with everything else, no more than the scheduler can use at once."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory is not None:
        return parse_bytes(cache.kv_cache_memory) // block_bytes
    fitting = max(0, available_bytes) // block_bytes
    if device == "cuda":
        return fitting
    usable = config.scheduler.max_num_seqs * blocks_per_sequence(config, max_model_len)
    return min(fitting, usable)


def blocks_per_sequence(config: EngineConfig, max_model_len: int) -> int:
    """Blocks a sequence of the greatest length holds."""
    return -(-max_model_len // config.cache.block_size)


def check_num_blocks(config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
    """Raises ConfigError if not even one sequence of the greatest length fits."""
    needed = blocks_per_sequence(config, max_model_len)
    if num_blocks >= needed:
        return
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        mend = f"raise --num-gpu-blocks-override to {needed}"
    elif cache.kv_cache_memory is not None:
        mend = f"raise --kv-cache-memory (now {cache.kv_cache_memory})"
    else:
        mend = "give more memory (--kv-cache-memory, --gpu-memory-utilization)"
    raise ConfigError(
        f"the KV cache has {num_blocks} blocks of {cache.block_size} tokens, but one sequence of "
        f"--max-model-len {max_model_len} needs {needed}: {mend}, or lower --max-model-len"
    )


@dataclass(slots=True)
class KVCache:
    """`tensor` has the dimensions of `shape` and starts as zeros.

    On a CPU its memory is an unnamed file, `fd`, sealed at its size, so that a peer process
    which is handed the descriptor can map it and can never be made to fault by truncation.
    The descriptor is the cache's; `close` closes it, and the memory goes with the tensor.
    """

    tensor: torch.Tensor
    shape: CacheShape
    fd: int | None = None

    @classmethod
    def allocate(cls, shape: CacheShape, device: torch.device) -> KVCache:
        if device.type == "cpu":
            fd, tensor = _allocate_shared(shape)
            return cls(tensor, shape, fd)
        return cls(torch.zeros(dimensions(shape), dtype=torch_dtype(shape), device=device), shape)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _allocate_shared(shape: CacheShape) -> tuple[int, torch.Tensor]:
    fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    size = cache_bytes(shape)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    # Pages are taken when first written: an idle node does not hold its whole cache.
    memory = mmap.mmap(fd, size)
    tensor = torch.frombuffer(memory, dtype=torch_dtype(shape))
    return fd, tensor.view(dimensions(shape))
