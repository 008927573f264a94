"""The bounds of the queue, and which requests are refused beyond them. Pure: plain numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from pdserve.common.core.errors import Overloaded
from pdserve.router.requests.fair_share import longest


@dataclass(slots=True, eq=False)
class Batch:
    """The prompts of one body. They are admitted together, and each takes a slot of its own."""

    client: str = ""  # an API key's name, or an address
    num_tokens: int = 0  # of all prompts
    admitted: bool = False
    refused: bool = False  # after it was admitted, before it had a slot
    waiting: int = 0  # prompts that wait for a slot,
    waiting_tokens: int = 0  # and their tokens
    running: int = 0  # prompts that have a slot
    left: float = -math.inf  # when one last gave its slot back (the event loop's clock)

    @property
    def begun(self) -> bool:
        return bool(self.running) or self.left > -math.inf

    @property
    def alias(self) -> str:
        """Returns the client's name for nodes, which only need different names."""
        return sha256(self.client.encode(errors="surrogateescape")).hexdigest()[:16]


Waiting = Mapping[str, dict[Batch, None]]
"""The batches of each client that have prompts in the queue; a client's newest is its last."""


class QueueBound:
    """One bound of the queue, of prompts or of tokens: the waiting amount by client, and limits."""

    def __init__(self, what: str, limit: int, share: float, size: Callable[[Batch], int]) -> None:
        self.what = what
        self.counts: Counter[str] = Counter()
        self._limit = limit
        self._client_limit = math.ceil(limit * share)
        self._size = size

    def check_own(self, client: str, new: int) -> None:
        """Raises Overloaded if `new` more exceed the client's share."""
        own = self.counts[client]
        if own and own + new > self._client_limit:
            raise self.refusal(own, " of this client")

    def giving_way(self, client: str, new: int, waiting: Waiting, gone: list[Batch]) -> list[Batch]:
        """Returns the batches to refuse so that the client may wait with `new` more, after those in
        `gone` are refused: the newest batches of the clients with the most. Batches that have begun
        stay, and all stay if the client would have no more than an equal part.

        Raises:
            Overloaded: no other client has more than this one would have.
        """
        counts, found = self.counts.copy(), list[Batch]()
        for each in gone:
            counts[each.client] -= self._size(each)
        own, limit = counts[client] + new, self._limit
        while (total := self._total(counts)) + new > limit and (total or not limit):
            rivals = (waiting[name] for name in longest(counts, than=own) if name in waiting)
            batch = next((each for rival in rivals for each in _newest(rival, gone + found)), None)
            if batch is None:
                if own <= limit // len(counts | {client: 1}):
                    return []
                raise self.refusal(self._total(self.counts))
            found.append(batch)
            counts[batch.client] -= self._size(batch)
        return found

    def refusal(self, count: int | None = None, whose: str = "") -> Overloaded:
        count = self._total(self.counts) if count is None else count
        return Overloaded(f"{count} {self.what}{whose} are waiting already", retry_after=1.0)

    def _total(self, counts: Counter[str]) -> int:
        """Returns the total that displaces others: a client's body may exceed its share, but counts
        only up to the share."""
        return sum(min(count, self._client_limit) for count in counts.values())


def _newest(batches: dict[Batch, None], gone: list[Batch]) -> Iterator[Batch]:
    return (each for each in reversed(batches) if not each.begun and each not in gone)
