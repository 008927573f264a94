"""Says on standard error what a command that takes minutes is doing."""

from __future__ import annotations

import sys
import time
from threading import Event, Lock, Thread
from types import TracebackType
from typing import IO

from pdserve.common.core.printable import printable

PERIOD = 10.0  # seconds; the longest silence


class Progress:
    """A context that prints `NAME: 12 s: DOING` at each change, and again every PERIOD seconds from
    a thread of its own, also while imports hold up an event loop."""

    def __init__(self, name: str, period: float = PERIOD, stream: IO[str] | None = None) -> None:
        self._name = name
        self._period = period
        self._stream = stream
        self._began = time.monotonic()
        self._doing = "starting"
        self._turn = Lock()
        self._changed, self._over = Event(), False
        self._thread = Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._over = True
        self._changed.set()
        self._thread.join()

    def say(self, doing: str) -> None:
        """Prints what begins now."""
        self._doing = printable(doing)
        self._print(self._doing)
        self._changed.set()

    def _run(self) -> None:
        while not self._over:
            if self._changed.wait(self._period):
                self._changed.clear()
            else:
                self._print(f"still {self._doing}")

    def _print(self, text: str) -> None:
        with self._turn:
            seconds = time.monotonic() - self._began
            print(
                f"{self._name}: {seconds:.0f} s: {text}",
                file=self._stream or sys.stderr,
                flush=True,
            )
