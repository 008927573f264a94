"""Builds C++ for this machine, once, and loads it.

A shared library has a C interface (`extern "C"`, pointers and integers), so that it needs no
headers but the compiler's and no rebuild for each Python. Its name is a digest of all that it
depends on. Processes that start at once build it once, under a lock; a file of the final name is
always whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.common.core.host import default_cache_dir, helper_environment, usable_cores

logger = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
BUILD_TIMEOUT = 300.0  # seconds of a compiler; it takes a few
LOCK_TIMEOUT = 600.0  # seconds until another process's build is not waited for any longer
KEPT = 8  # libraries in a folder: of other versions, compilers or hosts that share it
SCRATCH = ".build-"
INSTALL = "install a C++ compiler (apt-get install g++), or name one in CXX"


class BuildError(Exception):
    """There is no library for this machine; the message has the reason, and the mend if one is
    known."""


@dataclass(frozen=True, slots=True)
class Library:
    """What a shared library is made of. `salt`: what it depends on besides, such as the version of
    what it is linked with."""

    name: str  # of its folder in the cache
    sources: Path  # a folder with .cpp and .h files
    flags: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()  # libraries, by path
    salt: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.sources.iterdir() if path.suffix in (".cpp", ".h"))


def load_library(library: Library, cache_dir: Path | None = None) -> ctypes.CDLL:
    """The library, built now if the cache does not hold it.

    Raises:
        BuildError: there is no compiler, it failed, or the cache cannot be written to or trusted.
    """
    compiler = _find_compiler()
    folder = (cache_dir or default_cache_dir()) / library.name
    try:
        result = folder / f"{_digest(library, compiler)}.so"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
        if not result.is_file():
            with _locked(folder / "lock"):
                if not result.is_file():
                    _build_atomically(library, compiler, result)
                    _forget_oldest(folder)
        return ctypes.CDLL(str(result))
    except OSError as error:
        raise BuildError(f"{error}: PDSERVE_CACHE names another folder than {folder}") from error


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler was found: {INSTALL}")


def _check_owner(folder: Path) -> None:
    """What lies there is executed."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BuildError(
            f"{folder} belongs to another user, or others may write to it: chmod go-w it, or name "
            "another folder in PDSERVE_CACHE"
        )


# ---- the name of a library ----


def _digest(library: Library, compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    version = _run([compiler, "--version"])
    for part in (compiler, version, *FLAGS, *library.flags, *library.linked, *library.salt, _cpu()):
        digest.update(f"{part}\0".encode())
    for path in library.files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu() -> str:
    """What -march=native depends on: a home folder may be shared by hosts of several kinds."""
    keys = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    facts = [line for line in lines if line.partition(":")[0].strip() in keys]
    return " ".join([platform.machine(), *facts])


# ---- building ----


def _build_atomically(library: Library, compiler: str, result: Path) -> None:
    """Under the lock: a scratch folder that is there was left by a process that was killed."""
    for left in result.parent.glob(f"{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    logger.info("compiling %s for this machine, once", library.name)
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH, dir=result.parent) as scratch,
        ThreadPoolExecutor(usable_cores()) as threads,
    ):
        sources = [path for path in library.files if path.suffix == ".cpp"]
        compiling = [threads.submit(_compile, library, compiler, each, scratch) for each in sources]
        objects = [each.result() for each in compiling]
        made = f"{scratch}/library.so"
        # -z defs: what a linked library lacks fails here, not in the midst of a step.
        _run([compiler, "-shared", "-Wl,-z,defs", "-o", made, *objects, *library.linked])
        os.replace(made, result)


def _compile(library: Library, compiler: str, source: Path, scratch: str) -> str:
    result = f"{scratch}/{source.stem}.o"
    _run([compiler, *FLAGS, *library.flags, "-c", str(source), "-o", result])
    return result


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT,
            env=helper_environment(),
        )
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
