"""How many requests are served at once, how many may wait, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.core.errors import Overloaded, Unavailable


class Admission:
    """A bounded queue in front of a bounded number of places, first come first served."""

    def __init__(self, max_running: int, max_waiting: int, timeout: float) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._timeout = timeout
        self.running = 0
        self.waiting = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Holds a place.

        Raises:
            Overloaded: the queue is full.
            Unavailable: no place came free in time.
        """
        if self._places.locked() and self.waiting >= self._max_waiting:
            raise Overloaded(f"{self.waiting} requests are waiting already", retry_after=1.0)
        self.waiting += 1
        try:
            await asyncio.wait_for(self._places.acquire(), self._timeout)
        except TimeoutError:
            raise Unavailable(
                f"no place came free within {self._timeout:g} s",
                code="QUEUE_TIMEOUT",
                retry_after=2.0,
            ) from None
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()
