"""Both sides of a transfer, each with one rank or several, and the kit's calls to them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch

from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.commands import Ready
from pdserve.kv_transfer.conformance.caches import FREE, Geometry
from pdserve.kv_transfer.conformance.ends import ARRIVAL_S, LOOKS, SETTLE_S, End
from pdserve.kv_transfer.connector import BlockRun, Landed, Sent, SinkTransfer, SourceTransfer
from pdserve.kv_transfer.layout import Share, plan

E = TypeVar("E", bound=End)
S = TypeVar("S", bound=End)
T = TypeVar("T", bound=End)


class KitNode(Generic[E]):
    """Holds the ranks of one node, which share a block table."""

    def __init__(self, geometry: Geometry, ends: Sequence[E]) -> None:
        self.geometry = geometry
        self.ends = tuple(ends)

    @property
    def end(self) -> E:
        """Returns the only rank."""
        (end,) = self.ends
        return end


def runs_of(counts: Iterable[int], first: int = 0) -> list[BlockRun]:
    """Returns consecutive runs with these counts of blocks."""
    runs = []
    for count in counts:
        runs.append(BlockRun(first, count))
        first += count
    return runs


class Pair(Generic[S, T]):
    """Joins a prefill and a decode node. `source_ids` and `sink_ids` are their blocks by logical
    block."""

    def __init__(self, source: KitNode[S], sink: KitNode[T], seed: int = 0) -> None:
        self.source = source
        self.sink = sink
        generator = torch.Generator().manual_seed(seed)
        geometry = source.geometry
        self.whole = torch.randn(geometry.shape(geometry.rect), generator=generator)
        for end in source.ends:
            end.cache.tensor.copy_(end.cache.part_of(self.whole))
        for taker in sink.ends:
            taker.cache.tensor.fill_(FREE)

    # ---- the core's calls to the ranks ----

    def accept(
        self,
        transfer_id: bytes,
        sink_ids: Sequence[int],
        *,
        epoch: int = 1,
        first: int = 0,
        digests: bool = False,
    ) -> None:
        for end in self.sink.ends:
            end.accept(SinkTransfer(transfer_id, epoch, first, tuple(sink_ids), digests))

    def submit(self, transfer_id: bytes, *, epoch: int = 1) -> None:
        endpoints = [end.endpoint() for end in self.sink.ends]
        pieces = plan(_shares(self.source.ends), _shares(self.sink.ends))
        for number, end in enumerate(self.source.ends):
            mine = tuple(
                (piece, endpoints[piece.sink]) for piece in pieces if piece.source == number
            )
            end.submit(SourceTransfer(transfer_id, epoch, mine))

    def ready(
        self,
        transfer_id: bytes,
        run: BlockRun,
        block_ids: Sequence[int],
        last: bool = False,
        hashed: bool = False,
    ) -> None:
        for end in self.source.ends:
            end.ready(Ready(transfer_id, run, tuple(block_ids), last, hashed))

    def announce(
        self,
        transfer_id: bytes,
        source_ids: Sequence[int],
        counts: Sequence[int] | None = None,
        *,
        first: int = 0,
        last: bool = True,
        hashed: bool = False,
    ) -> None:
        """Announces all blocks in runs of `counts` (default: one run); `source_ids[0]` is block
        `first`."""
        runs = runs_of(counts or (len(source_ids),), first)
        for run in runs:
            start = run.first - first
            ids = source_ids[start : start + run.count]
            self.ready(transfer_id, run, ids, last and run is runs[-1], hashed)

    def send(
        self,
        transfer_id: bytes,
        source_ids: Sequence[int],
        sink_ids: Sequence[int],
        counts: Sequence[int] | None = None,
        *,
        epoch: int = 1,
        first: int = 0,
        hashed: bool = False,
        digests: bool = False,
    ) -> None:
        """Runs a whole transfer, from accept to the last event. `hashed`: its runs are announced by
        `ready_hashed`; `digests`: the sink is told that there will be some."""
        self.accept(transfer_id, sink_ids, epoch=epoch, first=first, digests=digests)
        self.submit(transfer_id, epoch=epoch)
        self.announce(transfer_id, source_ids, counts, first=first, hashed=hashed)
        self.wait_landed(transfer_id, epoch=epoch)
        self.wait_sent(transfer_id, epoch=epoch)

    # ---- results ----

    def wait_landed(
        self, transfer_id: bytes, within: float = ARRIVAL_S, epoch: int = 1
    ) -> list[Landed]:
        return [end.events.wait(Landed, transfer_id, within, epoch) for end in self.sink.ends]

    def wait_sent(
        self, transfer_id: bytes, within: float = ARRIVAL_S, epoch: int = 1
    ) -> list[Sent]:
        return [end.events.wait(Sent, transfer_id, within, epoch) for end in self.source.ends]

    def arrived(self, source_ids: Sequence[int], sink_ids: Sequence[int]) -> bool:
        """Returns whether the sinks' blocks hold the sources' original data."""
        expected = self.whole[:, :, list(source_ids)]
        return all(
            torch.equal(end.cache.blocks(sink_ids), end.cache.part_of(expected))
            for end in self.sink.ends
        )

    def others_untouched(self, sink_ids: Sequence[int]) -> bool:
        return all(end.cache.others_untouched(sink_ids) for end in self.sink.ends)

    def nbytes(self, count: int) -> int:
        """Returns the size of `count` blocks in the first sink rank's rectangle."""
        cache = self.sink.ends[0].cache
        return piece_nbytes(cache.tensor, cache.rect, count)


def scattered(count: int, num_blocks: int, seed: int = 0) -> tuple[int, ...]:
    """Returns blocks in no order, as a pool in use hands them out."""
    return tuple(random.Random(seed).sample(range(num_blocks), count))


def settle() -> None:
    """Waits long enough for a forbidden event to show."""
    for _ in range(LOOKS):
        time.sleep(SETTLE_S / LOOKS)


def eventually(condition: Callable[[], bool], within: float = ARRIVAL_S) -> bool:
    end = time.monotonic() + within
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return value


def _shares(ends: Sequence[End]) -> list[Share]:
    return [Share(number, end.cache.rect) for number, end in enumerate(ends)]
