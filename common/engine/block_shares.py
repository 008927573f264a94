"""Shares a replica's KV blocks between clients. Policy only: plain numbers.

    use      the blocks that a client holds, or its mean over the last seconds, whichever is more:
             blocks × time, older time counting less and less
    share    an equal part of the blocks for each client that has held or wanted some lately
    reserve  the last eighth of the blocks, for clients below their share: one above it leaves them
             free, except for its only sequence

Clients below their share get blocks first, then the one that uses least. While only one client has
been there lately, it may use all blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import exp

LATELY = 10.0
"""Seconds: time constant of the mean use, and how long a client counts after its last sequence."""
RESERVED = 8  # one block in so many


class BlockShares:
    """The clients' use of `num_blocks` blocks."""

    def __init__(self, num_blocks: int, now: Callable[[], float]) -> None:
        """`now`: seconds."""
        self._num_blocks = num_blocks
        self._now = now
        self._seen: dict[str, float] = {}  # when each client last held or wanted blocks
        self._mean: dict[str, float] = {}  # blocks
        self._held = Counter[str]()  # blocks
        self._sequences = Counter[str]()  # with blocks
        self._updated = now()
        self._counted = False  # since then: a client's time alone does not count

    @property
    def contended(self) -> bool:
        """Whether several clients have been there lately, as far as `update` knows."""
        return len(self._seen) > 1

    @property
    def share(self) -> float:
        """The blocks of one client's share."""
        return self._num_blocks / max(1, len(self._seen))

    def see(self, client: str) -> None:
        """Notes that the client wants blocks, or has just had some."""
        self._seen[client] = self._now()

    def update(self, sequences: Iterable[tuple[str, int]]) -> None:
        """Sets what clients hold. `sequences`: the client of each sequence that has blocks, with
        their number, or waits for some, with 0."""
        now = self._now()
        kept = exp((self._updated - now) / LATELY)
        means = (
            (client, kept * self._mean.get(client, 0.0) + (1 - kept) * self._held[client])
            for client in self._seen
        )
        self._mean = dict(means) if self._counted else {}
        self._held.clear()
        self._sequences.clear()
        for client, blocks in sequences:
            self._seen[client] = now
            self.add(client, blocks, int(blocks > 0))
        self._seen = {client: at for client, at in self._seen.items() if at >= now - LATELY}
        self._counted, self._updated = self.contended, now

    def add(self, client: str, blocks: int, sequences: int) -> None:
        """Adds blocks to those that the client holds, and sequences to those that have blocks."""
        self._held[client] += blocks
        self._sequences[client] += sequences

    def use(self, client: str) -> float:
        return max(self._held[client], self._mean.get(client, 0.0))

    def is_above(self, client: str) -> bool:
        """Returns whether the client uses more than its share."""
        return self.contended and self.use(client) > self.share

    def rank(self, client: str) -> float:
        """Returns the client's place in the order for blocks: 0 below its share, else its use."""
        return self.use(client) if self.is_above(client) else 0.0

    def reserved(self, client: str, own: int = 0) -> int | None:
        """Returns RESERVED if a sequence of the client must leave the reserve free, else None.
        `own`: 1 if it has blocks itself."""
        leaves = self._sequences[client] > own and self.is_above(client)
        return RESERVED if leaves else None

    def yields(self, client: str, other: str) -> bool:
        """Returns whether the client is above its share and uses more than the other one: it may
        be preempted for that one, and does not go ahead of it."""
        return self.rank(client) > self.use(other)
