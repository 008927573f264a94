"""Compiles C++ for this machine, once, and loads it.

A shared library has a C interface (`extern "C"`, pointers and integers), so it needs no Python
headers and works with every Python. Its file name is a digest of the content of all that it depends
on, so another checkout or virtual environment with the same sources finds it. Processes that start
at the same time build it once, under a lock; a file with the final name is always complete. The
cache folder is accessed only through a checked descriptor (`private_folder.py`), so that it cannot
be exchanged between check and use.
"""

from __future__ import annotations

import ctypes
import errno
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
from functools import partial
from pathlib import Path

from pdserve.common.core.host import default_cache_dir, helper_environment, usable_cores
from pdserve.common.core.private_folder import has_private_file, open_private

logger = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
BUILD_TIMEOUT = 300.0  # seconds per compiler run, which takes a few
LOCK_TIMEOUT = 600.0  # seconds to wait for another process's build
ROOM_NBYTES = 16 << 20  # free bytes that a build needs; it uses less
KEPT = 8  # libraries kept per folder: other versions, compilers or hosts may share it
SCRATCH = ".build-"
INSTALL = "install a C++ compiler (apt-get install g++), or name one in CXX"


class BuildError(Exception):
    """The library cannot be built; the message has the reason and, if known, the fix."""


@dataclass(frozen=True, slots=True)
class Library:
    """The inputs of a shared library."""

    name: str  # its folder in the cache
    sources: Path  # a folder with .cpp and .h files
    flags: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()  # libraries with a soname that are loaded already, by path

    @property
    def files(self) -> list[Path]:
        return self.files_of(".cpp", ".h")

    def files_of(self, *suffixes: str) -> list[Path]:
        return sorted(path for path in self.sources.iterdir() if path.suffix in suffixes)


def load_library(library: Library, cache_dir: Path | None = None) -> ctypes.CDLL:
    """Loads the library; builds it first if the cache lacks it.

    Raises:
        BuildError: no compiler, a failed build, or a cache that is not writable or not private.
    """
    compiler = _find_compiler()
    folder = (cache_dir or default_cache_dir()) / library.name
    try:
        with _opened(folder) as fd:
            return _load(library, compiler, fd)
    except OSError as error:
        raise BuildError(f"{error}: set PDSERVE_CACHE to another folder than {folder}") from error


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = open_private(folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _load(library: Library, compiler: str, fd: int) -> ctypes.CDLL:
    """Loads the library from the folder open as `fd`. The path must contain the library's digest:
    the loader caches by path, and descriptor numbers are reused."""
    name = f"{_digest(library, compiler)}.so"
    folder = Path(f"/proc/self/fd/{fd}")
    if not has_private_file(fd, name):
        with _locked(folder / "lock"):
            if not has_private_file(fd, name):
                _build_atomically(library, compiler, folder / name, fd)
                _forget_oldest(folder)
    return ctypes.CDLL(str(folder / name))


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler found: {INSTALL}")


# ---- the name of a library ----


def _digest(library: Library, compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (compiler, _version(compiler), *FLAGS, *library.flags, _cpu()):
        digest.update(f"{part}\0".encode())
    for path in (*library.files, *map(Path, library.linked)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(compiler: str) -> str:
    """Tells compilers apart without running them, which each process would do at its start."""
    found = os.stat(compiler)
    return f"{os.path.realpath(compiler)} {found.st_size} {found.st_mtime_ns}"


def _cpu() -> str:
    """Returns what -march=native depends on: hosts with different CPUs may share a home folder."""
    keys = ("vendor_id", "cpu family", "model", "flags", "CPU part", "Features")
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    facts = [line for line in lines if line.partition(":")[0].strip() in keys]
    return " ".join([platform.machine(), *facts])


# ---- building ----


def _build_atomically(library: Library, compiler: str, result: Path, fd: int) -> None:
    """Builds into a scratch folder and renames the result. Runs under the lock, so existing scratch
    folders belong to killed processes. The compiler inherits `fd`, through which `result` leads."""
    for left in result.parent.glob(f"{SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH, dir=result.parent) as scratch,
        ThreadPoolExecutor(usable_cores()) as threads,
    ):
        _check_room(Path(scratch) / "room")
        logger.info("compiling %s for this machine, once", library.name)
        run = partial(_run, fd=fd, scratch=scratch)
        flags = [compiler, *FLAGS, *library.flags]

        def compiled(source: Path) -> str:
            run([*flags, "-c", str(source), "-o", f"{scratch}/{source.stem}.o"])
            return f"{scratch}/{source.stem}.o"

        objects = list(threads.map(compiled, library.files_of(".cpp")))
        made = f"{scratch}/library.so"
        # -z defs: a missing symbol fails here, not during a step.
        run([compiler, "-shared", "-Wl,-z,defs", "-o", made, *objects, *_links(library)])
        os.replace(made, result)


def _links(library: Library) -> list[str]:
    """Returns flags by which the result has the linked libraries' names, never their folders."""
    return [
        f for path in map(Path, library.linked) for f in (f"-L{path.parent}", f"-l:{path.name}")
    ]


def _check_room(path: Path) -> None:
    """Allocates and frees the bytes that a build needs, so that a full disk fails before half a
    minute of compiling. Raises OSError."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_NBYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        what = f"compiling needs {ROOM_NBYTES >> 20} MiB of disk"
        raise OSError(f"{what} ({error.strerror}): free some space") from error
    finally:
        path.unlink(missing_ok=True)


def _run(command: list[str], fd: int, scratch: str) -> str:
    """Runs `command` and returns its output. `scratch`: a folder for temporary files, which may lie
    below the open folder `fd`."""
    environment = helper_environment({"TMPDIR": scratch})
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT,
            env=environment,
            pass_fds=(fd,),
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {BUILD_TIMEOUT:.0f} s") from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise BuildError(f"{command[0]} failed ({first.strip()}): {INSTALL}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock; raises BuildError if another process keeps it for LOCK_TIMEOUT."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    with path.open("w") as file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise BuildError(f"another process has held {path} for {LOCK_TIMEOUT:.0f} s")
            time.sleep(0.05)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _forget_oldest(folder: Path) -> None:
    """Deletes the oldest libraries. Processes that have loaded one keep it."""
    newest_first = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[KEPT:]:
        path.unlink()
