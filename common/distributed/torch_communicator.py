"""Collectives over a c10d process group, made without torch's default group, so that several
clusters, or ranks as threads, live side by side in one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdserve.common.distributed.communicator import (
    CommunicatorContext,
    DeviceCommunicator,
    rank_lost,
)


class TorchCommunicator(DeviceCommunicator):
    """A subclass says which process group it is. What only moves travels as bytes, so that every
    dtype does."""

    def __init__(self, context: CommunicatorContext) -> None:
        self.context = context
        self._connected: Any = self.connect(context)

    @property
    def _group(self) -> Any:
        if self._connected is None:
            raise rank_lost("the group is closed")
        return self._connected

    def connect(self, context: CommunicatorContext) -> Any:
        """The process group; returns when all ranks are there."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = self._rows(tensor)
        self._group._allgather_base(as_bytes(parts), as_bytes(tensor)).wait()
        return parts

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = torch.empty_like(tensor[0])
        self._group._reduce_scatter_base(part, tensor).wait()
        return part

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        received = rows.new_empty((sum(receives), *rows.shape[1:]))
        target, source = (as_bytes(each).view(-1, row_bytes(rows)) for each in (received, rows))
        options = dist.AllToAllOptions()
        self._group.alltoall_base(target, source, list(receives), list(sends), options).wait()
        return received

    def gather(self, tensor: Tensor, dst: int) -> Tensor | None:
        options = dist.GatherOptions()
        options.rootRank = dst
        parts = self._rows(tensor) if self.context.rank == dst else None
        targets = [] if parts is None else [[as_bytes(part) for part in parts]]
        self._group.gather(targets, [as_bytes(tensor)], options).wait()
        return parts

    def broadcast(self, tensor: Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([as_bytes(tensor)], options).wait()

    def send(self, tensor: Tensor, dst: int) -> None:
        self._group.send([as_bytes(tensor)], dst, 0).wait()

    def recv(self, tensor: Tensor, src: int) -> None:
        self._group.recv([as_bytes(tensor)], src, 0).wait()

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, device=self.context.device))

    def close(self) -> None:
        """torch closes the connections with the object."""
        self._connected = None

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.context.size, *tensor.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def row_bytes(rows: Tensor) -> int:
    """Of one row of `[N, *]`; there may be none."""
    return rows.shape[1:].numel() * rows.element_size()


# ---- CPU collectives over TCP (gloo): between hosts, and what shared memory does not do ----

INTERFACE = "GLOO_SOCKET_IFNAME"


class GlooCommunicator(TorchCommunicator):
    """Listens on loopback where all ranks share a host; else on GLOO_SOCKET_IFNAME, or on the
    address under which this host reaches the meeting point. (By itself gloo takes whatever
    address the host's name resolves to, which often is loopback.)"""

    def connect(self, context: CommunicatorContext) -> Any:
        # torch has no public name for gloo's options.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=context.timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(**_listen(context))]
        return dist.ProcessGroupGloo(context.store, context.rank, context.size, options)

    @property
    def transport(self) -> str:
        ((kind, where),) = _listen(self.context).items()
        return f"gloo over {'address' if kind == 'hostname' else kind} {where}"

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """gloo has no such algorithm: all of the sum, of which the rest is dropped."""
        total = tensor.clone()
        self.all_reduce(total)
        return total[self.context.rank].clone()


def _listen(context: CommunicatorContext) -> dict[str, str]:
    if context.one_host:
        return {"hostname": "127.0.0.1"}
    if interface := os.environ.get(INTERFACE):
        return {"interface": interface.split(",")[0]}
    return {"hostname": context.address}
