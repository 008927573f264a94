"""The hand-off of a model whose layers keep different parts of the KV, over real connectors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from connected_ranks import ConnectedRanks, make_sink, make_source
from kv_fakes import Geometry
from pdserve.common.core.errors import TransferError
from pdserve.common.worker.kv_cache import KVCache
from pdserve.kv_transfer.commands import Verify, decode_command, encode_command
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.control.recv_transfer import GroupBlocks
from pdserve.kv_transfer.control.source import SendTransfer
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.layout import Rect
from transfers import awake_time

# A group with all tokens, one of a window with other head sizes, and one of states, with one slot a
# block: 3, 2 and 4 layers, 2 heads.
GEOMETRIES = (
    Geometry(layers=3),
    Geometry(layers=2, head_dim=6, num_blocks=9),
    Geometry(layers=4, block_size=1, head_dim=50, num_blocks=5),
)
WHOLE = [[Rect(0, 3, 0, 2), Rect(0, 2, 0, 2), Rect(0, 4, 0, 2)]]
STAGES = [
    [Rect(0, 2, 0, 2), Rect(0, 0, 0, 2), Rect(0, 1, 0, 2)],
    [Rect(2, 3, 0, 2), Rect(0, 2, 0, 2), Rect(1, 4, 0, 2)],
]
HEADS = [[Rect(0, each.layers, head, head + 1) for each in GEOMETRIES] for head in (0, 1)]
LAYOUTS = [(WHOLE, WHOLE), (STAGES, HEADS), (HEADS, STAGES), (HEADS, WHOLE)]

TOKENS = 18  # five blocks of four
SOURCE_IDS = (
    (9, 3, 4, 5, 12),
    (-1, -1, 8, 1, 0),  # -1: before the window
    (-1, -1, -1, 4, 2),  # no state
)
SINK_IDS = (GroupBlocks(1, (3, 11, 0, 7)), GroupBlocks(3, (2, 6)), GroupBlocks(3, (1, 3)))


def node(connector: str, ranks: Sequence[Sequence[Rect]], source: bool) -> ConnectedRanks:
    """Returns a node. `ranks`: the rectangle of each group in each rank."""
    caches = [
        KVCache.allocate(
            [each.cache_shape(rect) for each, rect in zip(GEOMETRIES, rects, strict=True)],
            torch.device("cpu"),
        )
        for rects in ranks
    ]
    return ConnectedRanks(connector, caches, source)


class Handover:
    """A source and a sink over real connectors; `models[g]` is the whole cache of the source."""

    def __init__(self, connector: str, sources: Any, sinks: Any) -> None:
        self.freed = 0
        self.rects = sinks
        self.source_node = node(connector, sources, source=True)
        self.sink_node = node(connector, sinks, source=False)
        self.sink = make_sink(self.sink_node, 4)
        self.source = make_source(self.source_node, self.sink, 4)
        generator = torch.Generator().manual_seed(1)
        self.models = []
        for group, geometry in enumerate(GEOMETRIES):
            whole = Rect(0, geometry.layers, 0, geometry.heads)
            full = torch.randn(geometry.shape(whole), generator=generator)
            self.models.append(full)
            for number, rects in enumerate(sources):
                self.source_node.caches[number].tensors[group].copy_(part(full, rects[group]))

    async def begin(self) -> tuple[Ticket, SendTransfer, asyncio.Future[Any]]:
        ticket, arrival = await self.sink.reserve(TOKENS, SINK_IDS, self._free)
        return ticket, self.source.begin(ticket), arrival

    def _free(self) -> None:
        self.freed += 1

    def assert_landed(self) -> None:
        for rects, caches in zip(self.rects, self.sink_node.caches, strict=True):
            for group, cache in enumerate(caches.tensors):
                wanted = SINK_IDS[group]
                expected = torch.zeros_like(cache)
                sent = list(SOURCE_IDS[group][wanted.first :])
                expected[:, :, list(wanted.ids)] = part(self.models[group], rects[group])[
                    :, :, sent
                ]
                assert torch.equal(cache, expected)


def part(full: torch.Tensor, rect: Rect) -> torch.Tensor:
    return full[rect.layer_start : rect.layer_end, :, :, rect.head_start : rect.head_end]


def announce(transfer: SendTransfer, firsts: Sequence[int] = (0, 2, 0)) -> None:
    """Does as a prefill node does after chunks of 2 and 3 blocks."""
    for start, end in ((0, 2), (2, 5)):
        for group, first in enumerate(firsts):
            begin = max(start, first)
            ids = SOURCE_IDS[group][begin:end]
            transfer.ready(BlockRun(begin, len(ids)), ids, last=end == 5, group=group)


@asynccontextmanager
async def handover(connector: str, sources: Any = WHOLE, sinks: Any = WHOLE) -> AsyncIterator[Any]:
    with awake_time():
        made = Handover(connector, sources, sinks)
        try:
            yield made
        finally:
            await made.source.close()
            await made.sink.close()
            made.source_node.close()
            made.sink_node.close()


@pytest.mark.parametrize("connector", ["tcp", "shm"])
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
async def test_each_group_lands_where_it_belongs(connector: str, layout: int) -> None:
    """Nothing before the window is sent, and nothing beside the blocks is written."""
    async with handover(connector, *LAYOUTS[layout]) as made:
        _, transfer, arrival = await made.begin()
        announce(transfer)
        sent = await transfer.commit(7)
        landed = await arrival
        block = [each.block_size * each.head_dim * 4 * 2 for each in GEOMETRIES]
        blocks = 4 * 3 * block[0] + 2 * 2 * block[1] + 2 * 4 * block[2]
        assert landed.nbytes == sent.nbytes == 2 * blocks
        assert landed.first_token == 7 and not made.freed
        made.assert_landed()


async def test_a_damaged_block_of_the_window_is_sent_again() -> None:
    async with handover("reread:RereadTCP", *LAYOUTS[1]) as made:
        call, spoilt = made.sink.ranks.call, []

        async def spoil(rank: int, message: bytes) -> bytes:
            group, command = decode_command(message)
            if isinstance(command, Verify) and group == 1 and not spoilt:
                spoilt.append(rank)
                made.sink_node.caches[rank].tensors[1][0, 0, 2].view(torch.uint8)[0, 0, 0] ^= 1
            return await call(rank, message)

        made.sink.ranks.call = spoil
        ticket, transfer, arrival = await made.begin()
        announce(transfer)
        await asyncio.gather(transfer.commit(7), arrival)
        assert spoilt and made.source.counts["repulled"] == 1
        assert transfer.ticket.epoch == ticket.epoch + 1
        made.assert_landed()


async def test_a_block_that_left_its_window_is_never_sent() -> None:
    """The sink asks for one that the source has freed: a defect, which must not become KV."""
    async with handover("tcp") as made:
        early = (SINK_IDS[0], GroupBlocks(1, (2, 6, 4, 5)), SINK_IDS[2])
        ticket, arrival = await made.sink.reserve(TOKENS, early, made._free)
        transfer = made.source.begin(ticket)
        announce(transfer, firsts=(0, 0, 0))
        with pytest.raises(TransferError, match="before its window"):
            await transfer.outcome
        await made.sink.cancel(ticket.transfer_id)
        with pytest.raises(TransferError):
            await arrival
        assert made.freed == 1


async def test_tickets_with_other_groups_are_refused() -> None:
    async with handover("tcp") as made:
        ticket, arrival = await made.sink.reserve(TOKENS, SINK_IDS, made._free)
        only = tuple(each for each in ticket.endpoints if each.group == 0)
        for wrong in (
            replace(ticket, first_blocks=(1,), endpoints=only),
            replace(ticket, first_blocks=(1, 3, 3, 0)),
        ):
            with pytest.raises(TransferError, match="KV groups") as error:
                made.source.begin(wrong)
            assert error.value.code == "LAYOUT_MISMATCH"
        await made.sink.cancel(ticket.transfer_id)
        with pytest.raises(TransferError):
            await arrival


async def test_a_rank_refuses_commands_for_a_group_it_has_not() -> None:
    async with handover("tcp", STAGES, WHOLE) as made:
        assert list(made.source_node.ranks[0].groups) == [0, 2]
        message = encode_command(1, Verify(bytes(16), 1, ()))
        assert b"no layer of KV group 1" in made.source_node.ranks[0].handle(message)
