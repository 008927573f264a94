"""What a process tells of itself, its ports and its stacks, and that it ends in time."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

logger = logging.getLogger(__name__)


# ---- the stacks of a process that runs: `kill -USR1 PID` ----

_STDERR = 2


def dump_stacks_on_signal() -> None:
    """The threads' stacks come even if the interpreter is stuck; the tasks follow once it runs
    Python again. A loop that is idle shows nothing else: what it waits for, the tasks say."""
    signal.signal(signal.SIGUSR1, _print_tasks)
    faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True, chain=True)


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


STOP_LIMIT = 30.0
"""Seconds from the end of the drain, or from a failure, to the end of a process: more than all that
it waits for then, each with a limit of its own."""

_TOLD = 0.5  # seconds the last line gets to leave
_FRAMES = 3  # of each thread's innermost ones


def exit_within(seconds: float = STOP_LIMIT) -> None:
    """Unless this process has ended by itself by then, it says where its threads are and exits
    with code 1. (A step that never returns holds a thread, which Python would join for ever.) For
    the main function of a process: nothing takes it back."""
    threading.Thread(target=_exit_after, args=(seconds,), name="exit-limit", daemon=True).start()


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    logger.critical("did not stop within %.0f s, exits by force; threads: %s", seconds, _threads())
    time.sleep(_TOLD)
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
