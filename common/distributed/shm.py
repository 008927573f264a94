"""CPU collectives in shared memory, for ranks on one host; send and recv use gloo.

Every rank computes sums over all slots by one tree, so they are bit-identical on all ranks and in
every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.distributed.communicator import CommunicatorContext
from pdserve.common.distributed.shared_memory import SLOT_BYTES, SharedMemory, share_segment
from pdserve.common.distributed.torch_communicator import (
    GlooCommunicator,
    add_up,
    as_bytes,
    row_bytes,
)

Read = Callable[[list[Tensor], slice], None]
"""Reads the slots (by rank) of one round; the slice is their part of the whole tensor."""


class ShmCommunicator(GlooCommunicator):
    """Sends tensors larger than a slot in several rounds."""

    def __init__(self, context: CommunicatorContext) -> None:
        if not (context.shares_memory and context.one_host):
            raise ConfigError(
                f"{context.name}: shared memory carries CPU tensors between ranks of one Linux "
                "x86-64 host; pass --device-communicator auto"
            )
        super().__init__(context)
        self._memory = SharedMemory(context.rank, context.ranks, share_segment(context))

    @property
    def transport(self) -> str:
        return f"shared memory (send and recv: {super().transport})"

    def all_reduce(self, tensor: Tensor) -> None:
        whole = tensor.view(-1)

        def add(slots: list[Tensor], part: slice) -> None:
            add_up(slots, whole[part])

        self._rounds(whole, add)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        mine = torch.empty_like(tensor[0])
        share, start = mine.view(-1), self.context.rank * mine.numel()

        def add(slots: list[Tensor], part: slice) -> None:
            low, high = max(part.start, start), min(part.stop, start + share.numel())
            if low < high:
                here = slice(low - part.start, high - part.start)
                add_up([slot[here] for slot in slots], share[low - start : high - start])

        self._rounds(tensor.view(-1), add)
        return mine

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = self._rows(tensor)
        rows = parts.view(self.context.size, -1)

        def copy(slots: list[Tensor], part: slice) -> None:
            for row, slot in zip(rows, slots, strict=True):
                row[part].copy_(slot)

        self._rounds(tensor.view(-1), copy)
        return parts

    def all_to_all(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchanges rows through the slots. A slot begins with the offsets of each receiver's part
        in the sender's byte stream, from which all ranks know how many rounds the longest stream
        takes."""
        received, rank = rows.new_empty((sum(receives), *rows.shape[1:])), self.context.rank
        width = row_bytes(rows)
        stream, target = as_bytes(rows), as_bytes(received)
        edges, places = torch.tensor(_edges(sends, width)), _edges(receives, width)
        head, room = edges.nbytes, SLOT_BYTES - edges.nbytes
        deadline, start, longest = self._deadline(), 0, 1
        while start < longest:
            slots, part = self._memory.slots(torch.uint8), stream[start : start + room]
            slots[rank][:head].view(torch.int64).copy_(edges)
            slots[rank][head : head + len(part)].copy_(part)
            self._memory.barrier(deadline)
            for peer, slot in enumerate(slots):
                theirs = slot[:head].view(torch.int64).tolist()
                self._check_count(peer, theirs, places)
                low, high = max(theirs[rank], start), min(theirs[rank + 1], start + room)
                if low < high:
                    place, body = places[peer] - theirs[rank], slot[head:]
                    target[place + low : place + high].copy_(body[low - start : high - start])
                longest = max(longest, theirs[-1])
            start += room
        return received

    def _check_count(self, peer: int, theirs: list[int], places: list[int]) -> None:
        """Raises NodeError if a peer sends another number of bytes than this rank expects."""
        rank = self.context.rank
        sent, expected = theirs[rank + 1] - theirs[rank], places[peer + 1] - places[peer]
        if sent != expected:
            name = f"rank {self.context.ranks[peer]}"
            raise NodeError(f"{name} sends {sent} bytes, not {expected}", code="RANKS_DISAGREE")

    def broadcast(self, tensor: Tensor, src: int, seconds: float | None = None) -> None:
        """`seconds`: a time-out of its own."""
        whole, mine = tensor.view(-1), self.context.rank == src

        def copy(slots: list[Tensor], part: slice) -> None:
            if not mine:
                whole[part].copy_(slots[src])

        self._rounds(whole, copy, writes=mine, seconds=seconds)

    def barrier(self) -> None:
        self._memory.barrier(self._deadline())

    def close(self) -> None:
        super().close()
        self._memory.close()

    def _rounds(
        self, whole: Tensor, read: Read, writes: bool = True, seconds: float | None = None
    ) -> None:
        """Publishes a flat tensor, part by part, and reads the slots of all ranks."""
        deadline, rank = self._deadline(seconds), self.context.rank
        for part in _parts(whole):
            slots = [slot[: part.stop - part.start] for slot in self._memory.slots(whole.dtype)]
            if writes:
                slots[rank].copy_(whole[part])
            self._memory.barrier(deadline)
            read(slots, part)

    def _deadline(self, seconds: float | None = None) -> float:
        return time.monotonic() + (seconds or self.context.timeout)


def _parts(whole: Tensor) -> Iterator[slice]:
    """Yields the fewest parts that fit into a slot, of nearly equal size."""
    count, most = whole.numel(), SLOT_BYTES // whole.element_size()
    step = -(-count // max(-(-count // most), 1))
    for start in range(0, count, max(step, 1)):
        yield slice(start, min(start + step, count))


def _edges(counts: Sequence[int], width: int) -> list[int]:
    """Returns the offset of each rank's part in a stream of rows of `width` bytes, and the end."""
    return [width * edge for edge in accumulate(counts, initial=0)]
