"""The last resort of a process that stops: it ends in time, whatever hangs."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback

logger = logging.getLogger(__name__)

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
