"""A clock by which a process that was stopped has not waited."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


class AwakeClock:
    """Seconds, without those in which this process did not run.

    A router that was stopped, or whose host was, wakes up to heartbeats that wait in its sockets;
    by the real clock it would take every node for silent before it has read them. Whoever uses
    this clock asks it more often than every `longest_gap` seconds while the process runs: a
    longer gap was no running.
    """

    def __init__(self, longest_gap: float, real: Callable[[], float] = monotonic) -> None:
        self._longest_gap = longest_gap
        self._real = real
        self._asked = real()
        self._slept = 0.0

    def __call__(self) -> float:
        now = self._real()
        self._slept += max(0.0, now - self._asked - self._longest_gap)
        self._asked = now
        return now - self._slept
