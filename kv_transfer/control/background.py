"""Background tasks, whose errors are always handled, and leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pdserve.common.core.errors import Blame, PdserveError, TransferError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def new_future() -> asyncio.Future[T]:
    """Makes a future whose error asyncio does not log when no task awaits it."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


class Tasks:
    """Keeps references to the tasks of a node of this `role`; `join` waits for all of them."""

    def __init__(self, role: Blame) -> None:
        self._role = role
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self,
        work: Coroutine[Any, Any, None],
        on_error: Callable[[PdserveError], None] | None = None,
    ) -> asyncio.Task[None]:
        """Starts `work`. Its error is typed and goes to `on_error`, or else to the log."""
        task = asyncio.get_running_loop().create_task(self._run(work, on_error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(
        self, work: Coroutine[Any, Any, None], on_error: Callable[[PdserveError], None] | None
    ) -> None:
        try:
            await work
        except Exception as error:
            typed = self._typed(error)
            if on_error is None:
                logger.warning("KV transfer: a background task failed: %s", typed)
            else:
                on_error(typed)

    def _typed(self, error: Exception) -> PdserveError:
        """Turns an unexpected exception, which is a bug of this node, into a typed error and logs
        it."""
        if isinstance(error, PdserveError):
            return error
        logger.error("KV transfer: unexpected error", exc_info=error)
        message = f"the {self._role} node failed in the KV transfer: {type(error).__name__}"
        return TransferError(message, code="INTERNAL", blame=self._role, retryable=True)

    async def join(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)


class Lease:
    """Calls `on_lapse` when it was not renewed for `seconds`. It belongs to the event loop."""

    def __init__(self, seconds: float, on_lapse: Callable[[], None]) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._on_lapse: Callable[[], None] | None = on_lapse
        self._deadline = self._loop.time() + seconds
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._deadline, self._check)

    def renew(self) -> None:
        """Moves the deadline. It is cheap: the timer is moved only when it fires."""
        self._deadline = self._loop.time() + self.seconds

    def end(self) -> None:
        """Ends the lease; its owner, which `on_lapse` may hold, is not kept any longer."""
        self._on_lapse = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._loop.time() >= self._deadline:
            self._timer = None
            if self._on_lapse is not None:
                self._on_lapse()
        else:
            self._timer = self._loop.call_at(self._deadline, self._check)
