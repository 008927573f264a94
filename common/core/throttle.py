"""Log lines that strangers can cause, which must not fill the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 1.0  # between two lines about the same


class LogThrottle:
    """Writes one line an interval at most; the next one says how many were left out. For lines of
    one kind; any thread may call it."""

    def __init__(
        self,
        logger: logging.Logger,
        interval: float = INTERVAL_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval` is in seconds."""
        self._logger = logger
        self._interval = interval
        self._now = now
        self._lock = threading.Lock()
        self._written_at, self._unwritten = float("-inf"), 0

    def info(self, message: str, *args: object) -> None:
        """As `Logger.info`."""
        self._log(logging.INFO, message, *args)

    def warning(self, message: str, *args: object) -> None:
        """As `Logger.warning`."""
        self._log(logging.WARNING, message, *args)

    def _log(self, level: int, message: str, *args: object) -> None:
        unwritten = self._turn()
        if unwritten is None:
            return
        more = f" ({unwritten} more since the last line)" if unwritten else ""
        self._logger.log(level, message + more, *args, stacklevel=3)

    def _turn(self) -> int | None:
        """How many lines were left out before this one; None: this one is left out."""
        with self._lock:
            now = self._now()
            if now - self._written_at < self._interval:
                self._unwritten += 1
                return None
            unwritten, self._unwritten, self._written_at = self._unwritten, 0, now
            return unwritten
