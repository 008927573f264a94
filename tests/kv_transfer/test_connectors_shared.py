"""`--kv-connector shared`: blocks stay in the prefill node's memory and are read there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kv_fakes import Geometry, Pair, make_pair
from pdserve.common.core.errors import TransferError
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.connectors.base.sockets import SCRATCH_NBYTES
from pdserve.kv_transfer.connectors.shared.connector import BorrowingMover, SharedConnector
from pdserve.kv_transfer.connectors.shared.ledger import MAX_IDS, decode_return, encode_return
from pdserve.kv_transfer.control.loans import Guests
from pdserve.kv_transfer.control.protocol import SinkState
from pdserve.kv_transfer.control.source import Handoff
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.frame import NOWHERE, Frame, Kind
from pdserve.kv_transfer.layout import CacheView

SOURCE_IDS, SINK_IDS = (9, 3, 4, 5, 12), (2, 3, 11, 0, 7)
TOKENS = 18  # five blocks of four
WIDE = Geometry(num_blocks=32)  # whole pages, with one KV head a rank as well


@asynccontextmanager
async def pair(*args: Any, **options: Any) -> AsyncIterator[Pair]:
    torch.set_num_threads(1)
    made = make_pair(*args, geometry=options.pop("geometry", WIDE), **options)
    try:
        yield made
    finally:
        await made.close()


class Hosted:
    """What the decode session does with a landed transfer."""

    def __init__(self, made: Pair) -> None:
        self.made = made
        self.guests: dict[int, int] = {}  # logical block → guest

    async def reserve(self, first_block: int = 0) -> tuple[Ticket, Handoff]:
        ids = SINK_IDS[first_block:]
        ticket = await self.made.sink.reserve(
            TOKENS, first_block, ids, self.made.note_sink_free, self.guests.update
        )
        return ticket, self.made.begin(ticket)

    def give_back(self) -> None:
        self.made.sink.give_back(list(self.guests.values()))
        self.guests = {}


def announce(handoff: Handoff) -> None:
    handoff.ready(BlockRun(0, 2), SOURCE_IDS[:2])
    handoff.ready(BlockRun(2, 2), SOURCE_IDS[2:4])
    handoff.ready(BlockRun(4, 1), SOURCE_IDS[4:], last=True)


async def hand_off(made: Pair, first_block: int = 0) -> tuple[Hosted, Handoff]:
    hosted = Hosted(made)
    ticket, handoff = await hosted.reserve(first_block)
    announce(handoff)
    arrival, result = await asyncio.gather(
        made.sink.wait(ticket.transfer_id), handoff.commit("token")
    )
    assert arrival.nbytes == result.nbytes > 0
    return hosted, handoff


async def until(what: Any) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.01)


def assert_readable(made: Pair, hosted: Hosted, full: torch.Tensor, first_block: int = 0) -> None:
    """Every block of the transfer, wherever it lies, has what was sent."""
    area = made.sink_node.guests
    assert area is not None
    rect = made.sink_node.rects[-1]
    heads = full[:, :, :, rect.head_start : rect.head_end]
    for place in range(first_block, len(SOURCE_IDS)):
        block = hosted.guests.get(place, SINK_IDS[place])
        assert torch.equal(area.tensor[:, :, block], heads[:, :, SOURCE_IDS[place]])


@pytest.mark.parametrize("tp", [(1, 1), (2, 2), (4, 2), (2, 4)], ids=str)  # 4: heads twice
@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("first_block", [0, 3, 4])
async def test_blocks_are_read_where_they_are(
    tp: tuple[int, int], digests: bool, first_block: int
) -> None:
    async with pair("shared", *tp, digests=digests) as made:
        full = made.source_node.fill_random()
        hosted, handoff = await hand_off(made, first_block)
        lent = SOURCE_IDS[first_block:-1]
        assert handoff.lent == frozenset(lent)
        assert set(hosted.guests) == set(range(first_block, 4))
        assert_readable(made, hosted, full, first_block)
        for cache in made.sink_node.caches:  # nothing but the last block was copied
            assert not cache[:, :, SINK_IDS[:4]].any()
        assert not made.given_back
        hosted.give_back()
        await until(lambda: sorted(made.given_back) == sorted(lent))
        assert made.source.loans.num_blocks == len(made.sink.guests) == 0


async def test_one_hand_off_after_the_other() -> None:
    """Blocks lent again while they are lent, and after they came back."""
    async with pair("shared") as made:
        full = made.source_node.fill_random()
        first, one = await hand_off(made)
        second, other = await hand_off(made)
        assert first.guests == second.guests
        lent = len(one.lent) + len(other.lent)
        assert one.lent == frozenset(SOURCE_IDS[:-1]) and lent in (4, 8)
        # The second loan goes back at once: one is enough to read them.
        await until(lambda: len(made.given_back) == lent - 4)
        assert_readable(made, second, full)
        first.give_back()  # the block pool's word: the last of its references
        await until(lambda: len(made.given_back) == lent)
        third, _ = await hand_off(made)
        assert_readable(made, third, full)
        third.give_back()
        await until(lambda: len(made.given_back) == lent + 4)
        assert made.source.loans.num_blocks == 0


# ---- what goes wrong ----


async def test_a_hand_off_that_fails_returns_what_was_read() -> None:
    async with pair("shared") as made:
        made.source_node.fill_random()
        hosted = Hosted(made)
        ticket, handoff = await hosted.reserve()
        announce(handoff)
        reservation = made.sink._live[ticket.transfer_id]
        await until(lambda: reservation.machine.state is SinkState.LANDED)
        assert await made.sink.cancel(ticket.transfer_id)
        await handoff.abort("the client left")
        await until(lambda: made.source.loans.num_blocks == 0)
        assert not hosted.guests and len(made.sink.guests) == 0
        assert sorted(made.given_back) in ([], sorted(handoff.lent))
        await hand_off(made)


async def test_wrong_digests_are_sent_again_and_lent_again() -> None:
    """The first epoch's loans do not end the second one's."""
    async with pair("shared") as made:
        full = made.source_node.fill_random()
        hosted = Hosted(made)
        ticket, handoff = await hosted.reserve()
        announce(handoff)
        digests = handoff._announcer._digests
        await until(lambda: len(digests) == 3)
        digests[0] = replace(digests[0], digest=bytes(16))
        await asyncio.gather(made.sink.wait(ticket.transfer_id), handoff.commit("token"))
        assert made.source.counts["repulled"] == 1
        assert_readable(made, hosted, full)
        hosted.give_back()
        await until(lambda: made.source.loans.num_blocks == 0)
        assert sorted(set(made.given_back)) == sorted(SOURCE_IDS[:-1])


async def test_a_full_account_copies() -> None:
    async with pair("shared") as made:
        full = made.source_node.fill_random()
        made.source.loans.limit = 4  # blocks: one too few
        hosted, handoff = await hand_off(made)
        assert not hosted.guests and not handoff.lent
        assert_readable(made, hosted, full)


async def test_without_a_place_what_was_read_is_copied() -> None:
    async with pair("shared") as made:
        full = made.source_node.fill_random()
        made.sink.guests = Guests(WIDE.num_blocks, 2 * WIDE.num_blocks - 1)  # one id too few
        hosted, _ = await hand_off(made)
        assert not hosted.guests
        assert_readable(made, hosted, full)
        await until(lambda: made.source.loans.num_blocks == 0)


@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (1, 4)])
async def test_unequal_layouts_copy(tp: tuple[int, int]) -> None:
    async with pair("shared", *tp) as made:
        full = made.source_node.fill_random()
        hosted, handoff = await hand_off(made)
        assert not hosted.guests and not handoff.lent
        assert_readable(made, hosted, full)


async def test_a_sink_that_is_gone_has_returned_everything() -> None:
    async with pair("shared") as made:
        made.source_node.fill_random()
        _, handoff = await hand_off(made)
        assert handoff.lent and not made.given_back
        for rank in made.sink_node.ranks:
            rank.close(5.0)
        await until(lambda: sorted(made.given_back) == sorted(handoff.lent))


async def test_a_lender_that_is_gone_stays_readable() -> None:
    async with pair("shared") as made:
        full = made.source_node.fill_random()
        hosted, _ = await hand_off(made)
        for rank in made.source_node.ranks:
            rank.close(5.0)
        assert_readable(made, hosted, full)
        (region,) = made.sink_node.children()["shared"]._borrower._regions.values()
        hosted.give_back()
        await until(lambda: not made.sink_node.children()["shared"]._borrower._regions)
        area = made.sink_node.guests
        assert area is not None and not area.tensor[:, :, WIDE.num_blocks :].any()
        await until(lambda: not region._thread.is_alive())


@pytest.mark.parametrize("message", [b"x", b"y" * 21, encode_return((bytes(16), 1), [1 << 31])[0]])
async def test_nonsense_on_a_line_is_its_senders_loss(message: bytes) -> None:
    async with pair("shared") as made:
        made.source_node.fill_random()
        _, handoff = await hand_off(made)
        connector = made.sink_node.children()["shared"]
        assert isinstance(connector, SharedConnector)
        (region,) = connector._borrower._regions.values()
        region._returns.put(message)
        if len(message) == len(encode_return((bytes(16), 1), [0])[0]):
            await hand_off(made)  # what nobody lent cannot come back: ignored
        else:
            await until(lambda: sorted(made.given_back) == sorted(handoff.lent))


async def test_a_defect_where_blocks_are_hosted_ends_the_wait() -> None:
    def broken(guests: dict[int, int]) -> None:
        raise KeyError("a defect")

    async with pair("shared") as made:
        made.source_node.fill_random()
        hosted = (TOKENS, 0, SINK_IDS, made.note_sink_free, broken)
        ticket = await made.sink.reserve(*hosted)
        landing = made.sink.landing(ticket.transfer_id)
        handoff = made.begin(ticket)
        announce(handoff)
        commit = handoff.commit("token")
        async with asyncio.timeout(60):
            with pytest.raises(KeyError, match="a defect"):
                await landing
            with pytest.raises(TransferError, match="INTERNAL"):
                await commit
        assert made.sink_frees == 0  # the waiter has them, and frees them
        assert not await made.sink.cancel(ticket.transfer_id)
        (lender,) = made.sink.guests._lenders
        assert not lender.num_pinned
        (rank,) = made.sink_node.ranks
        await until(lambda: not rank._sinks)


async def test_what_nobody_wants_is_drained_in_bounded_memory() -> None:
    """A frame of a transfer that is over may name as many bytes as a cache has."""

    class Pipe:
        largest = said = 0

        def recv_tensor(self, tensor: torch.Tensor) -> None:
            self.largest = max(self.largest, len(tensor))
            self.said += len(tensor)

        def recv_bytes(self, nbytes: int) -> bytes:
            self.largest = max(self.largest, nbytes)
            return bytes(nbytes)

        def send_bytes(self, data: bytes) -> None:
            self.answer = Frame.decode(data)

    pipe, nbytes = Pipe(), 3 * SCRATCH_NBYTES + 7
    region: Any = SimpleNamespace(cache=None)
    mover = BorrowingMover(
        CacheView(torch.empty(0), NOWHERE), cast(Any, pipe), cast(Any, None), region, True
    )
    mover.drain(Frame(Kind.OFFER, count=5, nbytes=nbytes))
    assert (pipe.said, pipe.largest) == (nbytes, SCRATCH_NBYTES)
    assert (pipe.answer.kind, pipe.answer.count) == (Kind.TAKEN, 0)


def test_returns_are_cut_and_read_again() -> None:
    blocks = list(range(2 * MAX_IDS + 3))
    parts = [decode_return(each) for each in encode_return((bytes(range(16)), 7), blocks)]
    assert {loan for loan, _ in parts} == {(bytes(range(16)), 7)}
    assert [block for _, ids in parts for block in ids] == blocks
    assert encode_return((bytes(16), 1), []) == []
