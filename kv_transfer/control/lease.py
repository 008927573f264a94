"""A deadline that progress moves on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Lease:
    """Calls `on_lapse` once nothing renewed it for `seconds`. Lives on the event loop."""

    def __init__(self, seconds: float, on_lapse: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_lapse = on_lapse
        self._deadline = self._loop.time() + seconds
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._deadline, self._look)

    def renew(self) -> None:
        """Cheap: the timer is moved only when it fires."""
        self._deadline = self._loop.time() + self._seconds

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._loop.time() >= self._deadline:
            self._timer = None
            self._on_lapse()
        else:
            self._timer = self._loop.call_at(self._deadline, self._look)
