"""Both control halves' books of blocks that are read by one node and belong to another.

prefill node   Loans    which blocks stay held though their sequence is over, until returned
decode node    Guests   where lenders' blocks lie among its block ids, and whose they are

lend ═▶ landed, verified ─▶ Guests.hold ─▶ … the block pool's last reference ─▶ GiveBack ═▶
═▶ Returned ─▶ Loans.returned: the block is free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.kv_transfer.connector import Borrowed

Loan = tuple[bytes, int]  # transfer id, epoch


@dataclass(slots=True)
class _Lent:
    """Of one hand-off, whose epochs are its `loans`."""

    given_back: Callable[[list[int]], None]
    pledged: int  # blocks, at most
    loans: list[Loan]
    on_loan: Counter[int] = field(default_factory=Counter)  # block → how often, over all ranks
    settled: bool = False


class Loans:
    """What a prefill node has lent, at most `limit` blocks. A hand-off lends a block once in each
    of its epochs, to as many ranks as read it. The same transfer may come back in another hand-off
    while what the first one lent is not returned."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lent: dict[Loan, _Lent] = {}

    @property
    def num_blocks(self) -> int:
        """That are lent, or may be by hand-offs under way."""
        return sum(each.pledged for loan, each in self._lent.items() if loan == each.loans[0])

    def pledge(
        self, loan: Loan, num_blocks: int, given_back: Callable[[list[int]], None] | None
    ) -> bool:
        """Whether the hand-off may lend its blocks. `given_back` frees them."""
        if given_back is None or self.num_blocks + num_blocks > self.limit:
            return False
        self._lent[loan] = _Lent(given_back, num_blocks, [loan])
        return True

    def extend(self, loan: Loan, epoch: int) -> None:
        """The hand-off goes on in another epoch."""
        if (lent := self._lent.get(loan)) is not None:
            lent.loans.append((loan[0], epoch))
            self._lent[lent.loans[-1]] = lent

    def named(self, loan: Loan, blocks: Iterable[int]) -> None:
        """A rank says which of them are read by others, now that it is quiet."""
        if (lent := self._lent.get(loan)) is not None:
            lent.on_loan.update(blocks)

    def settle(self, loan: Loan) -> frozenset[int]:
        """The hand-off is over and all ranks are quiet. The blocks that stay held, one reference on
        each, until `given_back` is told of them."""
        lent = self._lent.get(loan)
        if lent is None:
            return frozenset()
        lent.settled = True
        self._shrink(lent)
        return frozenset(lent.on_loan)

    def returned(self, loan: Loan, blocks: Sequence[int]) -> bool:
        """A rank says that these were given back: `named` has told of them, or is about to.
        Whether the loan is known."""
        lent = self._lent.get(loan)
        if lent is None:
            return False
        lent.on_loan.subtract(blocks)
        if lent.settled:
            back = [block for block in set(blocks) if lent.on_loan[block] == 0]
            self._shrink(lent)
            lent.given_back(back)
        return True

    def _shrink(self, lent: _Lent) -> None:
        """Forgets what is not on loan."""
        lent.on_loan = +lent.on_loan
        lent.pledged = len(lent.on_loan)
        if not lent.on_loan:
            for loan in lent.loans:
                del self._lent[loan]


@dataclass(slots=True, eq=False)
class Lender:
    """A prefill replica's memory as the ranks of this one see it: its blocks are the guests
    `first … first+num_blocks-1`."""

    names: tuple[bytes, ...]  # by this replica's ranks
    first: int
    num_blocks: int
    num_pinned: int = 0  # transfers that are about to hold some
    held: dict[int, Loan] = field(default_factory=dict)  # guest → for which loan it is here

    @property
    def idle(self) -> bool:
        return not self.num_pinned and not self.held


class Guests:
    """`first … end-1` are the ids there are for guests."""

    def __init__(self, first: int, end: int) -> None:
        self._first = first
        self._end = end
        self._lenders: list[Lender] = []

    def __len__(self) -> int:
        return sum(len(each.held) for each in self._lenders)

    def place(self, names: tuple[bytes, ...], num_blocks: int) -> Lender | None:
        """Where a lender is, pinned there until `unpin`; None: there is no room. Lenders of which
        nothing is held give way."""
        lender = next((each for each in self._lenders if each.names == names), None)
        if lender is None:
            first = self._gap(num_blocks)
            if first is None:
                return None
            lender = Lender(names, first, num_blocks)
            self._lenders = [each for each in self._lenders if not _overlap(each, lender)]
            self._lenders.append(lender)
        lender.num_pinned += 1
        return lender

    def _gap(self, num_blocks: int) -> int | None:
        """The first place for so many, where idle lenders must give way only if none is free."""
        for staying in (self._lenders, [each for each in self._lenders if not each.idle]):
            start = self._first
            for each in sorted(staying, key=lambda each: each.first):
                if each.first - start >= num_blocks:
                    break
                start = max(start, each.first + each.num_blocks)
            if start + num_blocks <= self._end:
                return start
        return None

    def stay(self, borrowed: Sequence[Borrowed | None], hosted: bool) -> Stay | None:
        """Where one epoch's ranks read what they have `borrowed`, in their order; its lender is
        pinned until `unpin`. None: they have copied all. Without `hosted` there is no room."""
        known = [each for each in borrowed if each is not None]
        if not known:
            return None
        alike = {(each.num_blocks, each.places, each.blocks) for each in known}
        blocks = dict(zip(known[0].places, known[0].blocks, strict=True))
        if not hosted or len(known) < len(borrowed) or len(alike) > 1:
            return Stay(None, blocks)
        names = tuple(each.lender for each in known)
        return Stay(self.place(names, known[0].num_blocks), blocks)

    def unpin(self, lender: Lender) -> None:
        lender.num_pinned -= 1

    def hold(self, lender: Lender, loan: Loan, blocks: Iterable[int]) -> list[int]:
        """The lender's `blocks` are in use here from now on, for `loan`. Returns those that are
        here already, for another: this loan of them can go back at once."""
        twice = []
        for block in blocks:
            if lender.held.setdefault(lender.first + block, loan) != loan:
                twice.append(block)
        return twice

    def gone(self, guests: Iterable[int]) -> list[tuple[Lender, dict[Loan, list[int]]]]:
        """Nobody uses these any more: what to give back to whom, in the lenders' own numbers."""
        back: dict[int, tuple[Lender, dict[Loan, list[int]]]] = {}
        for guest in guests:
            lender = next(each for each in self._lenders if guest in each.held)
            _, loans = back.setdefault(lender.first, (lender, {}))
            loans.setdefault(lender.held.pop(guest), []).append(guest - lender.first)
        return list(back.values())


def _overlap(one: Lender, other: Lender) -> bool:
    return one.first < other.first + other.num_blocks and other.first < one.first + one.num_blocks


@dataclass(slots=True)
class Stay:
    """What one epoch of a transfer has borrowed, alike on every rank."""

    lender: Lender | None  # None: there is no room, and all of it is copied
    blocks: Mapping[int, int]  # logical block → the lender's

    @property
    def guests(self) -> dict[int, int]:
        """By logical block."""
        if self.lender is None:
            return {}
        return {place: self.lender.first + block for place, block in self.blocks.items()}
