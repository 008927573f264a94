"""Ranks for executors in a test's process, forked from a process that has imported torch."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from pdserve.common.distributed import rank_main


@cache
def warm() -> ForkServerContext:
    """Returns a context whose processes have torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pdserve.common.worker.worker", "pdserve.common.distributed.measure"]
    )
    return context


async def spawn(directory: Path, rank: int) -> ForkedRank:
    """Replaces `pdserve.common.distributed.launch.spawn`."""
    return ForkedRank(directory, rank)


class ForkedRank:
    """The part of `asyncio.subprocess.Process` that an executor uses."""

    stdin = None  # no stream of an event loop: the pipe is closed after the rank's end

    def __init__(self, directory: Path, rank: int) -> None:
        theirs, self._stdin = warm().Pipe(duplex=False)
        self._process: ForkServerProcess = warm().Process(
            target=_become, args=(directory, rank, theirs)
        )
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    async def wait(self) -> int:
        await asyncio.to_thread(self._process.join)
        self._stdin.close()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _become(directory: Path, rank: int, stdin: Connection) -> None:
    os.setsid()
    os.dup2(stdin.fileno(), 0)
    os._exit(rank_main.main(directory, rank))
