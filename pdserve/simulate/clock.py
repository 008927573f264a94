"""An event loop whose time jumps to the next timer instead of waiting for it.

Production code that reads the loop's clock, or gets it as an argument, runs unchanged and without
waiting. Nothing on such a loop may wait for another thread, process or socket.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
RESOLUTION = 1e-9  # seconds


class _Jump(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the simulation waits for an event that never happens")
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` begins at 0 seconds."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    @property
    def _clock_resolution(self) -> float:
        """Timers run that much early. asyncio's constant is lost beside a time of a year, and a
        timer of exactly that time would never run."""
        return max(RESOLUTION, 2 * math.ulp(self._jump.now))

    @_clock_resolution.setter
    def _clock_resolution(self, _: float) -> None:
        """Ignores asyncio's."""

    def time(self) -> float:
        return self._jump.now


def run_virtually(main: Callable[[], Awaitable[T]]) -> T:
    """Runs the coroutine to its end on a new VirtualLoop."""

    async def call() -> T:
        return await main()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(call())
