"""Circuit breakers: after failures in a row a node, or a pair of nodes, rests; then one trial."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"  # requests pass
    OPEN = "open"  # none do, until the cool-down is over
    HALF_OPEN = "half_open"  # one trial is under way


class CircuitBreaker:
    """The node's own failures count; a client's mistakes must not be recorded here."""

    def __init__(self, max_failures: int, cooldown: float, now: Callable[[], float]) -> None:
        self._max_failures = max_failures
        self._cooldown = cooldown
        self._now = now
        self._failures = 0
        self._opened_at: float | None = None
        self._trial = False
        self.trips = 0

    @property
    def state(self) -> BreakerState:
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._trial else BreakerState.OPEN

    def allows(self) -> bool:
        """Whether a request may be placed on the node now."""
        if self._opened_at is None:
            return True
        return not self._trial and self._now() - self._opened_at >= self._cooldown

    def placed(self) -> None:
        """A request was placed; on an open breaker it is the trial."""
        self._trial = self._opened_at is not None

    def succeeded(self) -> None:
        self._failures, self._opened_at, self._trial = 0, None, False

    def failed(self) -> None:
        self._failures += 1
        self._trial = False
        if self._failures >= self._max_failures:
            self.trips += self._opened_at is None
            self._opened_at = self._now()

    def undecided(self) -> None:
        """The request ended without a word about the node (its client left)."""
        self._trial = False


PAIR_COOLDOWN, PAIR_COOLDOWN_MAX = 1.0, 30.0  # seconds


class Pairs:
    """Which prefill and decode nodes do not reach each other, though the router reaches both.

    Nobody is to blame and both nodes serve in other pairs. After a while, longer after each
    failure, one request tries a broken pair again; an old one is forgotten.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._broken: dict[tuple[str, str], _BrokenPair] = {}

    def broken(self, prefill: str, decode: str) -> bool:
        """Whether no request may be given to this pair (of node ids) now."""
        pair = self._broken.get((prefill, decode))
        return pair is not None and self._now() < pair.until

    def any_broken(self) -> bool:
        return any(self._now() < pair.until for pair in self._broken.values())

    def placed(self, prefill: str, decode: str) -> None:
        """A request is given to the pair; to one that was broken as its trial."""
        if (pair := self._broken.get((prefill, decode))) is not None:
            pair.until = self._now() + pair.cooldown

    def succeeded(self, prefill: str, decode: str) -> None:
        self._broken.pop((prefill, decode), None)

    def failed(self, prefill: str, decode: str) -> None:
        """Failures of requests that were under way together count once."""
        self._forget()
        pair = self._broken.setdefault((prefill, decode), _BrokenPair())
        if pair.failed_at + pair.cooldown <= self._now():
            pair.cooldown = min(PAIR_COOLDOWN_MAX, 2 * pair.cooldown)
            pair.failed_at = self._now()
        pair.until = pair.failed_at + pair.cooldown * random.uniform(0.75, 1.25)

    def _forget(self) -> None:
        long_ago = self._now() - 4 * PAIR_COOLDOWN_MAX
        self._broken = {key: pair for key, pair in self._broken.items() if pair.until > long_ago}


class _BrokenPair:
    def __init__(self) -> None:
        self.cooldown = PAIR_COOLDOWN / 2
        self.failed_at = float("-inf")
        self.until = 0.0
