"""start → serve → drain → stop, the same for every role.

The first SIGTERM or SIGINT drains: no new work, what is in flight finishes. The second stops
at once. A part that fails ends the process with one line and a non-zero code.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from pdserve.common.core.errors import PdserveError

logger = logging.getLogger(__name__)


async def serve_until_stopped(
    failed: asyncio.Future[None], drain: Callable[[], Awaitable[None]], drain_timeout: float
) -> int:
    """Waits for a signal or for `failed`; returns the exit code: 0 drained, 1 failed."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    name = await _first(signals.get(), failed)
    if name is None:
        return _report(failed)
    logger.info("%s: draining (a second one stops at once)", name)
    draining = asyncio.ensure_future(drain())
    again = asyncio.ensure_future(signals.get())
    events: list[asyncio.Future[Any]] = [draining, again, failed]
    await asyncio.wait(events, timeout=drain_timeout, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if failed.done():
        return _report(failed)
    if draining.done():
        draining.result()
        logger.info("drained")
        return 0
    draining.cancel()
    stopped = again.done()
    logger.warning("stopping with work in flight: %s", "told twice" if stopped else "time-out")
    return 0 if stopped else 1


def pass_on(task: asyncio.Task[None], failed: asyncio.Future[None]) -> None:
    """An exception that `task` ends with is `failed`'s, unless something failed before."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            failed.set_exception(error)

    task.add_done_callback(ended)


async def _first(signal_name: Awaitable[str], failed: asyncio.Future[None]) -> str | None:
    """The signal's name, or None when a part failed first."""
    waiting = asyncio.ensure_future(signal_name)
    events: list[asyncio.Future[Any]] = [waiting, failed]
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    if not failed.done():
        return waiting.result()
    waiting.cancel()
    return None


def _report(failed: asyncio.Future[None]) -> int:
    """One line for an error that says its cause, a traceback for a defect."""
    error = failed.exception()
    if isinstance(error, PdserveError):
        logger.error("%s", error)
    else:
        logger.error("a part of this process failed", exc_info=error)
    return 1
