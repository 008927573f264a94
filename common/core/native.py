"""Loads C++ libraries: prebuilt ones, or compiled for this machine, once.

The file name of a compiled library is a digest of the content of all that it depends on, so another
checkout or virtual environment with the same sources finds it. Processes that start at the same
time build it once, under a lock; a file with the final name is always complete. The cache folder is
accessed only through a checked descriptor (`private_folder.py`), so that it cannot be exchanged
between check and use.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.common.core import prebuilt
from pdserve.common.core.host import default_cache_dir
from pdserve.common.core.native_library import BuildError, Library, build, find_compiler
from pdserve.common.core.private_folder import has_private_file, open_private
from pdserve.common.core.waits import file_lock, saying

logger = logging.getLogger(__name__)

NATIVE = "-march=native"
LOCK_TIMEOUT = 1200.0  # seconds to wait for another process's build
ROOM_NBYTES = 16 << 20  # free bytes that a build needs; it uses less
KEPT = 8  # libraries kept per folder: other versions, compilers or hosts may share it
SCRATCH = ".build-"


def load_library(
    library: Library, cache_dir: Path | None = None, use_prebuilt: bool = True
) -> ctypes.CDLL:
    """Loads the prebuilt library if the installation has one with all code for this CPU. Otherwise,
    and without `use_prebuilt`, loads the compiled one; builds it first if the cache lacks it.

    Raises:
        BuildError: no prebuilt library fits, and there is no compiler, a failed build, or a cache
            that is not writable or not private.
    """
    ready = prebuilt.find(library) if use_prebuilt else None
    if ready is None:
        return _compiled(library, cache_dir)
    if not ready.lacks:
        try:
            return ready.load()
        except OSError as error:
            logger.warning("the prebuilt %s cannot be used: %s", library.name, error)
            return _compiled(library, cache_dir)
    try:
        return _compiled(library, cache_dir)
    except BuildError as error:
        lacks = ", ".join(sorted(ready.lacks))
        logger.warning("using the prebuilt %s, without %s: %s", library.name, lacks, error)
        return ready.load()


def _compiled(library: Library, cache_dir: Path | None) -> ctypes.CDLL:
    compiler = find_compiler()
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
        with file_lock(folder / "lock", f"compiles {library.name}", LOCK_TIMEOUT):
            if not has_private_file(fd, name):
                _build_atomically(library, compiler, folder / name, fd)
                _forget_oldest(folder)
    return ctypes.CDLL(str(folder / name))


# ---- the name of a library ----


def _digest(library: Library, compiler: str) -> str:
    parts = (compiler, _version(compiler), NATIVE, _cpu())
    return library.digest(parts, list(map(Path, library.linked)))


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
    files, done = len(library.files_of(".cpp")), 0

    def compiled() -> None:
        nonlocal done
        done += 1

    def what() -> str:
        return f"compiling {library.name} for this machine, once ({done} of {files} files)"

    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=result.parent) as scratch:
        _check_room(Path(scratch) / "room")
        made = f"{scratch}/library.so"
        # -z defs: a missing symbol fails here, not during a step.
        links = ["-Wl,-z,defs", *_links(library)]
        with saying(what, soon=True):
            build(library, (compiler, NATIVE), links, made, scratch, fd, compiled)
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


def _forget_oldest(folder: Path) -> None:
    """Deletes the oldest libraries. Processes that have loaded one keep it."""
    newest_first = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in newest_first[KEPT:]:
        path.unlink()
