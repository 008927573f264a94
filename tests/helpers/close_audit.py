"""Tells who closes a descriptor that is not open, or another library's eventfd. One who does the
former closes another's a moment later: libzmq and gRPC wait for ever for a wake-up through an
eventfd that somebody else closed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from paths import HELPERS

HAS_COMPILER = bool(shutil.which("g++"))


class CloseAudit:
    """Audits the processes that run in `environment`. Without a compiler it hears of nothing."""

    def __init__(self, folder: Path) -> None:
        self._told = folder / "told"
        self.environment: dict[str, str] = {}
        if HAS_COMPILER:
            library, source = folder / "close_audit.so", HELPERS / "close_audit.cpp"
            command = ["g++", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
            subprocess.run(command, check=True)
            loaded = filter(None, [str(library), os.environ.get("LD_PRELOAD")])
            self.environment["LD_PRELOAD"] = " ".join(loaded)
            self.environment["CLOSE_AUDIT"] = str(self._told)

    def told(self) -> str:
        """Process, descriptor and stack of every such close."""
        return self._told.read_text() if self._told.exists() else ""
