"""Fair sharing of a replica between clients, and between prompts. Policy only: plain numbers.

Two rules share a replica between clients. Neither slows a client that is alone:

    slots   Every admitted sequence takes a slot; there are a third more slots than sequences in a
            step. A client may take another slot if it then holds at most three times as many as
            are left free (the dynamic threshold of Choudhury & Hahne, IEEE/ACM ToN 1998). So one
            client alone fills every step, and a newcomer still finds a free slot.
    rounds  Sequences that wait for a slot, for blocks or for prefill are served in rounds: the
            first one of each client, then the second one of each, and so on (start-time fair
            queueing, Goyal, Vin & Cheng, SIGCOMM 1996). If blocks are short, those of clients above
            their share come later (`block_shares.py`).

The router names the client of each job; jobs without a name count as one client's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from pdserve.common.engine.sequence import Sequence

MAX_OF_FREE = 3  # a client may hold this many times the free slots


class ClientSlots:
    """The slots in use now; `take` adds one."""

    def __init__(self, max_num_seqs: int, taken: Iterable[Sequence]) -> None:
        self._taken = Counter(each.client for each in taken)
        self._free = max_num_seqs + -(-max_num_seqs // MAX_OF_FREE) - self._taken.total()

    def has_room(self, client: str) -> bool:
        """Returns whether the client may take a slot."""
        own, left = self._taken[client], self._free - 1
        return left >= 0 and (not own or own + 1 <= MAX_OF_FREE * left)

    def take(self, client: str) -> None:
        self._taken[client] += 1
        self._free -= 1

    def first(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """Returns the first sequence whose client may take a slot."""
        if self._free <= 0:
            return None
        return next((each for each in waiting if self.has_room(each.client)), None)


def next_round(client: str, waiting: Iterable[Sequence], prefilling: Iterable[Sequence]) -> int:
    """Returns the round of a client's next sequence: one after the client's last round, and not
    before the earliest round of all waiting and prefilling sequences."""
    rounds, own = [], []
    for each in chain(waiting, prefilling):
        rounds.append(each.round)
        if each.client == client:
            own.append(each.round)
    return max(min(rounds, default=0), max(own, default=-1) + 1)


def prompt_slots(decoding: int, prompts: int, max_num_seqs: int, step: int) -> int:
    """Returns how many of a step's sequences are reserved for prompts: all prompts if everything
    fits; else a quarter, or one in every second step if that is less than one."""
    if decoding + prompts <= max_num_seqs:
        return prompts
    return min(prompts, max(max_num_seqs // 4, step % 2))


def share_budget(left: list[int], budget: int, step: int = 0) -> list[int]:
    """Returns how many of `budget` tokens each prompt gets. `left`: tokens each one still needs,
    the oldest prompt first.

    The oldest prompt gets at least half, so that it cannot starve. The other half goes to prompts
    that need less than the oldest, shortest first, so that they need not wait for it. The rest goes
    to all in order of age. Every prompt becomes the oldest at some point, so it takes at most twice
    the steps of strict first come, first served. Prompts of equal length are computed one after the
    other, which gives a better mean latency than all at once.
    """
    shares = [0] * len(left)
    if not left:
        return shares
    shorter = sorted((n, i) for i, n in enumerate(left) if n < left[0])
    # The odd token of an odd budget alternates between the halves, also for a budget of one.
    half = (budget + step % 2) // 2 if shorter else budget
    shares[0] = min(left[0], half)
    budget -= shares[0]
    for index in (*(i for _, i in shorter), *range(len(left))):
        more = min(left[index] - shares[index], budget)
        shares[index] += more
        budget -= more
    return shares
