"""One rank's KV cache: its dimensions, and the memory it lies in."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass, replace
from math import prod

import torch

from pdserve.common.engine.messages import CacheShape


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
