"""Collectives over c10d process groups: gloo, NCCL, and torch's symmetric memory.

The groups do not use torch's default group, so that several clusters, or ranks as threads, can
share a process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.communicator import (
    CommunicatorContext,
    DeviceCommunicator,
    rank_lost,
)

# For a rank's start: FlashInfer compiles its kernels at the first step, which takes minutes.
START_SECONDS = 900.0


class TorchCommunicator(DeviceCommunicator):
    """Collectives on the process group of a subclass. Data that is only moved is sent as bytes, so
    that all dtypes work."""

    def __init__(self, context: CommunicatorContext) -> None:
        self.context = context
        self._connected: Any = self.connect(context)

    @property
    def _group(self) -> Any:
        if self._connected is None:
            raise rank_lost("the group is closed")
        return self._connected

    def connect(self, context: CommunicatorContext) -> Any:
        """Returns the process group once all ranks have connected."""
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
        """Drops the process group; torch closes its connections with the object."""
        self._connected = None

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty((self.context.size, *tensor.shape))


class GlooCommunicator(TorchCommunicator):
    """CPU tensors over TCP: between hosts, and for operations that shared memory lacks. Sums are
    taken in one order (`add_up`), whatever the tensor's size; gloo's own depend on it.

    Listens on loopback if all ranks share a host; else on GLOO_SOCKET_IFNAME, or on the address
    with which this host reaches the rendezvous. (gloo's default is the address of the host's name,
    which is often loopback.)

    If a rank dies, its connections break, and the others learn it at once. But on a busy host gloo
    may miss that (4 of 300 times, on one of three ranks). Then the time-out ends the wait, unless
    the executor, which sees the dead process, ends the node before."""

    SMALL_BYTES = 64 << 10

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

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums tensors. Each rank sums a whole small tensor, which takes one exchange; of a large
        one each rank sums a share, which moves the fewest bytes."""
        whole, size = tensor.view(-1), self.context.size
        if tensor.nbytes <= self.SMALL_BYTES:
            add_up(self._exchange(whole.expand(size, -1)).unbind(), whole)
            return
        shares = whole.new_zeros(size, -(-whole.numel() // size))
        shares.view(-1)[: whole.numel()].copy_(whole)
        whole.copy_(self.all_gather(self.reduce_scatter(shares)).view(-1)[: whole.numel()])

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = torch.empty_like(tensor[0])
        add_up(self._exchange(tensor).unbind(), part)
        return part

    def _exchange(self, rows: Tensor) -> Tensor:
        """Sends `rows[r]` to rank r; returns what came, in the order of ranks."""
        ones = [1] * self.context.size
        return self.all_to_all(rows.contiguous(), ones, ones)

    def all_gather(self, tensor: Tensor) -> Tensor:
        with self._naming_the_lost():
            return super().all_gather(tensor)

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        with self._naming_the_lost():
            return super().all_to_all(rows, sends, receives)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        with self._naming_the_lost():
            super().broadcast(tensor, src)

    def send(self, tensor: Tensor, dst: int) -> None:
        with self._naming_the_lost(dst):
            super().send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> None:
        with self._naming_the_lost(src):
            super().recv(tensor, src)

    @contextmanager
    def _naming_the_lost(self, peer: int | None = None) -> Iterator[None]:
        """Turns gloo's errors, which name lines of its source, into errors that name `peer` or all
        others: gloo does not say which of several did not answer."""
        try:
            yield
        except RuntimeError as error:
            context = self.context
            others = [peer] if peer is not None else range(context.size)
            names = context.describe(rank for rank in others if rank != context.rank)
            if not context.one_host:
                names += f" to rank {context.ranks[context.rank]} on host {context.address}"
            if "Timed out" not in str(error):
                raise rank_lost(f"the connection from {names} broke") from error
            hint = "" if context.one_host else ": check the link between the hosts"
            raise rank_lost(f"no answer from {names} within {context.timeout:g} s{hint}") from error


def _listen(context: CommunicatorContext) -> dict[str, str]:
    if context.one_host:
        return {"hostname": "127.0.0.1"}
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return {"interface": interface.split(",")[0]}
    return {"hostname": context.address}


class NCCLCommunicator(TorchCommunicator):
    """GPU tensors over NCCL, on the GPU's stream. NCCL's watchdog ends a process whose peer is
    silent; the executor notices a dead peer earlier."""

    def connect(self, context: CommunicatorContext) -> Any:
        if context.device.type != "cuda":
            raise ConfigError(f"{context.name}: NCCL needs CUDA devices, not {context.device}")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(context.timeout, START_SECONDS))
        return dist.ProcessGroupNCCL(context.store, context.rank, context.size, options)

    @property
    def transport(self) -> str:
        return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"

    def barrier(self) -> None:
        super().barrier()
        torch.cuda.synchronize(self.context.device)

    def serve(self) -> None:
        self._group._set_default_timeout(timedelta(seconds=self.context.timeout))

    def close(self) -> None:
        if self._connected is not None:
            self._connected.shutdown()
        super().close()


class SymmMemCommunicator(NCCLCommunicator):
    """Computes small all-reduces in one kernel that reads all ranks' buffers ("one-shot" all-reduce
    of torch.distributed._symmetric_memory); uses NCCL for the rest."""

    BUFFER_BYTES = 256 << 10  # beyond this NCCL is faster

    def __init__(self, context: CommunicatorContext) -> None:
        """Raises ConfigError if the group's GPUs cannot access each other's memory."""
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
        floats = tensor.dtype in (torch.float32, torch.bfloat16)  # the kernel's dtypes
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
            f"{context.name}: {context.device} cannot access the memory of all other GPUs of its "
            "group; pass --device-communicator nccl"
        )


def add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of at least two parts: first of neighbours, then of neighbouring pairs, and so
    on, in the order in which `block_sums.h` adds within a rank."""
    while len(parts) > 2:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [*map(torch.add, parts[::2], parts[1::2]), *odd]
    torch.add(parts[0], parts[1], out=out)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def row_bytes(rows: Tensor) -> int:
    """Returns the bytes of one row of `[N, *]`; N may be 0."""
    return rows.shape[1:].numel() * rows.element_size()
