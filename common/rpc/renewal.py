"""Certificates that are renewed while a process serves: new connections get the new one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from pdserve.common.core.errors import ConfigError

logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two checks

Stamp = tuple[tuple[int, int, int], ...]


class RenewedFiles:
    """Detects when PEM files have changed and are complete. Each user has its own object."""

    def __init__(self, files: Sequence[Path], check: Callable[[], None]) -> None:
        """`check` raises ConfigError if the files do not fit each other."""
        self._files = files
        self._check = check
        self._used = self._refused = self._stamp()
        self._looked = monotonic()
        self._lock = threading.Lock()

    def renewed(self) -> bool:
        """Returns whether the files have changed since they were last used, and are valid. Checks
        at most once per `PERIOD`; invalid files are logged once, and the old ones stay in use."""
        with self._lock:
            return self._renewed(monotonic())

    def _renewed(self, now: float) -> bool:
        if now - self._looked < PERIOD:
            return False
        self._looked = now
        stamp = self._stamp()
        if stamp == self._used:
            return False
        try:
            self._check()
        except ConfigError as error:
            if stamp != self._refused:
                logger.warning("a renewed certificate is not used: %s", error.message)
            self._refused = stamp
            return False
        if self._stamp() != stamp:  # they are being written
            return False
        self._used = stamp
        logger.info("%s has been renewed: new connections use it", self._files[0])
        return True

    def _stamp(self) -> Stamp:
        """Identifies the files' versions; Kubernetes swaps a link to their folder."""
        return tuple(map(_written, self._files))


def _written(file: Path) -> tuple[int, int, int]:
    try:
        found = file.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_ino, found.st_size)
