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
AFTER_STANDSTILL = 3.0  # seconds, awake, in which the ends of these calls show
TICK, LONGEST_GAP = 0.1, 0.3  # seconds


class AwakeClock:
    """A clock in seconds that stops while this process does not run.

    A router that was stopped, or whose host was, wakes up to heartbeats that wait in its sockets.
    By the real clock every node would be silent before the router has read them. Something must
    read this clock at least every `longest_gap` seconds while the process runs, as `run` does: a
    longer gap means that the process did not run. The same holds for a blocked event loop: each of
    its turns reads only a little of the data that came meanwhile.
    """

    def __init__(
        self, longest_gap: float = LONGEST_GAP, real: Callable[[], float] = monotonic
    ) -> None:
        self._longest_gap = longest_gap
        self._real = real
        self._asked = real()
        self._slept = 0.0
        self._ticks = False
        self._woke = float("-inf")  # when the last standstill ended, by this clock

    def __call__(self) -> float:
        now = self._real()
        gap = now - self._asked
        self._slept += max(0.0, gap - self._longest_gap)
        self._asked = now
        if self._ticks and gap > STANDSTILL:
            self._woke = now - self._slept
        return now - self._slept

    async def run(self) -> None:
        """Reads the clock often enough; never returns."""
        while True:
            self()
            self._ticks = True
            await asyncio.sleep(TICK)

    def stood_still(self) -> bool:
        """Returns whether a standstill has just ended. Peers may have dropped this process, and its
        timers have expired, though only the process itself was late. This needs `run`."""
        return self() - self._woke < AFTER_STANDSTILL


class BreakerState(StrEnum):
    CLOSED = "closed"  # requests pass
    OPEN = "open"  # no request passes until the cool-down is over
    HALF_OPEN = "half_open"  # one trial is under way


class CircuitBreaker:
    """Opens after failures in a row; after the cool-down one request is the trial. Only the node's
    own failures count, not a client's mistakes."""

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
        """Returns whether a request may be sent to the node now."""
        if self._opened_at is None:
            return True
        return not self._trial and self._now() - self._opened_at >= self._cooldown

    def begun(self) -> bool:
        """Notes that a request was sent. Returns whether the breaker is open, so that it is the
        trial."""
        self._trial = self._opened_at is not None
        return self._trial

    def succeeded(self) -> None:
        self._failures, self._opened_at, self._trial = 0, None, False

    def failed(self) -> None:
        self._failures += 1
        self._trial = False
        if self._failures >= self._max_failures:
            self.trips += self._opened_at is None
            self._opened_at = self._now()

    def undecided(self, trial: bool) -> None:
        """Notes that a request ended and says nothing about the node, as when its client left.
        `trial`: what `begun` returned; the end of an earlier request makes no room for another
        trial."""
        if trial:
            self._trial = False


LINK_COOLDOWN, LINK_COOLDOWN_MAX = 1.0, 30.0  # seconds


class LinkBreakers:
    """Breakers of links between prefill and decode nodes that the router reaches both.

    A broken link counts against neither node: both serve in other pairs. After a cool-down, longer
    after each failure, one request tries the link again; an old failure is forgotten. Links are
    pairs of node ids.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._broken: dict[tuple[str, str], _BrokenLink] = {}
        self._suspects: set[str] = set()  # the decode nodes of `_broken`

    def allows(self, prefill: str, decode: str) -> bool:
        """Returns whether a request may use this pair now."""
        link = self._broken.get((prefill, decode))
        return link is None or self._now() >= link.until

    def allows_all(self, decode: str) -> bool:
        """Returns whether no link to this decode node has failed lately."""
        return decode not in self._suspects

    def begun(self, prefill: str, decode: str) -> None:
        """Notes that a request uses the link; on a broken link it is the trial."""
        if (link := self._broken.get((prefill, decode))) is not None:
            link.until = self._now() + link.cooldown

    def succeeded(self, prefill: str, decode: str) -> None:
        if self._broken.pop((prefill, decode), None) is not None:
            self._suspects = {decode for _, decode in self._broken}

    def failed(self, prefill: str, decode: str, reason: str) -> None:
        """Notes a failure; failures of requests that ran at the same time count once."""
        self._forget()
        link = self._broken.setdefault((prefill, decode), _BrokenLink())
        self._suspects.add(decode)
        link.reason = reason
        if link.failed_at + link.cooldown <= self._now():
            link.cooldown = min(LINK_COOLDOWN_MAX, 2 * link.cooldown)
            link.failed_at = self._now()
        link.until = link.failed_at + link.cooldown * random.uniform(0.75, 1.25)

    def reasons(self) -> dict[tuple[str, str], str]:
        """Returns why each link failed last that has not worked since."""
        self._forget()
        return {pair: link.reason for pair, link in self._broken.items()}

    def _forget(self) -> None:
        long_ago = self._now() - 4 * LINK_COOLDOWN_MAX
        self._broken = {key: link for key, link in self._broken.items() if link.until > long_ago}
        self._suspects = {decode for _, decode in self._broken}


class _BrokenLink:
    def __init__(self) -> None:
        self.cooldown = LINK_COOLDOWN / 2
        self.failed_at = float("-inf")
        self.until = 0.0
        self.reason = ""


MAX_REFUSALS = 16  # different ones that are kept


@dataclass(slots=True)
class Refusal:
    """Registrations and heartbeats that were refused for one reason."""

    count: int
    last: float
    port: str


OLDER = "other reasons, of which the text is no longer kept"


class Refusals:
    """Counts refusals of nodes, by the last `MAX_REFUSALS` reasons; older ones are counted
    together. Anyone who reaches the registry's port can add reasons, so they are only text for
    humans."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._refusals: dict[str, Refusal] = {}  # in order of the last time
        self._older: dict[str, Refusal] = {}  # by port

    def note(self, reason: str, port: str = "registry") -> None:
        """`port`: "registry", or "clients", which strangers reach."""
        refusal = self._refusals.pop(reason, None) or Refusal(0, 0.0, port)
        refusal.count, refusal.last = refusal.count + 1, self._now()
        self._refusals[reason] = refusal
        if len(self._refusals) > MAX_REFUSALS:
            dropped = self._refusals.pop(next(iter(self._refusals)))
            older = self._older.setdefault(dropped.port, Refusal(0, 0.0, dropped.port))
            older.count, older.last = older.count + dropped.count, dropped.last

    def items(self) -> Iterator[tuple[str, str, int, float]]:
        """Yields (reason, port, how often, seconds since the last time)."""
        now = self._now()
        older = ((OLDER, each) for each in self._older.values())
        for reason, refusal in (*older, *self._refusals.items()):
            yield reason, refusal.port, refusal.count, now - refusal.last


MAX_FLOWS = 1024  # links; the ones used last are kept


@dataclass(slots=True)
class Flow:
    transfers: int = 0
    bytes: int = 0
    seconds: float = 0.0  # that sending took; each of several transfers at the same time counts


class Flows:
    """Counts what each link has carried; links are pairs of node ids."""

    def __init__(self) -> None:
        self._flows: dict[tuple[str, str], Flow] = {}  # in order of last use

    def landed(self, prefill: str, decode: str, num_bytes: int) -> None:
        """Notes a complete transfer."""
        flow = self._of(prefill, decode)
        flow.transfers += 1
        flow.bytes += num_bytes

    def sent(self, prefill: str, decode: str, seconds: float) -> None:
        """Notes the duration that the prefill node reports; it may be any number."""
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
