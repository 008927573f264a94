"""A group of ranks and its collectives.

A group is an object that is passed to its users. Every wait ends: if a rank is gone, or silent for
`timeout` seconds, the others raise `NodeError` (code RANK_LOST), then and in all later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from pdserve.common.core.errors import NodeError
from pdserve.common.distributed.communicator import DeviceCommunicator, rank_lost

T = TypeVar("T")

CPU = torch.device("cpu")


class GroupCoordinator:
    """Rank `rank` of `size`; `ranks` are the members' world ranks. Ranks in arguments (`src`,
    `dst`) are numbered within the group.

    Tensors may have any dtype, be non-contiguous or empty, and are on the CPU or the group's
    device. All ranks must make the same calls in the same order, with equal shapes and dtypes. A
    group of one returns its input. Not thread-safe.
    """

    def __init__(
        self,
        name: str = "alone",
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        communicators: dict[str, DeviceCommunicator] | None = None,
        device: torch.device = CPU,
    ) -> None:
        """`communicators`: by device type; a group of one needs none."""
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.device = device
        self._communicators = communicators or {}
        self._broken: NodeError | None = None

    @property
    def transport(self) -> str:
        """The transport of tensors on the group's device."""
        return self._communicators[self.device.type].transport if self.size > 1 else "none"

    # ---- collectives ----

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the ranks, in place, and returns it. Bit-identical on all ranks."""
        if self.size == 1 or tensor.numel() == 0:
            return tensor
        whole = tensor.contiguous()
        self._run("all-reduce", tensor, lambda via: via.all_reduce(whole))
        return tensor if whole is tensor else tensor.copy_(whole)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Returns the ranks' tensors, concatenated along `dim` in the order of ranks."""
        if self.size == 1:
            return tensor
        if tensor.numel() == 0:
            return torch.cat([tensor] * self.size, dim)
        part = tensor.contiguous()
        return _join(self._run("all-gather", tensor, lambda via: via.all_gather(part)), dim)

    def reduce_scatter(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Returns this rank's share (of `size` equal ones along `dim`) of the sum over the
        ranks."""
        if self.size == 1:
            return tensor
        dim %= tensor.ndim
        if tensor.shape[dim] % self.size:
            raise ValueError(f"{self.size} ranks cannot share {tensor.shape[dim]} rows equally")
        shares = tensor.unflatten(dim, (self.size, tensor.shape[dim] // self.size))
        rows = shares.movedim(dim, 0).contiguous()
        if rows.numel() == 0:
            return rows[self.rank]
        return self._run("reduce-scatter", tensor, lambda via: via.reduce_scatter(rows))

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Sends the first `sends[0]` of `rows` (`[N, *]`) to rank 0, the next `sends[1]` to rank 1
        …; returns the `receives[0]` rows from rank 0, then those from rank 1 … Each rank must know
        how many rows it gets, and all ranks must call this, also without rows."""
        if len(rows) != sum(sends):
            raise ValueError(f"{len(rows)} rows cannot be sent as {list(sends)}")
        if self.size == 1:
            return rows
        if rows.shape[1:].numel() == 0:
            return rows.new_empty((sum(receives), *rows.shape[1:]))
        whole = rows.contiguous()
        return self._run("all-to-all", rows, lambda via: via.all_to_all(whole, sends, receives))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Fills `tensor` with that of rank `src`, and returns it."""
        if self.size == 1 or tensor.numel() == 0:
            return tensor
        whole = tensor.contiguous()
        self._run("broadcast", tensor, lambda via: via.broadcast(whole, src))
        return tensor if whole is tensor else tensor.copy_(whole)

    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[str, Any] | None = None, src: int = 0
    ) -> dict[str, Any]:
        """Returns on every rank what rank `src` passes; the others pass nothing. Values are CPU
        tensors, of any shapes and dtypes, or what JSON has. First goes a description of all values
        as JSON, then tensor after tensor, so ranks need not know what comes."""
        if self.size == 1 or self.rank == src:
            assert tensor_dict is not None, "the source has the values"
            values = dict(tensor_dict)
        if self.size == 1:
            return values
        if self.rank == src:
            self._broadcast_bytes(msgspec.json.encode(_described(values)), src)
        else:
            values = _allocated(msgspec.json.decode(self._broadcast_bytes(None, src)))
        for value in values.values():
            if isinstance(value, Tensor):
                self.broadcast(value, src)
        return values

    def _broadcast_bytes(self, data: bytes | None, src: int) -> bytes:
        count = self.broadcast(torch.tensor([len(data or b"")]), src)
        body = _as_tensor(data) if data is not None else torch.empty(int(count)).byte()
        return bytes(self.broadcast(body, src).numpy())

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        if self.size > 1:
            self._run("barrier", None, lambda via: via.barrier())

    # ---- from one rank to another ----

    def send(self, tensor: Tensor, dst: int) -> None:
        """Returns when `tensor` may be written again."""
        if tensor.numel():
            part = tensor.contiguous()
            self._run("send", tensor, lambda via: via.send(part, dst))

    def recv(self, shape: Iterable[int], dtype: torch.dtype, src: int) -> Tensor:
        """Returns the tensor that rank `src` sends, on the group's device."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if tensor.numel():
            self._run("recv", tensor, lambda via: via.recv(tensor, src))
        return tensor

    # ---- bytes, agreement ----

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns each rank's `data`, of any length, in the order of ranks."""
        counts = self.all_gather(torch.tensor([len(data)]), dim=0).tolist()
        padded = _as_tensor(data.ljust(max(counts), b"\0"))
        rows = self.all_gather(padded[None], dim=0)
        return [bytes(row[:count].numpy()) for row, count in zip(rows, counts, strict=True)]

    def agree(self, value: Any, what: str) -> None:
        """Returns if `value` (plain data) is equal on all ranks.

        Raises:
            NodeError: RANKS_DISAGREE, on every rank; the message has each rank's value of `what`.
        """
        holders: dict[bytes, list[int]] = {}
        bodies = self.all_gather_bytes(msgspec.msgpack.encode(value, order="deterministic"))
        for rank, body in zip(self.ranks, bodies, strict=True):
            holders.setdefault(body, []).append(rank)
        if len(holders) > 1:
            views = (
                f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: "
                f"{msgspec.msgpack.decode(body)}"
                for body, ranks in holders.items()
            )
            message = f"the {self.name} ranks disagree on {what}: {'; '.join(views)}"
            raise NodeError(message, code="RANKS_DISAGREE")

    # ---- from start to end ----

    def serve(self) -> None:
        """Ends the start: from now on the time-outs of service hold."""
        for communicator in self._communicators.values():
            communicator.serve()

    def close(self) -> None:
        """Leaves the group; no collective may follow. May be called again."""
        for communicator in self._communicators.values():
            communicator.close()

    def _run(self, what: str, tensor: Tensor | None, call: Callable[[DeviceCommunicator], T]) -> T:
        """Runs a collective. torch reports a lost or silent peer as a RuntimeError (DistError is
        one)."""
        if self._broken is not None:
            raise self._broken
        device = self.device if tensor is None else tensor.device
        try:
            return call(self._communicators[device.type])
        except (NodeError, RuntimeError) as error:
            reason = error.message if isinstance(error, NodeError) else str(error).splitlines()[0]
            self._broken = rank_lost(f"{what} among {self.name} ranks failed: {reason}")
            self.close()  # so that ranks that wait for this one fail now, not at their time-out
            raise self._broken from error


def _join(rows: Tensor, dim: int) -> Tensor:
    """Concatenates the rows of `[size, *]` along `dim`."""
    if dim % (rows.ndim - 1) == 0:
        return rows.flatten(0, 1)
    return torch.cat(rows.unbind(0), dim)


_TENSOR, _PLAIN = "tensor", "plain"


def _described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values as JSON; of a tensor its dtype and shape."""
    return {
        name: [_TENSOR, str(value.dtype).removeprefix("torch."), *value.shape]
        if isinstance(value, Tensor)
        else [_PLAIN, value]
        for name, value in values.items()
    }


def _allocated(described: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Returns the values of `_described`, with tensors to be filled."""
    return {
        name: torch.empty(rest[1:], dtype=getattr(torch, rest[0])) if kind == _TENSOR else rest[0]
        for name, (kind, *rest) in described.items()
    }


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
