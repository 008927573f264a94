"""Rank processes that start in a moment: forked from their node, which has imported everything.

Only for nodes that `warm_start.py` forked themselves. A node has threads by then (gRPC's), which
its child lacks and has no use for: a rank does nothing with what it inherits but Python's modules.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from common.distributed import multiprocess, rank_main


def use() -> None:
    """From now on this process's executors fork their ranks."""
    multiprocess.spawn = forked  # type: ignore[assignment]


async def forked(directory: Path, rank: int) -> ForkedRank:
    """In the place of `common.distributed.multiprocess.spawn`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(read, directory, rank)
    os.close(read)
    return ForkedRank(pid, write)


class ForkedRank:
    """As much of `asyncio.subprocess.Process` as an executor uses."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid = pid
        self._stdin = stdin  # its end tells the rank that this process is gone
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watched = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._watched, self._ended)

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        if self._status.done():
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        os.close(self._stdin)
        _, status = os.waitpid(self.pid, 0)
        self._status.set_result(os.waitstatus_to_exitcode(status))


def _become(stdin: int, directory: Path, rank: int) -> Any:
    """Goes on as the rank; never returns, so that nothing of the node's is cleaned up here."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(2, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        code = rank_main.main(directory, rank)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
