"""The books of lent blocks, in any order of messages and deaths: whatever somebody reads is held,
and in the end everything is free.

Real are both nodes' block pools, the prefill node's `Loans` and its ranks' `Ledger`s, the decode
node's `Guests`. What travels between them is a queue each, from which a dice takes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from pdserve.common.engine.block_pool import BlockPool
from pdserve.kv_transfer.connector import Event, Returned
from pdserve.kv_transfer.connectors.shared.ledger import (
    Ledger,
)
from pdserve.kv_transfer.control.loans import Guests, Loan, Loans, Stay

BLOCKS = 12  # of each node
OWN = BLOCKS  # the decode node's first guest


@dataclass(eq=False)
class Transfer:
    """One sequence on both nodes."""

    loan: Loan
    source: list[int]  # its blocks on the prefill node, `source[-1]` is never lent
    sink: list[int]
    lend: bool
    offers: dict[int, bool] = field(default_factory=dict)  # rank → whether it was lent
    taken: set[int] = field(default_factory=set)  # ranks that read it in place
    quiet: set[int] = field(default_factory=set)  # ranks of the prefill node
    stay: Stay | None = None
    state: str = "under way"  # active, failed, over
    settled: bool = False

    @property
    def lent(self) -> list[int]:
        return self.source[:-1]


class World:
    def __init__(self, seed: int, num_ranks: int) -> None:
        self.dice = random.Random(seed)
        self.ranks = range(num_ranks)
        self.source, self.sink = BlockPool(BLOCKS, 1), BlockPool(BLOCKS, 1)
        self.loans, self.guests = Loans(BLOCKS - 3), Guests(OWN, OWN + 2 * BLOCKS)
        self.events: deque[tuple[int, Event]] = deque()
        self.ledgers = [Ledger(partial(self._emit, rank)) for rank in self.ranks]
        self.lines = [object() for _ in self.ranks]
        self.returns: list[deque[tuple[Loan, list[int]]]] = [deque() for _ in self.ranks]
        self.transfers: list[Transfer] = []
        self.names = 0  # how often the connection was made anew
        self.sink_lives = True

    def _emit(self, rank: int, event: Event) -> None:
        self.events.append((rank, event))

    # ---- what may happen -------------------------------------------------------------------------

    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [self.begin]
        moves += [self.report] if self.events else []
        for rank in self.ranks:
            moves += [partial(self.carry, rank)] * bool(self.returns[rank])
        for each in self.transfers:
            moves += self._moves_of(each)
        return moves

    def _moves_of(self, each: Transfer) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = []
        under_way = each.state == "under way" and self.sink_lives
        unheard = [
            rank for rank in self.ranks if rank not in each.offers | dict.fromkeys(each.quiet)
        ]
        moves += [partial(self.offer, each, rank) for rank in unheard if under_way] * 4
        if under_way:
            moves.append(partial(self.fail, each))
            if len(each.offers) == len(self.ranks):
                moves += [partial(self.activate, each)] * 4
        if each.state == "active" and self.sink_lives:
            moves.append(partial(self.finish, each))
        # The prefill node may give up whenever it likes.
        loud = [rank for rank in self.ranks if rank not in each.quiet]
        moves += [partial(self.quiesce, each, rank) for rank in loud]
        if not loud and not each.settled:
            moves.append(partial(self.settle, each))
        return moves

    def begin(self) -> None:
        size = self.dice.randint(1, 4)
        if min(self.source.num_free, self.sink.num_free) < size or not self.sink_lives:
            return
        hashes = [bytes([number]) for number in range(self.dice.randint(0, size - 1))]
        cached = self.source.match(hashes)  # a prefix that sequences have in common
        blocks = cached + self.source.allocate(size - len(cached))
        for block, name in zip(blocks, hashes, strict=False):
            self.source.register(block, name)
        transfer_id = len(self.transfers).to_bytes(16, "big")
        lend = self.loans.pledge((transfer_id, 1), size, self.source.free)
        made = Transfer((transfer_id, 1), blocks, self.sink.allocate(size), lend)
        if lend:
            for ledger in self.ledgers:
                ledger.open(made.loan)
        self.transfers.append(made)

    def offer(self, each: Transfer, rank: int) -> None:
        """Which the sink may copy all the same, or hear of too late."""
        lent = self.ledgers[rank].lend(each.loan, self.lines[rank], each.source)
        each.offers[rank] = lent
        if lent:
            each.taken.add(rank)
            self.ledgers[rank].take_back(each.loan, self.lines[rank], each.source[-1:])

    def fail(self, each: Transfer) -> None:
        each.state = "failed"
        for rank in each.taken:
            self._give_back(rank, {each.loan: each.lent})
        each.taken = set()
        self.sink.free(each.sink)

    def activate(self, each: Transfer) -> None:
        if each.quiet and len(each.taken) < len(self.ranks):
            return self.fail(each)  # the source no longer held the blocks: nothing is confirmed
        each.state = "active"
        if not each.taken or not each.lent:
            return None
        if len(each.taken) < len(self.ranks):
            return self._copy(each)
        names = tuple(bytes([self.names, rank]) for rank in self.ranks)
        lender = self.guests.place(names, BLOCKS)
        if lender is None:
            return self._copy(each)
        each.stay = Stay(lender, dict(enumerate(each.lent)))
        twice = self.guests.hold(lender, each.loan, each.lent)
        self.sink.host(each.stay.guests.values(), self._gone)
        self.sink.free(each.sink[place] for place in each.stay.guests)
        self.guests.unpin(lender)
        for rank in self.ranks:
            self._give_back(rank, {each.loan: twice})
        return None

    def _copy(self, each: Transfer) -> None:
        for rank in each.taken:
            self._give_back(rank, {each.loan: each.lent})

    def finish(self, each: Transfer) -> None:
        each.state = "over"
        guests = {} if each.stay is None else each.stay.guests
        self.sink.free(guests.get(place, block) for place, block in enumerate(each.sink))

    def _gone(self, guests: list[int]) -> None:
        for _, loans in self.guests.gone(guests):
            for rank in self.ranks:
                self._give_back(rank, loans)

    def _give_back(self, rank: int, loans: dict[Loan, list[int]]) -> None:
        self.returns[rank] += [(loan, blocks) for loan, blocks in loans.items() if blocks]

    def carry(self, rank: int) -> None:
        loan, blocks = self.returns[rank].popleft()
        self.ledgers[rank].take_back(loan, self.lines[rank], blocks)

    def report(self) -> None:
        _, event = self.events.popleft()
        assert isinstance(event, Returned)
        assert self.loans.returned((event.transfer_id, event.epoch), event.block_ids)

    def quiesce(self, each: Transfer, rank: int) -> None:
        """Its answer is read before any later one, but after what was reported meanwhile."""
        self.ledgers[rank].close(each.loan[0])
        each.quiet.add(rank)
        self.loans.named(each.loan, self.ledgers[rank].on_loan(each.loan[0]))

    def settle(self, each: Transfer) -> None:
        each.settled = True
        held = self.loans.settle(each.loan)
        self.source.free(block for block in each.source if block not in held)

    def reconnect(self) -> None:
        """The connection is made anew: another name for the same memory."""
        self.names += 1

    def lose_sink(self) -> None:
        self.sink_lives = False
        for rank in self.ranks:
            self.returns[rank].clear()
            self.ledgers[rank].lost(self.lines[rank])

    # ---- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        for each in self.transfers if self.sink_lives else ():
            copied = each.state == "active" and each.stay is None
            if each.state in ("under way", "active") and each.taken and not copied:
                assert all(self.source._refs[block] > 0 for block in each.lent), each

    def run_to_the_end(self) -> None:
        while any(each.state in ("under way", "active") for each in self.transfers):
            if not self.sink_lives:
                break
            for each in self.transfers:
                move = {"under way": self.fail, "active": self.finish}.get(each.state)
                if move is not None:
                    move(each)
        for each in self.transfers:
            for rank in self.ranks:
                if rank not in each.quiet:
                    self.quiesce(each, rank)
            if not each.settled:
                self.settle(each)
        for rank in self.ranks:
            while self.returns[rank]:
                self.carry(rank)
        while self.events:
            self.report()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dies", [False, True])
def test_every_block_is_held_while_it_is_read(num_ranks: int, dies: bool) -> None:
    lent = 0
    for seed in range(400):
        world = World(seed, num_ranks)
        death = world.dice.randint(10, 60) if dies else -1
        for step in range(80):
            if step == death:
                world.lose_sink()
            elif world.dice.random() < 0.03:
                world.reconnect()
            else:
                world.dice.choice(world.moves())()
            world.check()
        lent += sum(each.stay is not None for each in world.transfers)
        world.run_to_the_end()
        assert world.source.num_free == BLOCKS, seed
        assert world.loans.num_blocks == 0
        assert dies or (world.sink.num_free == BLOCKS and len(world.guests) == 0)
        assert not any(ledger._loans or ledger._named for ledger in world.ledgers)
    assert lent > 200  # or this proves nothing


def test_a_transfer_that_comes_back_does_not_inherit_loans() -> None:
    """The router may give it to the same prefill node again."""
    loans, first, second = Loans(8), list[int](), list[int]()
    transfer = bytes(16)
    assert loans.pledge((transfer, 1), 3, first.extend)
    loans.named((transfer, 1), [4, 5])
    assert loans.settle((transfer, 1)) == {4, 5}
    assert loans.pledge((transfer, 2), 3, second.extend)
    loans.named((transfer, 2), [6])
    assert loans.returned((transfer, 1), [4, 5])
    assert loans.settle((transfer, 2)) == {6}
    assert loans.returned((transfer, 2), [6])
    assert (sorted(first), second) == ([4, 5], [6])
    assert not loans.returned((transfer, 2), [6]) and loans.num_blocks == 0


def test_epochs_of_a_hand_off_share_its_blocks() -> None:
    loans, back = Loans(8), list[int]()
    transfer = bytes(16)
    assert loans.pledge((transfer, 1), 3, back.extend)
    loans.named((transfer, 1), [4, 5])
    loans.extend((transfer, 1), 2)
    assert loans.num_blocks == 3
    assert loans.returned((transfer, 1), [4])
    loans.named((transfer, 2), [4, 5])
    assert loans.settle((transfer, 2)) == {4, 5}
    assert loans.returned((transfer, 2), [4, 5])
    assert back == [4]  # the other one is still read for the first epoch
    assert loans.returned((transfer, 1), [5])
    assert back == [4, 5] and loans.num_blocks == 0


def test_no_more_is_lent_than_the_limit() -> None:
    loans = Loans(4)
    assert not loans.pledge((b"a", 1), 5, print)
    assert loans.pledge((b"a", 1), 3, print)
    assert not loans.pledge((b"b", 1), 2, print)
    assert not loans.pledge((b"b", 1), 1, None)
    assert not loans.settle((b"a", 1))
    assert loans.pledge((b"b", 1), 4, print)
