"""Whether an engine that has work gets any of it done. Numbers in, a verdict out.

There is work, and for `timeout` seconds nothing has changed: a step does not return, a rank does
not answer a call (of the KV transfer), or the first in the queue finds no blocks. A long queue
alone is no fault: while steps are computed, tokens are produced.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from pdserve.common.engine.core import EngineProgress


class _Stopwatch:
    """How long something has been the same, as far as one has checked."""

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
    """`check` must be called several times within `timeout` seconds: that is how time is taken."""

    def __init__(self, timeout: float, now: Callable[[], float] = monotonic) -> None:
        self._timeout = timeout
        self._progress = _Stopwatch(now)
        self._call = _Stopwatch(now)
        self.stalled = False
        """A rank stands still: nothing in this engine goes on."""
        self.reason = ""
        """Why no token could be produced; empty: one could."""

    def check(self, progress: EngineProgress) -> None:
        """Judges the engine as it is now."""
        unchanged = self._progress.seconds(None if progress.idle else progress.counters)
        unanswered = self._call.seconds(progress.call)
        self.stalled, self.reason = False, ""
        if unchanged >= self._timeout and progress.computing:
            self.stalled = True
            self.reason = f"step {progress.step} has been running for {unchanged:.1f} s"
        elif unanswered >= self._timeout and progress.call is not None:
            self.stalled = True
            self.reason = f"rank {progress.call[1]} has not answered a call for {unanswered:.1f} s"
        elif unchanged >= self._timeout:
            self.reason = (
                f"KV memory exhausted: nothing was admitted, computed or freed for "
                f"{unchanged:.1f} s; the first of {progress.waiting} waiting sequences needs "
                f"{progress.needed_blocks} blocks, {progress.free_blocks} of "
                f"{progress.total_blocks} are free"
            )
