"""Folders that processes make once in a cache."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pdserve.common.core.waits import file_lock, saying


def ensure_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Makes the folder unless it exists: `make` fills a temporary one, which is then renamed, so
    that `folder` is never incomplete. Of several processes that call this at once, one makes it
    and the others wait."""
    if folder.is_dir():
        return
    with file_lock(folder.parent / "lock", f"makes {folder.name}"):
        if not folder.is_dir():
            with saying(f"converting {folder.name} to a checkpoint folder, once"):
                _make_atomically(folder, make)


def _make_atomically(folder: Path, make: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
