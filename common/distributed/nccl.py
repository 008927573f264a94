"""CUDA collectives: NCCL; and torch's symmetric memory, where GPUs reach each other's memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.communicator import CommunicatorContext
from pdserve.common.distributed.torch_communicator import TorchCommunicator


class NCCLCommunicator(TorchCommunicator):
    """NCCL runs on the GPU's stream and its watchdog ends a process whose peer is silent; that a
    peer died is heard sooner from the executor."""

    def connect(self, context: CommunicatorContext) -> Any:
        if context.device.type != "cuda":
            raise ConfigError(f"{context.name}: NCCL needs CUDA devices, not {context.device}")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=context.timeout)
        return dist.ProcessGroupNCCL(context.store, context.rank, context.size, options)

    @property
    def transport(self) -> str:
        return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"

    def barrier(self) -> None:
        super().barrier()
        torch.cuda.synchronize(self.context.device)

    def close(self) -> None:
        if self._connected is not None:
            self._connected.shutdown()
        super().close()


class SymmMemCommunicator(NCCLCommunicator):
    """Small sums in one kernel that reads all ranks' buffers (torch.distributed._symmetric_memory,
    "one-shot" all-reduce); the rest is NCCL's."""

    BUFFER_BYTES = 256 << 10  # beyond this NCCL is faster

    def __init__(self, context: CommunicatorContext) -> None:
        """Raises ConfigError where the GPUs of the group do not reach each other's memory."""
        _check_peer_access(context)
        super().__init__(context)
        self._name = f"pdserve-{context.name}"
        memory = torch._C._distributed_c10d._SymmetricMemory
        memory.set_group_info(self._name, context.rank, context.size, context.store)
        self._buffer = memory.empty_strided_p2p(
            (self.BUFFER_BYTES,), (1,), torch.uint8, context.device, self._name
        )
        memory.rendezvous(self._buffer)

    @property
    def transport(self) -> str:
        return f"symmetric memory up to {self.BUFFER_BYTES >> 10} KiB, then {super().transport}"

    def all_reduce(self, tensor: Tensor) -> None:
        floats = tensor.dtype in (torch.float32, torch.bfloat16)  # what the kernel knows
        if not floats or tensor.nbytes > self.BUFFER_BYTES or tensor.nbytes % 16:
            super().all_reduce(tensor)
            return
        buffer = self._buffer.view(tensor.dtype)[: tensor.numel()]
        buffer.copy_(tensor.view(-1))
        total = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._name)
        tensor.view(-1).copy_(total)


def _check_peer_access(context: CommunicatorContext) -> None:
    count = torch.cuda.device_count() if context.device.type == "cuda" else 0
    reached = context.one_host and all(
        torch.cuda.can_device_access_peer(context.device, other)
        for other in range(min(count, context.size))
        if torch.device("cuda", other) != context.device
    )
    if not reached or count < context.size:
        raise ConfigError(
            f"{context.name}: {context.device} does not reach the memory of all other GPUs of its "
            "group; pass --device-communicator nccl"
        )
