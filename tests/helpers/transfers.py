"""Transfers between two nodes without engines, on a clock that a test can advance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch

from kv_fakes import Pair, make_pair
from pdserve.kv_transfer.commands import Verify, decode_command
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.control.source import SendTransfer
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.router.cluster.health import AwakeClock

FAKE = "kv_fakes:FakeConnector"
SOURCE_IDS, SINK_IDS = (9, 3, 4, 5, 12), (2, 3, 11, 0, 7)
TOKENS = 18  # five blocks of four


@asynccontextmanager
async def pair(*args: Any, **options: Any) -> AsyncIterator[Pair]:
    torch.set_num_threads(1)
    with awake_time():
        made = make_pair(*args, **options)
        try:
            yield made
        finally:
            await made.close()


class SkippingClock:
    """The clock of leases: it does not count pauses of this process, and a test can advance
    it."""

    def __init__(self, real: Callable[[], float]) -> None:
        self.awake = AwakeClock(0.1, real)
        self.skipped = 0.0

    def __call__(self) -> float:
        return self.awake() + self.skipped


@contextmanager
def awake_time() -> Iterator[None]:
    async def look() -> None:
        while True:
            await asyncio.sleep(0.02)

    loop = asyncio.get_running_loop()
    loop.time = SkippingClock(loop.time)  # type: ignore[method-assign]
    looking = loop.create_task(look())
    try:
        yield
    finally:
        looking.cancel()


async def go_on(seconds: float, steps: int = 20) -> None:
    """Advances the clock by `seconds`, in steps between which waiting tasks run."""
    clock: Any = asyncio.get_running_loop().time
    for _ in range(steps):
        clock.skipped += seconds / steps
        for _ in range(5):
            await asyncio.sleep(0)


async def start(made: Pair, first_block: int = 0) -> tuple[Ticket, SendTransfer]:
    ticket = await made.reserve(TOKENS, first_block, SINK_IDS[first_block:], made.note_sink_free)
    handoff = made.begin(ticket)
    return ticket, handoff


def announce(handoff: SendTransfer) -> None:
    handoff.ready(BlockRun(0, 2), SOURCE_IDS[:2])
    handoff.ready(BlockRun(2, 2), SOURCE_IDS[2:4])
    handoff.ready(BlockRun(4, 1), SOURCE_IDS[4:], last=True)


def assert_landed(made: Pair, full: torch.Tensor, first_block: int = 0) -> None:
    sources, sinks = list(SOURCE_IDS[first_block:]), list(SINK_IDS[first_block:])
    others = sorted(set(range(made.sink_node.geometry.num_blocks)) - set(sinks))
    for cache, rect in zip(made.sink_node.caches, made.sink_node.rects, strict=True):
        heads = full[:, :, :, rect.head_start : rect.head_end]
        assert torch.equal(cache[:, :, sinks], heads[:, :, sources])
        assert not cache[:, :, others].any()  # nothing outside of the blocks was written


class Spoiler:
    """Flips a bit of the sink's blocks before ranks verify them."""

    def __init__(self, made: Pair, times: int, block: int = SINK_IDS[2]) -> None:
        self.spoiled = 0
        self._block = block
        self._call = made.sink.ranks.call
        self._times = times
        self._cache = made.sink_node.caches[0]
        made.sink.ranks.call = self.call  # type: ignore[method-assign]

    async def call(self, rank: int, message: bytes) -> bytes:
        if (
            rank == 0
            and self.spoiled < self._times
            and isinstance(decode_command(message)[1], Verify)
        ):
            self.spoiled += 1
            self._cache[1, 0, self._block].view(torch.uint8).reshape(-1)[5] ^= 4
        return await self._call(rank, message)
