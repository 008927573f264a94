"""Runs work that a client's input or a model's files could make endless: in a child process with
its own bounds. However the child ends, this process continues."""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.common.core.errors import ConfigError, Unavailable, is_defect
from pdserve.common.core.host import die_with_parent, host_errors_as_config_errors
from pdserve.common.core.printable import printable

_PIECE = 2**16  # bytes of one read
_MAX_REASON = 300  # characters of a library's error
_DONE, _REFUSED = b"+", b"-"


@dataclass(frozen=True, slots=True)
class Bounds:
    cpu_seconds: float
    memory: int  # bytes of data beyond what its parent has
    wall_seconds: int = 45  # a busy host takes longer; less than a body may take in all

    def __str__(self) -> str:
        return f"{self.cpu_seconds:g} s of CPU time or {self.memory >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Outcome:
    result: bytes | None  # None: the child failed, or exceeded its bounds
    seconds: float  # of CPU


def run_apart(work: Callable[[], bytes], bounds: Bounds) -> Outcome:
    """Runs `work` in a child; only one thread of the calling process may hold locks.

    Raises:
        Unavailable: the host is too busy for it, or has too little memory.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, bounds, theirs)
    os.close(theirs)
    result = _read(ours, child, time.monotonic() + bounds.wall_seconds)
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGKILL):
        raise Unavailable(
            f"the host is too busy: the work did not end within {bounds.wall_seconds} s",
            code="PREPARATION_FAILED",
            retry_after=2.0,
        )
    done = result if status == 0 else None
    return Outcome(done, usage.ru_utime + usage.ru_stime)


def try_files(what: str, work: Callable[[], bytes], bounds: Bounds) -> bytes:
    """Runs work on a model's files in a child, like `run_apart`. `what` names the work and files in
    errors.

    Raises:
        ConfigError: the work raised an error, or exceeded the bounds.
        Unavailable: the host is too busy.
    """
    result = run_apart(lambda: _tried(what, work), bounds).result
    if result is None:
        raise ConfigError(
            f"{what} takes more than {bounds}, or ends the process: the files are damaged"
        )
    if result.startswith(_REFUSED):
        raise ConfigError(result[1:].decode())
    return result[1:]


def _tried(what: str, work: Callable[[], bytes]) -> bytes:
    try:
        with host_errors_as_config_errors():
            return _DONE + work()
    except ConfigError as error:
        reason = error.message
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if not is_defect(error) or isinstance(error, MemoryError):
            raise
        reason = f"{what} fails: {printable(f'{type(error).__name__}: {error}', _MAX_REASON)}"
    return _REFUSED + reason.encode(errors="backslashreplace")


def _read(pipe: int, child: int, deadline: float) -> bytes:
    """Returns everything that the child writes. A stopped child misses its own alarm, so it is
    killed here."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    with open(pipe, "rb", buffering=0) as file:
        while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            if not (part := file.read(_PIECE)):
                return b"".join(parts)
            parts.append(part)
    os.kill(child, signal.SIGKILL)
    return b""


def _work_and_exit(work: Callable[[], bytes], bounds: Bounds, pipe: int) -> None:
    """Runs as the child's main function. The signals of its timers end it at any point."""
    status = 1
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, bounds.cpu_seconds)
        signal.alarm(bounds.wall_seconds)
        die_with_parent()
        logging.disable()  # the thread that writes the log is the parent's
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + bounds.memory, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries write there as they fail
        result = work()
        signal.setitimer(signal.ITIMER_PROF, 0)
        with open(pipe, "wb") as file:
            file.write(result)
        status = 0
    finally:
        os._exit(status)


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])
