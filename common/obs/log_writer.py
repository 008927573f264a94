"""Log lines leave on a thread of their own: a standard error that nobody reads stops nothing else.

A pipe whose reader stands still, a full disk or a frozen terminal blocks whoever writes to it;
on an event loop that would be the whole process.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from contextlib import suppress

MAX_LINES = 4096  # that wait to be written; later ones are dropped and counted
MAX_CHARS = 16 * 1024  # of one line
FLUSH_TIMEOUT = 2.0  # seconds the end of the process waits for its last lines


class LogWriter(logging.Handler):
    """Formats a record where it is made, where its request is known, and leaves the writing to a
    thread. What is dropped is told as soon as somebody reads again."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._dropped = 0
        self._closed = False
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # arguments that do not fit their format: as every handler does
            self.handleError(record)
            return
        self.put(line + "\n")

    def put(self, text: str) -> None:
        """Never waits."""
        if len(text) > MAX_CHARS:
            text = f"{text[:MAX_CHARS]}… ({len(text)} characters)\n"
        with self._changed:
            if len(self._lines) >= MAX_LINES:
                self._dropped += 1
                return
            self._lines.append(text)
            self._changed.notify_all()

    def flush(self) -> None:
        """Returns when all is written, or after FLUSH_TIMEOUT."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, FLUSH_TIMEOUT)

    def close(self) -> None:
        """Ends the thread once it has written what waits, if it can."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while (text := self._next()) is not None:
            _write(self._fd, text.encode(errors="backslashreplace"))
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _next(self) -> str | None:
        """All that waits; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if not self._lines:
                return None
            lines, dropped = list(self._lines), self._dropped
            self._lines.clear()
            self._dropped, self._writing = 0, True
        if dropped:
            lines.append(f"{dropped} log lines were dropped here: nobody read them\n")
        return "".join(lines)


def _write(fd: int, data: bytes) -> None:
    """Below Python's own standard error, whose lock the end of the process needs."""
    with suppress(OSError):  # closed: nobody will ever read it
        while data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:  # another process has set the file so
                select.select([], [fd], [])
