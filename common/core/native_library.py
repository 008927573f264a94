"""The inputs of a shared library in C++, and the compiler that makes it.

A shared library has a C interface (`extern "C"`, pointers and integers), so it needs no Python
headers and works with every Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pdserve.common.core.host import helper_environment, usable_cores

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
BUILD_TIMEOUT = 600.0  # seconds per compiler run, which takes some on an idle core
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

    def digest(self, parts: Sequence[str], files: Sequence[Path] = ()) -> str:
        """Returns a digest of `parts`, of the flags, and of names and contents of the sources and
        of `files`."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (*parts, *FLAGS, *self.flags):
            digest.update(f"{part}\0".encode())
        for path in (*self.files, *files):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler found: {INSTALL}")


def build(
    library: Library,
    command: Sequence[str],
    links: Sequence[str],
    result: str,
    scratch: str,
    fd: int | None = None,
    compiled: Callable[[], None] = lambda: None,
) -> None:
    """Builds `result` in the folder `scratch`, which may lie below the open folder `fd`. `command`:
    the compiler and flags for the CPU; `links`: flags of the link step. Calls `compiled` after each
    source file, in some thread.

    Raises:
        BuildError: the compiler failed or took too long.
    """
    run = partial(_run, fd=fd, scratch=scratch)

    def compile_one(source: Path) -> str:
        made = f"{scratch}/{source.stem}.o"
        run([*command, *FLAGS, *library.flags, "-c", str(source), "-o", made])
        compiled()
        return made

    with ThreadPoolExecutor(usable_cores()) as threads:
        objects = list(threads.map(compile_one, library.files_of(".cpp")))
    run([*command, "-shared", *objects, *links, "-o", result])


def _run(command: list[str], fd: int | None, scratch: str) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT,
            env=helper_environment({"TMPDIR": scratch}),
            pass_fds=() if fd is None else (fd,),
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {BUILD_TIMEOUT:.0f} s") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run ({error.strerror}): {INSTALL}") from error
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise BuildError(f"{command[0]} was killed by {name}: give it more memory")
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise BuildError(f"{command[0]} failed ({first.strip()}): {INSTALL}")
