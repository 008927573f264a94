"""A circuit breaker per node: after failures in a row the node rests, then gets one trial."""

from __future__ import annotations

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
