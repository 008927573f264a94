"""Says what this process waits for, so that no start is silent for longer than `EVERY`.

A wait is a block under `saying`. Waits may be nested, follow each other and run in several threads:
a line names the wait that began last. Lines come from a thread, as a wait may block the event loop.
"""

from __future__ import annotations

import fcntl
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic, sleep

from pdserve.common.core.printable import printable

logger = logging.getLogger(__name__)

EVERY = 9.0  # seconds between two lines, and before the first: none is late by more than a second
SOON = 1.0  # seconds before the first line about a wait that is likely to be long


def log_line(line: str) -> None:
    """Logs the line even where the level shows warnings only, as in clusters of `pdserve demo` and
    of `LLM`, and in processes that have not set up logging."""
    logger.log(logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING, "%s", line)


@contextmanager
def saying(
    what: str | Callable[[], str], soon: bool = False, write: Callable[[str], None] = log_line
) -> Iterator[None]:
    """Writes `WHAT, N s so far` every `EVERY` seconds while the block runs; with `soon` after
    `SOON` seconds, too. `what` is called in another thread."""
    wait = _Wait(what, write)
    _waits.begin(wait, SOON if soon else EVERY)
    try:
        yield
    finally:
        _waits.end(wait)


@contextmanager
def file_lock(path: Path, doing: str, limit: float = inf) -> Iterator[None]:
    """Holds a lock on a file; says so while it waits for another process. `doing`: what that one
    does, such as "compiles kernels".

    Raises:
        TimeoutError: another process has had it for `limit` seconds.
    """
    deadline = monotonic() + limit
    with path.open("w") as file:
        with saying(f"waiting for another process that {doing}", soon=True):
            while not _try_lock(file.fileno()):
                if monotonic() > deadline:
                    raise TimeoutError(f"another process has held {path} for {limit:.0f} s")
                sleep(0.05)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def progress(command: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes on standard error what the command begins now; until the next
    call, the line comes again as with `saying`."""

    def write(line: str) -> None:
        print(f"{command}: {line}", file=sys.stderr, flush=True)

    with ExitStack() as waiting:

        def say(doing: str) -> None:
            waiting.close()
            write(doing := printable(doing))
            waiting.enter_context(saying(doing, write=write))

        yield say


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    what: str | Callable[[], str]
    write: Callable[[str], None]
    since: float = field(default_factory=monotonic)

    def say(self) -> None:
        what = self.what if isinstance(self.what, str) else self.what()
        self.write(f"{what}, {monotonic() - self.since:.0f} s so far")


class _Waits:
    """The waits that have begun and not ended, and the thread that runs while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: list[_Wait] = []
        # When the last one ended, and when the next line is to be written. A process waits from its
        # first moment on, which may be seconds ago on a busy host.
        self._ended = monotonic()
        self._due = self._ended + EVERY / 2
        self._running = False

    def begin(self, wait: _Wait, first: float) -> None:
        with self._changed:
            due = wait.since + first
            follows = self._waits or wait.since < self._ended + EVERY
            self._due = min(self._due, due) if follows else due
            self._waits.append(wait)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="waits", daemon=True).start()
            self._changed.notify()

    def end(self, wait: _Wait) -> None:
        with self._changed:
            self._waits.remove(wait)
            self._ended = monotonic()
            self._changed.notify()

    def _run(self) -> None:
        while (wait := self._next()) is not None:
            wait.say()  # without the lock: a writer may block

    def _next(self) -> _Wait | None:
        """Returns the wait to name once a line is due; None when there are no waits any more."""
        with self._changed:
            while self._waits:
                if (left := self._due - monotonic()) <= 0:
                    self._due = monotonic() + EVERY
                    return self._waits[-1]
                self._changed.wait(left)
            self._running = False
            return None


_waits = _Waits()
