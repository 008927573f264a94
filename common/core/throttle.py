"""Throttles log lines that untrusted peers can cause."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 1.0  # seconds between two lines of one kind


class LogThrottle:
    """Writes at most one line per interval; each line says how many were left out before it. Use
    one per kind of line. Thread-safe."""

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
        """Like `Logger.info`."""
        self._log(logging.INFO, message, *args)

    def warning(self, message: str, *args: object) -> None:
        """Like `Logger.warning`."""
        self._log(logging.WARNING, message, *args)

    def _log(self, level: int, message: str, *args: object) -> None:
        unwritten = self._turn()
        if unwritten is None:
            return
        more = f" ({unwritten} more since the last line)" if unwritten else ""
        self._logger.log(level, message + more, *args, stacklevel=3)

    def _turn(self) -> int | None:
        """Returns how many lines were left out before this one, None if this one is left out."""
        with self._lock:
            now = self._now()
            if now - self._written_at < self._interval:
                self._unwritten += 1
                return None
            unwritten, self._unwritten, self._written_at = self._unwritten, 0, now
            return unwritten
