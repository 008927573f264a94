"""Records closes of descriptors that are not open, or that are another library's eventfd. A double
close may soon hit another owner's descriptor: libzmq and gRPC hang if their eventfd was closed by
other code."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from paths import HELPERS

HAS_COMPILER = bool(shutil.which("g++"))


class CloseAudit:
    """Audits processes that run with `environment`. Without a compiler it records nothing."""

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
        """Returns process, descriptor and stack of every such close."""
        return self._told.read_text() if self._told.exists() else ""
