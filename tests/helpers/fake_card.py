"""Simulates a GPU's memory: the bytes that several processes hold on one GPU, as CUDA, the driver
and torch's allocator report them to one process. It only counts bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 2**30


class FakeCard:
    """`outside` and `inside`: bytes that this process holds outside and inside torch's allocator.
    `neighbour`: bytes of other processes."""

    def __init__(self, total: int = 80 * GIB, context: int = GIB // 2, nvml: bool = True) -> None:
        self.total, self.context, self.nvml = total, context, nvml
        self.outside = self.inside = self.neighbour = 0

    @property
    def free(self) -> int:
        return self.total - self.outside - self.inside - self.neighbour

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def enter(device: torch.device) -> None:
            self.outside = self.outside or self.context

        def memory_info(handle: str) -> Any:
            assert handle == "GPU-1"
            return SimpleNamespace(free=self.free)

        def init() -> None:
            if not self.nvml:
                raise nvml.NVMLError(nvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        from pdserve.common.worker import gpu_memory

        nvml, cuda = gpu_memory.pynvml, torch.cuda
        properties = SimpleNamespace(uuid="1")
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(cuda, "set_device", enter)
        monkeypatch.setattr(cuda, "mem_get_info", lambda device: (self.free, self.total))
        monkeypatch.setattr(cuda, "memory_reserved", lambda device: self.inside)
        monkeypatch.setattr(cuda, "memory_allocated", lambda device: self.inside)
        monkeypatch.setattr(nvml, "nvmlInit", init)
        monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
        monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", memory_info)
