"""CUDA IPC's connector with an opener that works on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from pdserve.kv_transfer.connector import Capabilities
from pdserve.kv_transfer.connectors.cuda_ipc import CudaIpcConnector, Handle


class CpuIpcConnector(CudaIpcConnector):
    """Shares memory with its own process only, by number."""

    capabilities: ClassVar[Capabilities] = replace(
        CudaIpcConnector.capabilities, devices=frozenset({"cpu"})
    )
    shared: ClassVar[dict[bytes, torch.UntypedStorage]] = {}

    def share(self, storage: torch.UntypedStorage) -> Handle:
        key = str(len(self.shared)).encode()
        self.shared[key] = storage
        return 0, key, storage.nbytes(), 0, b"", 0, b"", False

    def open_storage(self, handle: Handle) -> torch.UntypedStorage:
        return self.shared[handle[1]]
