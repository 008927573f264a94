"""Each rank's folder in the shared directory: its inbox, and its sign of life.

<directory>/<name>/lock             flocked by the rank; the lock ends with its process
<directory>/<name>/<number>.run     runs that sources have put here; see `runs.py`
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

NAME = "^[0-9a-f]{32}$"


class Folder:
    """This rank's own folder. It gets its name only after it is locked."""

    def __init__(self, directory: Path) -> None:
        self.name = secrets.token_hex(16)
        self.path = directory / self.name
        hidden = directory / f".{self.name}"
        hidden.mkdir(mode=0o700)
        self._lock = os.open(hidden / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        hidden.rename(self.path)

    def close(self) -> None:
        """Releases the lock first: runs that vanish after that were not taken."""
        (self.path / "lock").unlink(missing_ok=True)
        os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)


def is_alive(folder: Path) -> bool:
    """Whether the rank that owns `folder` has neither closed nor died."""
    try:
        lock = os.open(folder / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def sweep(directory: Path) -> None:
    """Removes the folders of ranks that died without closing."""
    for folder in directory.iterdir():
        if re.match(NAME, folder.name) and not is_alive(folder):
            shutil.rmtree(folder, ignore_errors=True)
