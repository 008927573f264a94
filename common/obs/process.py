"""The life cycle of a role's process: serve, drain, stop within limits; stack dumps; ports file.

The first SIGTERM or SIGINT drains: no new work, work in flight finishes. The second stops at once.
A failed part ends the process with one log line and a non-zero exit code.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

from pdserve.common.core.errors import PdserveError

logger = logging.getLogger(__name__)

_STDERR = 2
# Thresholds of the garbage collector. A collection stops the event loop, and longest for the oldest
# generation, which has all requests in flight. So that one is collected every 700,000 objects
# (about 100 MB) instead of every 70,000.
COLLECT_AFTER = (700, 10, 100)


async def serve_until_stopped(
    failed: asyncio.Future[None], drain: Callable[[], Awaitable[None]], drain_timeout: float
) -> int:
    """Waits for a signal or for `failed`; returns the exit code: 0 drained, 1 failed."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    gc.freeze()  # objects from the start live on; scanning them takes about 50 ms
    gc.set_threshold(*COLLECT_AFTER)
    name = await _first(signals.get(), failed)
    if name is None:
        return _report(failed)
    logger.info("%s: draining (a second signal stops at once)", name)
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
    logger.warning("stopping with work in flight: %s", "second signal" if stopped else "time-out")
    return 0 if stopped else 1


def propagate_failure(task: asyncio.Task[None], failed: asyncio.Future[None]) -> None:
    """Sets an exception that ends `task` as the exception of `failed`, unless it has one."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            failed.set_exception(error)

    task.add_done_callback(ended)


async def _first(signal_name: Awaitable[str], failed: asyncio.Future[None]) -> str | None:
    """Returns the signal's name, or None if a part failed first."""
    waiting = asyncio.ensure_future(signal_name)
    events: list[asyncio.Future[Any]] = [waiting, failed]
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    if not failed.done():
        return waiting.result()
    waiting.cancel()
    return None


def log_error(error: PdserveError, level: int = logging.ERROR) -> None:
    """Logs an error that ends a process; a JSON line has code and blame as fields."""
    fields = {"code": error.code, "blame": str(error.blame)}
    logger.log(level, "%s", error, extra={"error": fields})


def _report(failed: asyncio.Future[None]) -> int:
    """Logs one line for a typed error, a traceback for others; returns the exit code."""
    error = failed.exception()
    if isinstance(error, PdserveError):
        log_error(error)
    else:
        logger.error("a part of this process failed", exc_info=error)
    return 1


# ---- a limit for stopping ----

STOP_LIMIT = 30.0
"""Seconds from the end of the drain, or from a failure, to the end of the process; more than the
sum of the waits in between."""

_LOG_GRACE = 0.5  # seconds to write the last line
_FRAMES = 3  # innermost frames shown per thread


def exit_within(seconds: float = STOP_LIMIT) -> None:
    """If this process still runs after `seconds`, logs its threads' positions and exits with code
    1. (Python would wait for a thread whose step never returns.) Cannot be undone."""
    threading.Thread(target=_exit_after, args=(seconds,), name="exit-limit", daemon=True).start()


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    logger.critical("did not stop within %.0f s, exiting; threads: %s", seconds, _threads())
    time.sleep(_LOG_GRACE)
    os._exit(1)


def _threads() -> str:
    """Returns one line with each thread's position."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "; ".join(
        f"{names.get(ident, ident)} in {_where(traceback.extract_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def _where(stack: traceback.StackSummary) -> str:
    return " < ".join(
        f"{os.path.basename(each.filename)}:{each.lineno} {each.name}"
        for each in stack[: -_FRAMES - 1 : -1]
    )


# ---- stack dumps of a running (`kill -USR1 PID`) or crashing process ----


def dump_stacks_on_signal() -> None:
    """Dumps stacks to stderr on SIGUSR1: threads at once, even if the interpreter is stuck, asyncio
    tasks once it runs Python again. Also dumps them on a crash (SIGSEGV etc.)."""
    signal.signal(signal.SIGUSR1, _print_tasks)
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True, chain=True)
    faulthandler.enable(file=_STDERR)


def _print_tasks(number: int, frame: FrameType | None) -> None:
    """Prints the tasks. Runs between any two instructions, so it must not use buffered files or
    read source files."""
    with suppress(RuntimeError):  # no event loop runs in this thread
        lines = [line for task in asyncio.all_tasks() for line in _describe(task)]
        with suppress(OSError):  # stderr is closed
            os.write(_STDERR, ("\n".join([*lines, ""])).encode())


def _describe(task: asyncio.Task[Any]) -> Iterator[str]:
    yield f"Task {task.get_name()}, outermost call first:"
    step: Any = task.get_coro()
    while isinstance(step, CoroutineType) and step.cr_frame is not None:
        code = step.cr_frame.f_code
        yield f'  File "{code.co_filename}", line {step.cr_frame.f_lineno} in {code.co_name}'
        step = step.cr_await
    yield f"  waits for {step!r}"


# ---- the ports file ----


def write_ports(path: str | Path, ports: Mapping[str, int]) -> None:
    """Writes `{"http": 8000, …}` atomically."""
    target = Path(path)
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    try:
        draft.write_text(json.dumps(dict(ports)))
        draft.replace(target)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise OSError(error.errno, error.strerror, str(target)) from error


def read_ports(path: str | Path) -> dict[str, int] | None:
    """Returns the ports, or None if the process has not written them yet."""
    try:
        return dict(json.loads(Path(path).read_text()))
    except FileNotFoundError:
        return None
