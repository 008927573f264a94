"""CPU collectives for ranks on several hosts, some of which share one.

    all-reduce:   rank 0 ─┐ shared     ┌────── gloo ──────┐     ┌─ rank 2    each host's first rank
                  rank 1 ─┴ memory ▶ rank 0            rank 2 ◀─┴─ rank 3    is its leader

The ranks of a host add up in shared memory; the leaders exchange their hosts' sums and pass the
total to their hosts' ranks. So a host sends each element once, however many ranks it has.
Operations that would not gain (all-to-all, send, recv) use gloo between all ranks.

Ranks of a host wait eight tenths of the group's time-out for each other, leaders nine tenths, and
ranks wait for their leader all of it: so the first to give up knows which ranks are missing.
"""

from __future__ import annotations

from torch import Tensor

from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.communicator import CommunicatorContext
from pdserve.common.distributed.shm import ShmCommunicator
from pdserve.common.distributed.torch_communicator import GlooCommunicator

_WITHIN, _BETWEEN = 0.8, 0.9  # of the group's time-out


class HierarchicalCommunicator(GlooCommunicator):
    """Also serves a group on one host, or with one rank per host."""

    def __init__(self, context: CommunicatorContext) -> None:
        if not context.shares_memory:
            raise ConfigError(
                f"{context.name}: shared memory carries CPU tensors between ranks of Linux x86-64 "
                "hosts; pass --device-communicator auto"
            )
        super().__init__(context)
        self._members = context.members
        self._host = next(i for i, here in enumerate(self._members) if context.rank in here)
        here, leaders = self._members[self._host], [ranks[0] for ranks in self._members]
        self._local: ShmCommunicator | None = None
        self._leaders: GlooCommunicator | None = None  # only on leaders
        if len(here) > 1:
            seconds = _WITHIN * context.timeout
            self._local = ShmCommunicator(context.subgroup(f"host {self._host}", here, seconds))
        if len(leaders) > 1 and context.rank in leaders:
            seconds = _BETWEEN * context.timeout
            self._leaders = GlooCommunicator(context.subgroup("leaders", leaders, seconds))

    @property
    def transport(self) -> str:
        return f"shared memory within {len(self._members)} hosts, {super().transport} between them"

    def all_reduce(self, tensor: Tensor) -> None:
        if self._local is not None:
            self._local.all_reduce(tensor)
        if self._leaders is not None:
            self._leaders.all_reduce(tensor)
        self._hand_out(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        self.all_reduce(total)
        return total[self.context.rank].clone()

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = self._rows(tensor)
        mine = tensor[None] if self._local is None else self._local.all_gather(tensor)
        for ranks, rows in zip(self._members, self._everyones(mine), strict=False):
            for rank, row in zip(ranks, rows, strict=False):
                parts[rank].copy_(row)
        self._hand_out(parts)
        return parts

    def _everyones(self, rows: Tensor) -> Tensor:
        """Returns on a leader the rows of each host, padded to the most ranks of a host; an empty
        tensor on other ranks."""
        if self._leaders is None:
            return rows[None] if len(self._members) == 1 else rows[:0]
        filled = rows.new_empty(max(map(len, self._members)), *rows.shape[1:])
        filled[: len(rows)].copy_(rows)
        return self._leaders.all_gather(filled)

    def broadcast(self, tensor: Tensor, src: int) -> None:
        source = next(i for i, ranks in enumerate(self._members) if src in ranks)
        if source == self._host and self._local is not None:
            self._local.broadcast(tensor, self._members[source].index(src))
        if self._leaders is not None:
            self._leaders.broadcast(tensor, source)
        if source != self._host:
            self._hand_out(tensor)

    def _hand_out(self, tensor: Tensor) -> None:
        """Copies the leader's tensor to the other ranks of its host."""
        if self._local is not None and len(self._members) > 1:
            self._local.broadcast(tensor, 0, self.context.timeout)

    def close(self) -> None:
        super().close()
        for group in (self._leaders, self._local):
            if group is not None:
                group.close()
