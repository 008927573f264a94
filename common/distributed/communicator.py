"""The transports of a group's tensors: one implementation per device and transport.

    DeviceCommunicator
    ├── TorchCommunicator            over a c10d process group
    │   ├── GlooCommunicator         CPU, over TCP
    │   │   ├── ShmCommunicator      CPU, ranks of one host: collectives in shared memory
    │   │   └── HierarchicalCommunicator  CPU, several hosts: shared memory within, gloo between
    │   └── NCCLCommunicator         CUDA
    │       └── SymmMemCommunicator  CUDA with peer access: small sums in one kernel
    └── a plugin's                   "module:Class", or an entry point

Callers use `GroupCoordinator`, which passes only contiguous, non-empty tensors on this rank's
device to a communicator. Ranks here are numbered within the group.
"""

from __future__ import annotations

import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from pdserve.common.core.errors import NodeError
from pdserve.common.core.plugins import resolve

BUILTIN = {
    "gloo": "pdserve.common.distributed.torch_communicator:GlooCommunicator",
    "shm": "pdserve.common.distributed.shm:ShmCommunicator",
    "hierarchical": "pdserve.common.distributed.hierarchical:HierarchicalCommunicator",
    "nccl": "pdserve.common.distributed.torch_communicator:NCCLCommunicator",
    "symm_mem": "pdserve.common.distributed.torch_communicator:SymmMemCommunicator",
}
ENTRY_POINTS = "pdserve.device_communicators"


@dataclass(frozen=True, slots=True)
class CommunicatorContext:
    """The description of a group to connect; equal on all its ranks except for `rank`."""

    name: str  # unique in the world, for keys in `store` and messages
    ranks: tuple[int, ...]  # world ranks, in the group's order
    rank: int  # index of this rank in `ranks`
    hosts: tuple[str, ...]  # host identity per rank; equal if they share memory and loopback
    addresses: tuple[str, ...]  # per rank, of its host, for other hosts
    device: torch.device
    store: Any  # torch's Store, private to this group
    timeout: float  # seconds

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def address(self) -> str:
        return self.addresses[self.rank]

    @property
    def one_host(self) -> bool:
        return len(set(self.hosts)) == 1

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks (within the group) of each host, in the order of the hosts' first ranks."""
        return tuple(
            tuple(rank for rank, theirs in enumerate(self.hosts) if theirs == host)
            for host in dict.fromkeys(self.hosts)
        )

    @property
    def shares_memory(self) -> bool:
        """Whether `shared_memory.py` works between ranks of a host. Python has no memory fence;
        only on x86 other cores see stores in program order, which is all that it needs."""
        x86_linux = sys.platform == "linux" and platform.machine() == "x86_64"
        return x86_linux and self.device.type == "cpu"

    def subgroup(self, name: str, ranks: Sequence[int], seconds: float) -> CommunicatorContext:
        """Returns the context of some ranks, this one included, with a time-out of their own."""
        return replace(
            self,
            name=f"{self.name} {name}",
            ranks=tuple(self.ranks[rank] for rank in ranks),
            rank=ranks.index(self.rank),
            hosts=tuple(self.hosts[rank] for rank in ranks),
            addresses=tuple(self.addresses[rank] for rank in ranks),
            store=PrefixStore(name, self.store),
            timeout=seconds,
        )

    def describe(self, ranks: Iterable[int]) -> str:
        """Names ranks of the group: "rank 1" on this host, "ranks 4, 5 on host 10.0.0.2"."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.hosts[rank], []).append(rank)
        return ", ".join(
            f"rank{'s' if len(theirs) > 1 else ''} "
            f"{', '.join(str(self.ranks[rank]) for rank in theirs)}"
            f"{'' if host == self.hosts[self.rank] else f' on host {self.addresses[theirs[0]]}'}"
            for host, theirs in by_host.items()
        )


class DeviceCommunicator(ABC):
    """The collectives of one group. Each ends within the context's `timeout` once it serves.

    Every method raises `NodeError` (code RANK_LOST) or torch's RuntimeError when a rank is gone or
    silent; the group cannot be used afterwards. All ranks must call the same methods in the same
    order, with tensors of equal shape and dtype.
    """

    @abstractmethod
    def __init__(self, context: CommunicatorContext) -> None:
        """Blocks until all ranks have connected."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """The transport's name for logs: "shared memory", "NCCL 2.27.3" …"""

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Sums over the ranks, in place; bit-identical on all ranks. Sums of bool are "or"."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gathers `[*]` of each rank into `[size, *]` on all."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Reduces `[size, *]` to `[*]`: row `rank` of the sum over the ranks."""

    @abstractmethod
    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Sends the first `sends[0]` of `rows` to rank 0 and so on; returns `[sum(receives), *]`,
        the first `receives[0]` rows from rank 0 and so on. Counts may be 0; rows are not empty."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Fills `tensor` with that of `src`."""

    @abstractmethod
    def send(self, tensor: Tensor, dst: int) -> None: ...

    @abstractmethod
    def recv(self, tensor: Tensor, src: int) -> None:
        """Fills `tensor` with the one that `src` sends."""

    @abstractmethod
    def barrier(self) -> None: ...

    def serve(self) -> None:  # noqa: B027, most have nothing to do
        """Called when the rank is ready to compute steps. Until then ranks load, compile and
        capture, each at its own pace: a transport whose time-outs end the process may have longer
        ones."""

    @abstractmethod
    def close(self) -> None:
        """Closes all connections, which the other ranks notice. May be called again."""


def make_communicator(name: str, context: CommunicatorContext) -> DeviceCommunicator:
    """Returns the communicator of --device-communicator; "auto" takes the best for the device and
    hosts.

    Raises:
        ConfigError: the communicator does not exist, or cannot serve this group.
        NodeError: the ranks did not connect.
    """
    if name == "auto":
        name = _best(context)
    communicator: DeviceCommunicator = resolve(
        name, BUILTIN, ENTRY_POINTS, "--device-communicator"
    )(context)
    return communicator


def _best(context: CommunicatorContext) -> str:
    if context.device.type == "cuda":
        return "nccl"
    if not context.shares_memory or len(context.members) == context.size > 1:
        return "gloo"
    return "shm" if context.one_host else "hierarchical"


def rank_lost(message: str) -> NodeError:
    return NodeError(message, code="RANK_LOST")
