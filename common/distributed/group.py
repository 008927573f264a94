"""Collectives among the ranks of one node, over torch.distributed (gloo on CPU, NCCL on CUDA).

The group is an object that is passed to whoever needs it: torch's default group is not used,
so several groups live side by side. Every wait has an end: a rank that is silent for `timeout`
seconds, or whose connection closes, is a NodeError in the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common.core.errors import NodeError


class TensorParallelGroup:
    """Rank `rank` of `size`. A group of one does nothing and needs no `init_method`."""

    def __init__(
        self,
        rank: int,
        size: int,
        init_method: str = "",
        device: torch.device | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Blocks until all ranks have met at `init_method` ("file:///new/path" or "tcp://…").

        Raises:
            NodeError: not all of them came within `timeout` seconds.
        """
        self.rank = rank
        self.size = size
        self._group: Any = None
        if size > 1:
            with _peer_errors("the ranks could not meet"):
                self._group = _connect(rank, size, init_method, device, timedelta(seconds=timeout))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over the ranks, in place, and returns it."""
        if self.size > 1:
            with _peer_errors("all-reduce failed"):
                self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The ranks' tensors (of equal shape), joined along `dim` in the order of ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with _peer_errors("all-gather failed"):
            self._group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=dim)

    def close(self) -> None:
        """Leaves the group; no collective may follow."""
        if self._group is not None:
            self._group.shutdown()
            self._group = None


def _connect(
    rank: int, size: int, init_method: str, device: torch.device | None, timeout: timedelta
) -> Any:
    store, _, _ = next(dist.rendezvous(init_method, rank, size, timeout=timeout))
    if device is not None and device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    # torch has no public name for gloo's options. They are needed to bind to loopback: by
    # default gloo listens on whatever address the host's name resolves to.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, options)


@contextmanager
def _peer_errors(what: str) -> Iterator[None]:
    """torch reports a lost or silent peer as a RuntimeError (DistError is one)."""
    try:
        yield
    except RuntimeError as error:
        raise NodeError(f"{what}: {str(error).splitlines()[0]}", code="RANK_LOST") from error
