"""Ranks for executors in a test's process, forked from a process that has imported torch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.warm_start import alive
from pdserve.common.distributed import rank_main
from warm import shared


def start(module: str, *flags: str) -> int:
    """Runs `main` of the module in a fork that finds modules where this process does and writes to
    its standard error, in its environment; returns its pid."""
    shared().load(module)
    stderr = Path(f"/proc/{os.getpid()}/fd/2")
    environment = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    return shared().start(module, [*flags], stderr, (f"{__name__}:find", *sys.path), environment)


def find(*path: str) -> None:
    sys.path[:] = path


async def spawn(directory: Path, rank: int) -> ForkedRank:
    """Replaces `pdserve.common.distributed.launch.spawn`."""
    return ForkedRank(directory, rank)


class ForkedRank:
    """The part of `asyncio.subprocess.Process` that an executor uses."""

    stdin = None  # no stream of an event loop: the pipe is closed after the rank's end

    def __init__(self, directory: Path, rank: int) -> None:
        self._pipe: tuple[int, ...] = os.pipe()
        theirs = f"/proc/{os.getpid()}/fd/{self._pipe[0]}"
        self.pid = start(__name__, str(directory), str(rank), theirs)

    async def wait(self) -> int:
        with suppress(ProcessLookupError):
            await _gone(self.pid)
        while (code := shared().exit_code(self.pid)) is None:
            await asyncio.sleep(0.001)
        for end in self._pipe:
            os.close(end)
        self._pipe = ()
        return code

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


async def _gone(pid: int) -> None:
    loop, gone, descriptor = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def end(pid: int) -> None:
    """Kills a fork and waits until it is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    while alive(pid):
        time.sleep(0.002)


def main(flags: list[str]) -> int:
    directory, rank, stdin = flags
    os.dup2(os.open(stdin, os.O_RDONLY), 0)
    return rank_main.main(Path(directory), int(rank))
