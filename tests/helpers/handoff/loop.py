"""An event loop without a clock: it runs ready callbacks, and timers when a test fires them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

LAPSE = 1e9  # seconds: longer than any lease

party_var: ContextVar[str] = ContextVar("party")  # the party on whose behalf code runs


class StepLoop(asyncio.AbstractEventLoop):
    def __init__(self) -> None:
        self.timers: list[tuple[str, asyncio.TimerHandle]] = []  # (party, timer)
        self.errors: list[BaseException] = []  # unhandled errors
        self._ready: deque[asyncio.Handle] = deque()
        self._now = 0.0

    def do(self, work: Callable[[], Any]) -> None:
        """Runs `work` and all callbacks that follow from it."""
        self.call_soon(work)
        asyncio._set_running_loop(self)
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def fire(self, timer: asyncio.TimerHandle) -> None:
        """Fires a timer, for example of a lease that was not renewed."""
        self._now += LAPSE
        self._timer_handle_cancelled(timer)
        timer._run()

    # ---- AbstractEventLoop ----

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        self._ready.append(asyncio.Handle(callback, args, self, context))
        return self._ready[-1]

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.timers.append((party_var.get(), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.timers = [each for each in self.timers if each[1] is not handle]

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **options)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if error := context.get("exception"):
            self.errors.append(error)
