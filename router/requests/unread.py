"""Bounds the unread updates of all clients: the client with the most loses its answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Protocol

from pdserve.common.core.errors import Cancelled

MAX_UNREAD = 2**29  # bytes of objects, about, of one process
_GAVE_WAY = "unread answers fill the router's memory, and this client has the most of them"


class Unreader(Protocol):
    def give_way(self, error: Cancelled) -> None:
        """Drops unread and later updates."""


class Unread:
    """Counts the bytes in queues, by client. A queue reports when it has grown by much, and when it
    is empty again, so that clients that keep up cost nothing."""

    def __init__(self, most: int = MAX_UNREAD) -> None:
        self._most = most
        self._of: defaultdict[str, Counter[Unreader]] = defaultdict(Counter)
        self._sums: Counter[str] = Counter()

    @property
    def nbytes(self) -> int:
        return self._sums.total()

    def grown(self, client: str, queue: Unreader, nbytes: int) -> None:
        """Counts `nbytes` more. While the total exceeds the limit, the largest queue of the client
        with the most gives way, which may be this one."""
        self._of[client][queue] += nbytes
        self._sums[client] += nbytes
        while self.nbytes > self._most:
            [(largest, _)] = self._sums.most_common(1)
            [(gives_way, _)] = self._of[largest].most_common(1)
            self.emptied(largest, gives_way)
            gives_way.give_way(Cancelled(_GAVE_WAY, code="CLIENT_TOO_SLOW"))

    def emptied(self, client: str, queue: Unreader) -> None:
        """Forgets a queue."""
        queues = self._of[client]
        self._sums[client] -= queues.pop(queue, 0)
        if not queues:
            del self._of[client], self._sums[client]
