"""The memory of a rank's GPU: what it holds of its own, and whether its share is there.

    total ─┬─ other processes, whatever they hold
           └─ this node's share: total × --gpu-memory-utilization
                ├─ outside torch: CUDA context, kernels, NCCL     measured: `outside_torch`
                ├─ torch: weights, the largest step, graphs       measured: `kv_cache.py`
                └─ KV blocks: the rest

Nodes that share a GPU start at the same time, so what a neighbour takes meanwhile must not count as
this process's growth, nor as less of its share.
"""

from __future__ import annotations

from dataclasses import dataclass

import pynvml
import torch

from pdserve.common.core.errors import ConfigError
from pdserve.common.planning.footprint import CONTEXT_BYTES
from pdserve.common.planning.kv_budget import format_bytes

# Context, kernels and communicators take less; the rest belongs to another process.
MAX_OUTSIDE_BYTES = 3 * 2**30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's total bytes, and those that were free before this process used it."""

    total: int
    free_before: int

    @classmethod
    def enter(cls, device: torch.device) -> GpuMemory:
        """Makes `device` this thread's GPU, which creates the process's CUDA context there. Without
        NVML the context's size is an estimate."""
        before = _free_by_driver(device)
        torch.cuda.set_device(device)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, min(total, free + CONTEXT_BYTES) if before is None else before)

    def check_share(self, utilization: float) -> None:
        """Raises ConfigError if other processes have left less than this node's share."""
        share = int(self.total * utilization)
        if self.free_before < share:
            raise ConfigError(
                f"--gpu-memory-utilization {utilization:g} asks for {format_bytes(share)}, but of "
                f"the GPU {format_bytes(self.free_before)} of {format_bytes(self.total)} are free: "
                "lower it, or end what else uses the GPU"
            )

    def outside_torch(self, device: torch.device) -> int:
        """Returns the bytes that this process holds and torch's allocator does not know of."""
        free, _ = torch.cuda.mem_get_info(device)
        grown = self.free_before - free - torch.cuda.memory_reserved(device)
        return min(max(grown, 0), MAX_OUTSIDE_BYTES)


def check_free(size: int, device: torch.device) -> None:
    """Raises ConfigError if a cache of `size` bytes exceeds what is free on the GPU now, with what
    torch holds unused."""
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if size > free:
        raise ConfigError(
            f"a KV cache of {format_bytes(size)} does not fit into the {format_bytes(free)} that "
            "are free on the GPU: lower --gpu-memory-utilization, --kv-cache-memory or "
            "--num-gpu-blocks-override, or end what else uses the GPU"
        )


def _free_by_driver(device: torch.device) -> int | None:
    """Returns the free bytes without a CUDA context, None if the driver does not say."""
    uuid = torch.cuda.get_device_properties(device).uuid
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError:  # no NVML in this container, or a part of a GPU (MIG)
        return None
