"""Whose turn it is when clients share tokens by weight. Pure: plain numbers.

Start-time fair queueing (Goyal, Vin & Cheng, SIGCOMM 1996): virtual time counts the tokens that a
client of weight 1 has been served while it always wanted more. A client's next piece starts when
its last one ends, at `tokens / weight` after its start, and not before the present; the piece that
starts first is served first. So

    of two clients f and m that both wait, the tokens served differ, over any time, by
        |Wf / wf - Wm / wm| <= lf / wf + lm / wm          l: tokens of the largest piece
    a newcomer waits for at most one piece of each client that waits already
"""

from __future__ import annotations

from collections.abc import Mapping

MOST = 4096  # remembered clients; those owed most are forgotten last


class VirtualTime:
    """The present, and when each client's next piece starts."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: by client; others have 1."""
        self.now = 0.0
        self._weights = weights or {}
        self._next: dict[str, float] = {}

    def __len__(self) -> int:
        """Returns the clients that are remembered."""
        return len(self._next)

    def weight(self, client: str) -> float:
        return self._weights.get(client, 1.0)

    def start(self, client: str) -> float:
        """Returns when the client's next piece starts."""
        return max(self.now, self._next.get(client, 0.0))

    def serve(self, client: str, tokens: int) -> None:
        """Notes that the client's next piece is served now."""
        self.now = start = self.start(client)
        self._next[client] = start + tokens / self.weight(client)
        if len(self._next) > MOST:
            self._forget()

    def charge(self, client: str, tokens: int) -> None:
        """Adds tokens to the piece that the client was served last: how many it takes is known
        when it ends."""
        since = self._next.get(client, self.now)
        self._next[client] = since + tokens / self.weight(client)

    def _forget(self) -> None:
        """Forgets the clients that are owed nothing, then those with the least lead."""
        ahead = sorted((tag, client) for client, tag in self._next.items() if tag > self.now)
        self._next = {client: tag for tag, client in ahead[-(MOST // 2) :]}
