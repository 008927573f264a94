"""Whether an engine that has work gets any of it done. Numbers in, a verdict out.

There is work, and for `timeout` seconds nothing has changed: a step does not return, a rank does
not answer a call (of the KV transfer), or the first in the queue finds no blocks. A long queue
alone is no fault: while steps are computed, tokens are produced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True, slots=True)
class Work:
    """How far an engine is."""

    step: int  # number of the last step begun
    computing: bool  # that step has not returned
    call: tuple[int, int] | None  # the oldest call without an answer: its number, its rank
    admitted: int  # sequences given blocks since start
    freed: int  # blocks given back since start
    waiting: int  # sequences without blocks
    remote: int  # sequences whose blocks another node fills
    needed_blocks: int  # of the first of them, at most (some may be in the prefix cache)
    free_blocks: int
    total_blocks: int

    @property
    def idle(self) -> bool:
        """Nothing is to be done here. Who waits for blocks while others' KV is on its way waits
        for that: a hand-off without progress loses them with its lease, which is progress here."""
        return not self.computing and (not self.waiting or self.remote > 0)

    @property
    def progress(self) -> tuple[object, ...]:
        """Differs whenever something was done in between. Arrivals are not: they would keep a
        dead engine alive."""
        return self.step, self.computing, self.admitted, self.freed


class _Unchanged:
    """How long something has been the same, as far as one has looked."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._state: object = None
        self._since = now()

    def seconds(self, state: object) -> float:
        """None is nothing, and nothing is always new."""
        if state is None or state != self._state:
            self._state, self._since = state, self._now()
        return self._now() - self._since


class Watchdog:
    """`look` must be called several times within `timeout` seconds: that is how time is taken."""

    def __init__(self, timeout: float, now: Callable[[], float] = monotonic) -> None:
        self._timeout = timeout
        self._progress = _Unchanged(now)
        self._call = _Unchanged(now)
        self.stalled = False
        """The verdict is about a rank that stands still: nothing in this engine goes on."""
        self.reason = ""
        """The verdict: why no token could be produced; empty: one could."""

    def look(self, work: Work) -> None:
        """Judges the engine as it is now."""
        still = self._progress.seconds(None if work.idle else work.progress)
        silent = self._call.seconds(work.call)
        self.stalled, self.reason = False, ""
        if still >= self._timeout and work.computing:
            self.stalled, self.reason = True, _step_runs(work, still)
        elif silent >= self._timeout and work.call is not None:
            self.stalled, self.reason = True, _rank_is_silent(work.call[1], silent)
        elif still >= self._timeout:
            self.reason = _memory_is_exhausted(work, still)


def _step_runs(work: Work, seconds: float) -> str:
    return f"step {work.step} has been running for {seconds:.1f} s"


def _rank_is_silent(rank: int, seconds: float) -> str:
    return f"rank {rank} has not answered a call for {seconds:.1f} s"


def _memory_is_exhausted(work: Work, seconds: float) -> str:
    return (
        f"KV memory exhausted: nothing was admitted, computed or freed for {seconds:.1f} s; the "
        f"first of {work.waiting} waiting sequences needs {work.needed_blocks} blocks, "
        f"{work.free_blocks} of {work.total_blocks} are free"
    )
