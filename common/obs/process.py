"""A role's process: it serves, drains and stops within limits, and shows its ports and its stacks.

The first SIGTERM or SIGINT drains: no new work, what is in flight finishes. The second stops
at once. A part that fails ends the process with one line and a non-zero code.
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
# New objects, and collections of the next younger generation, after which a generation's garbage is
# collected. The event loop stands still meanwhile, and for the oldest, which is all requests in
# hand, longest: so that is done every 700,000 objects (some 100 MB) instead of every 70,000.
COLLECT_AFTER = (700, 10, 100)


async def serve_until_stopped(
    failed: asyncio.Future[None], drain: Callable[[], Awaitable[None]], drain_timeout: float
) -> int:
    """Waits for a signal or for `failed`; returns the exit code: 0 drained, 1 failed."""
    signals: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    gc.freeze()  # what a start has made stays: to look through it takes some 50 ms
    gc.set_threshold(*COLLECT_AFTER)
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


def propagate_failure(task: asyncio.Task[None], failed: asyncio.Future[None]) -> None:
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


# ---- an end in time ----

STOP_LIMIT = 30.0
"""Seconds from the end of the drain, or from a failure, to the end of a process: more than all that
it waits for then, each with a limit of its own."""

_LOG_GRACE = 0.5  # seconds the last line gets to leave
_FRAMES = 3  # of each thread's innermost ones


def exit_within(seconds: float = STOP_LIMIT) -> None:
    """Unless this process has ended by itself by then, it says where its threads are and exits
    with code 1. (A step that never returns holds a thread, which Python would join for ever.) For
    the main function of a process: nothing takes it back."""
    threading.Thread(target=_exit_after, args=(seconds,), name="exit-limit", daemon=True).start()


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    logger.critical("did not stop within %.0f s, exits by force; threads: %s", seconds, _threads())
    time.sleep(_LOG_GRACE)
    os._exit(1)


def _threads() -> str:
    """Where each thread is, in one line."""
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


# ---- the stacks of a process that runs (`kill -USR1 PID`) or crashes ----


def dump_stacks_on_signal() -> None:
    """The threads' stacks come even if the interpreter is stuck; the tasks follow once it runs
    Python again. A loop that is idle shows nothing else: what it waits for, the tasks say. A crash
    (SIGSEGV and its kin) shows the stacks, too, and still ends the process."""
    signal.signal(signal.SIGUSR1, _print_tasks)
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True, chain=True)
    faulthandler.enable(file=_STDERR)


def _print_tasks(number: int, frame: FrameType | None) -> None:
    """Runs between any two instructions of the process, and must do no harm there: no buffered
    file, no source files."""
    with suppress(RuntimeError):  # no event loop runs in this thread
        lines = [line for task in asyncio.all_tasks() for line in _describe(task)]
        with suppress(OSError):  # nobody reads it
            os.write(_STDERR, ("\n".join([*lines, ""])).encode())


def _describe(task: asyncio.Task[Any]) -> Iterator[str]:
    yield f"Task {task.get_name()}, outermost call first:"
    step: Any = task.get_coro()
    while isinstance(step, CoroutineType) and step.cr_frame is not None:
        code = step.cr_frame.f_code
        yield f'  File "{code.co_filename}", line {step.cr_frame.f_lineno} in {code.co_name}'
        step = step.cr_await
    yield f"  waits for {step!r}"


# ---- the ports that it really listens on, told through a file ----


def write_ports(path: str | Path, ports: Mapping[str, int]) -> None:
    """Writes `{"http": 8000, …}`; a reader sees the whole file or none."""
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
    """The ports, or None while the process has not written them."""
    try:
        return dict(json.loads(Path(path).read_text()))
    except FileNotFoundError:
        return None
