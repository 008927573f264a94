"""What carries the tensors of one group of ranks: one implementation per device and transport.

    DeviceCommunicator
    ├── TorchCommunicator            over a c10d process group
    │   ├── GlooCommunicator         CPU, over TCP
    │   │   └── ShmCommunicator      CPU, ranks of one host: collectives in shared memory
    │   └── NCCLCommunicator         CUDA
    │       └── SymmMemCommunicator  CUDA with peer access: small sums in one kernel
    └── a plugin's                   "module:Class", or an entry point

`GroupCoordinator` is what callers hold; it hands a communicator only what is simple: tensors that
are contiguous, on this rank's device and not empty. Ranks here are counted within the group.
"""

from __future__ import annotations

import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdserve.common.core.errors import NodeError
from pdserve.common.core.plugins import resolve

BUILTIN = {
    "gloo": "pdserve.common.distributed.torch_communicator:GlooCommunicator",
    "shm": "pdserve.common.distributed.shm:ShmCommunicator",
    "nccl": "pdserve.common.distributed.torch_communicator:NCCLCommunicator",
    "symm_mem": "pdserve.common.distributed.torch_communicator:SymmMemCommunicator",
}
ENTRY_POINTS = "pdserve.device_communicators"


@dataclass(frozen=True, slots=True)
class CommunicatorContext:
    """A group while it is made. Every rank of it has an equal context but for `rank`."""

    name: str  # unique in the world, for the keys in `store` and for messages
    ranks: tuple[int, ...]  # in the world, in the group's order
    rank: int  # this one's place in `ranks`
    hosts: tuple[str, ...]  # by rank of the group; equal where ranks share memory and loopback
    address: str  # of this host, as the other hosts reach it
    device: torch.device
    store: Any  # torch's Store, of this group alone
    timeout: float  # seconds

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def one_host(self) -> bool:
        return len(set(self.hosts)) == 1

    @property
    def shares_memory(self) -> bool:
        """Python has no memory fence. On x86 stores are seen in the order in which they were
        made, which is all that `shared_memory.py` needs."""
        x86_linux = sys.platform == "linux" and platform.machine() == "x86_64"
        return x86_linux and self.one_host and self.device.type == "cpu"


class DeviceCommunicator(ABC):
    """Collectives of one group. Each ends within the context's `timeout`.

    Every method raises `NodeError` (code RANK_LOST) or torch's RuntimeError when a rank is gone
    or silent; the group is of no use afterwards. All ranks call the same methods in one order,
    with tensors of equal shape and dtype.
    """

    @abstractmethod
    def __init__(self, context: CommunicatorContext) -> None:
        """Blocks until all ranks have met."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """What is in use, for people: "shared memory", "NCCL 2.27.3" …"""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sums over the ranks, in place; bit-identical on all of them. Sums of bool are "or"."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """`[*]` of each rank → `[size, *]` on all."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """`[size, *]` → `[*]`: row `rank` of the sum over the ranks."""

    @abstractmethod
    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """`[sum(sends), *]`, the first `sends[0]` rows for rank 0 and so on → `[sum(receives), *]`,
        the first `receives[0]` rows from rank 0 and so on. Some or all counts may be 0, but a row
        is not empty."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Fills `tensor` with that of `src`."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None: ...

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None:
        """Fills `tensor` with what `src` sends."""

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Drops all connections, which the other ranks notice. May be called again."""


def make_communicator(name: str, context: CommunicatorContext) -> DeviceCommunicator:
    """`name` as in --device-communicator; "auto" is the best the device and the hosts allow.

    Raises:
        ConfigError: there is no such communicator, or it cannot serve this group.
        NodeError: the ranks did not meet.
    """
    if name == "auto":
        name = _best(context)
    communicator: DeviceCommunicator = resolve(name, BUILTIN, ENTRY_POINTS)(context)
    return communicator


def _best(context: CommunicatorContext) -> str:
    if context.device.type == "cuda":
        return "nccl"
    return "shm" if context.shares_memory else "gloo"


def rank_lost(message: str) -> NodeError:
    return NodeError(message, code="RANK_LOST")
