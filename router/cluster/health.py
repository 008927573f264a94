"""The health of nodes and of the links between them: circuit breakers, the clock that measures
silence, and what each link has carried."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from time import monotonic

STANDSTILL = 1.0  # seconds without a turn of the event loop, after which calls may have ended
AFTER_STANDSTILL = 3.0  # seconds, awake, in which it shows which ones
TICK, LONGEST_GAP = 0.1, 0.3  # seconds


class AwakeClock:
    """Seconds, without those in which this process did not run.

    A router that was stopped, or whose host was, wakes up to heartbeats that wait in its sockets;
    by the real clock it would take every node for silent before it has read them. Whoever uses
    this clock asks it more often than every `longest_gap` seconds while the process runs, as
    `run` does: a longer gap was no running. The same goes for an event loop that something has
    blocked: what came meanwhile is read a little at each of its turns, however late they are.
    """

    def __init__(
        self, longest_gap: float = LONGEST_GAP, real: Callable[[], float] = monotonic
    ) -> None:
        self._longest_gap = longest_gap
        self._real = real
        self._asked = real()
        self._slept = 0.0
        self._ticks = False
        self._woke = float("-inf")  # by this clock, from the last standstill

    def __call__(self) -> float:
        now = self._real()
        gap = now - self._asked
        self._slept += max(0.0, gap - self._longest_gap)
        self._asked = now
        if self._ticks and gap > STANDSTILL:
            self._woke = now - self._slept
        return now - self._slept

    async def run(self) -> None:
        """Asks it often enough, for ever."""
        while True:
            self()
            self._ticks = True
            await asyncio.sleep(TICK)

    def stood_still(self) -> bool:
        """Whether the process does not run again for long. Its peers may have given it up, and its
        own timers are over, though nothing was late but itself. Only `run` can tell."""
        return self() - self._woke < AFTER_STANDSTILL


class BreakerState(StrEnum):
    CLOSED = "closed"  # requests pass
    OPEN = "open"  # none do, until the cool-down is over
    HALF_OPEN = "half_open"  # one trial is under way


class CircuitBreaker:
    """Opens after failures in a row; after a rest one request is the trial. The node's own
    failures count; a client's mistakes must not be recorded here."""

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
        """Whether a request may be sent to the node now."""
        if self._opened_at is None:
            return True
        return not self._trial and self._now() - self._opened_at >= self._cooldown

    def begun(self) -> None:
        """A request was sent; on an open breaker it is the trial."""
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


LINK_COOLDOWN, LINK_COOLDOWN_MAX = 1.0, 30.0  # seconds


class LinkBreakers:
    """Which prefill and decode nodes do not reach each other, though the router reaches both.

    Nobody is to blame and both nodes serve in other pairs. After a while, longer after each
    failure, one request tries a broken link again; an old one is forgotten. Links are pairs of
    node ids.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._broken: dict[tuple[str, str], _BrokenLink] = {}

    def allows(self, prefill: str, decode: str) -> bool:
        """Whether a request may be given to this pair now."""
        link = self._broken.get((prefill, decode))
        return link is None or self._now() >= link.until

    def begun(self, prefill: str, decode: str) -> None:
        """A request is given to the pair; to one that was broken as its trial."""
        if (link := self._broken.get((prefill, decode))) is not None:
            link.until = self._now() + link.cooldown

    def succeeded(self, prefill: str, decode: str) -> None:
        self._broken.pop((prefill, decode), None)

    def failed(self, prefill: str, decode: str) -> None:
        """Failures of requests that were under way together count once."""
        self._forget()
        link = self._broken.setdefault((prefill, decode), _BrokenLink())
        if link.failed_at + link.cooldown <= self._now():
            link.cooldown = min(LINK_COOLDOWN_MAX, 2 * link.cooldown)
            link.failed_at = self._now()
        link.until = link.failed_at + link.cooldown * random.uniform(0.75, 1.25)

    def _forget(self) -> None:
        long_ago = self._now() - 4 * LINK_COOLDOWN_MAX
        self._broken = {key: link for key, link in self._broken.items() if link.until > long_ago}


class _BrokenLink:
    def __init__(self) -> None:
        self.cooldown = LINK_COOLDOWN / 2
        self.failed_at = float("-inf")
        self.until = 0.0


MAX_FLOWS = 1024  # pairs; those that were used last


@dataclass(slots=True)
class Flow:
    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0  # that sending took; transfers at the same time count each


class Flows:
    """By the ids of the two nodes."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str], Flow] = {}  # the one used last is the last

    def landed(self, prefill: str, decode: str, num_bytes: int) -> None:
        """The decode node has it all."""
        flow = self._of(prefill, decode)
        flow.transfers += 1
        flow.bytes += num_bytes

    def sent(self, prefill: str, decode: str, seconds: float) -> None:
        """The prefill node says how long it took, whatever that may be."""
        if isfinite(seconds) and seconds > 0:
            self._of(prefill, decode).seconds += seconds

    def items(self) -> Iterator[tuple[tuple[str, str], Flow]]:
        yield from self._flows.items()

    def _of(self, prefill: str, decode: str) -> Flow:
        pair = prefill, decode
        flow = self._flows.pop(pair, None) or Flow()
        self._flows[pair] = flow
        if len(self._flows) > MAX_FLOWS:
            del self._flows[next(iter(self._flows))]
        return flow
