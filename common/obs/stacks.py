"""`kill -USR1 PID`: what is this process doing? The stacks of all its threads and, on an event
loop, what each task waits for, on stderr. The process goes on."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from types import CoroutineType, FrameType
from typing import Any

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
