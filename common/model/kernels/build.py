"""Builds the C++ beside this file for this machine, once, and loads it.

The shared library has a C interface (`extern "C"`, pointers and integers), so that it needs
neither torch's headers, which take half a minute to compile, nor a rebuild for each Python. It is
linked with the OpenMP that torch has loaded: a second one would be a second pool of threads, which
fights the first for the cores.

A library's name is a digest of all that it depends on. Processes that start at once build it once,
under a lock; a file of the final name is always whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pdserve.common.core.host import default_cache_dir

SOURCES = Path(__file__).parent
# No -ffast-math: NaN and infinity mean something here. No contraction: what torch rounds twice is
# rounded twice; where a fused multiply-add is meant, the source says so.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno",
    "-fno-trapping-math", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra",
)  # fmt: skip
BUILD_TIMEOUT = 120.0  # seconds of a compiler; it takes a few
LOCK_TIMEOUT = 180.0  # seconds until another process's build is not waited for any longer
KEPT = 8  # libraries in the cache: of other versions, compilers or hosts that share the folder
INSTALL = "install a C++ compiler (apt-get install g++), or name one in CXX"


class BuildError(Exception):
    """There is no library for this machine; the message has the reason, and the mend if one is
    known."""


def load_library(cache_dir: Path | None = None) -> ctypes.CDLL:
    """The kernels, built now if the cache does not hold them.

    Raises:
        BuildError: there is no compiler, it failed, or the cache cannot be written to or trusted.
    """
    compiler, openmp = _find_compiler(), _loaded_openmp()
    folder = (cache_dir or default_cache_dir()) / "kernels"
    try:
        library = folder / f"{_digest(compiler, openmp)}.so"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if not library.is_file():
            with _locked(folder / "lock"):
                if not library.is_file():
                    _build_atomically(compiler, openmp, library)
                    _forget_oldest(folder)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{error}: PDSERVE_CACHE names another folder than {folder}") from error


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler was found: {INSTALL}")


def _loaded_openmp() -> str | None:
    """The OpenMP runtime of this process, which torch brought with it; None: torch has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path and Path(path).name.startswith(("libgomp", "libiomp5")):
            return f"/{path}"
    return None


def _check_owner(folder: Path) -> None:
    """What lies there is executed."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BuildError(
            f"{folder} belongs to another user, or others may write to it: chmod go-w it, or name "
            "another folder in PDSERVE_CACHE"
        )


# ---- the name of a library ----


def sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _digest(compiler: str, openmp: str | None) -> str:
    digest = hashlib.blake2b(digest_size=16)
    version = _run([compiler, "--version"])
    for part in (compiler, version, *FLAGS, openmp, torch.__version__, _cpu()):
        digest.update(f"{part}\0".encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu() -> str:
    """What -march=native depends on: a home folder may be shared by hosts of several kinds."""
    keys = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    facts = [line for line in lines if line.partition(":")[0].strip() in keys]
    return " ".join([platform.machine(), *facts])


# ---- building ----


def _build_atomically(compiler: str, openmp: str | None, library: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as scratch:
        objects = [_compile(compiler, path, scratch) for path in sources() if path.suffix == ".cpp"]
        result = f"{scratch}/library.so"
        runtime = [] if openmp is None else [openmp]
        # -z defs: what the loaded OpenMP lacks fails here, not in the midst of a step.
        _run([compiler, "-shared", "-Wl,-z,defs", "-o", result, *objects, *runtime])
        os.replace(result, library)


def _compile(compiler: str, source: Path, scratch: str) -> str:
    result = f"{scratch}/{source.stem}.o"
    _run([compiler, *FLAGS, "-c", str(source), "-o", result])
    return result


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {BUILD_TIMEOUT:.0f} s") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise BuildError(f"{command[0]} failed ({first.strip()}): {INSTALL}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises BuildError if another process holds it for too long: it may stand still."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    with path.open("w") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise BuildError(f"another process holds {path} for {LOCK_TIMEOUT:.0f} s")
            time.sleep(0.05)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget_oldest(folder: Path) -> None:
    """A library that a process has loaded stays loaded."""
    newest_first = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[KEPT:]:
        path.unlink()
