"""Finds what Triton lacks on a GPU's host, as read in the sources of versions 3.6 and 3.7
(`runtime/build.py`, `backends/nvidia/driver.py`). At the first launch Triton compiles a C module
that calls CUDA's driver, and each kernel with the assembler that it brings along."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from pdserve.common.core.host import default_cache_dir

_CACHE_DIR = "TRITON_CACHE_DIR"


def use_cache_dir() -> None:
    """Makes Triton keep what it compiles in `$PDSERVE_CACHE/triton`, unless `$TRITON_CACHE_DIR`
    names a folder. Its own default, `~/.triton`, is read-only in many containers."""
    os.environ.setdefault(_CACHE_DIR, str(default_cache_dir() / "triton"))


def missing() -> str:
    """Returns what Triton lacks here and how to mend it; "" if nothing. Needs no GPU."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton (torch for CUDA brings it)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler: install gcc, or name a compiler in CC"
    if not (_include_dir() / "Python.h").exists():
        return f"Triton finds no {_include_dir()}/Python.h: install Python's headers (python3-dev)"
    folder = Path(os.environ.get(_CACHE_DIR) or Path.home() / ".triton" / "cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"Triton cannot keep kernels ({error}): set {_CACHE_DIR} to a folder of this user"
    if not os.access(folder, os.W_OK):
        return f"Triton cannot write to {folder}: set {_CACHE_DIR} to a folder of this user"
    return ""


def _include_dir() -> Path:
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's; Triton takes the headers of the system's Python
        scheme = "posix_prefix"
    return Path(sysconfig.get_paths(scheme=scheme)["include"])
