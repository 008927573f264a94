"""Answers refusals later and later to a client that causes many. Pure: numbers and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

RATE = 20.0  # refusals a second of one client; each takes up to a millisecond
BURST = 40.0  # refusals that may come together
LONGEST = 30.0  # seconds that a refusal may wait
MAX_CLIENTS = 4096  # the longest unused are forgotten


class RefusalBrake:
    """Spaces the refusals of each client to `RATE` a second, after a burst. So a client that asks
    again and again, over many connections, takes a small share of the router's time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._due: dict[str, float] = {}  # when the client's next refusal is due; oldest use first

    def delay(self, client: str) -> float:
        """Counts a refusal; returns the seconds after which to answer it."""
        now = self._now()
        due = max(self._due.pop(client, 0.0), now - BURST / RATE) + 1 / RATE
        self._due[client] = min(due, now + LONGEST)
        while len(self._due) > MAX_CLIENTS:
            del self._due[next(iter(self._due))]
        return max(0.0, min(due, now + LONGEST) - now)
