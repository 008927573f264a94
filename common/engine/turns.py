"""Whose turn it is on a replica, between clients. Policy only: plain numbers and names.

Two rules, each of which a single client does not notice:

    seats   A sequence that is computed has a seat. There are a third more seats than a step
            computes, and a client that has some takes another only while it would have no more
            than three times as many as are left free (the dynamic threshold of Choudhury & Hahne,
            IEEE/ACM ToN 1998). A client that is alone fills every step; a newcomer finds a seat.
    turns   Those that wait, for a seat, for blocks or for their prompt to be computed, are served
            in rounds: a client's first one together with the others' first ones, then its second
            one (start-time fair queueing, Goyal, Vin & Cheng, SIGCOMM 1996).

Clients are names that the router gives; jobs of a router that gives none are of one client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from pdserve.common.engine.sequence import Sequence

MAX_OF_FREE = 3  # times as many seats as are free, that a client may have


class Seats:
    """How many sequences may be computed, as of now: `take` counts those that follow."""

    def __init__(self, max_num_seqs: int, taken: Iterable[Sequence]) -> None:
        self._taken = Counter(each.client for each in taken)
        self._free = max_num_seqs + -(-max_num_seqs // MAX_OF_FREE) - self._taken.total()

    def has_room(self, client: str) -> bool:
        """Whether the client may take one."""
        own, left = self._taken[client], self._free - 1
        return left >= 0 and (not own or own + 1 <= MAX_OF_FREE * left)

    def take(self, client: str) -> None:
        self._taken[client] += 1
        self._free -= 1

    def first(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first one whose client may take a seat."""
        if self._free <= 0:
            return None
        return next((each for each in waiting if self.has_room(each.client)), None)


def next_turn(client: str, waiting: Iterable[Sequence], computing: Iterable[Sequence]) -> int:
    """The round of a client's next sequence, after those that wait and those whose prompts are
    computed: its own are a round apart, and it is not later than the others' for having come
    later."""
    turns, own = [], []
    for each in chain(waiting, computing):
        turns.append(each.turn)
        if each.client == client:
            own.append(each.turn)
    return max(min(turns, default=0), max(own, default=-1) + 1)


def in_turn(prompts: Iterable[Sequence]) -> list[Sequence]:
    """Prompts that are computed, those whose turn comes first before the others; of equals in
    order."""
    return sorted(prompts, key=lambda each: each.turn)


def prompt_seats(decoding: int, prompts: int, max_num_seqs: int, step: int) -> int:
    """How many of the sequences of a step are kept for prompts, where there are too many
    sequences for one: a quarter, and of fewer than four one in every second step."""
    if decoding + prompts <= max_num_seqs:
        return prompts
    return min(prompts, max(max_num_seqs // 4, step % 2))
