"""Fast starts of processes below a warm one: a node's ranks, and the process that preprocesses a
router's large bodies.

    node ── zygote ── (a moment) ── rank        forks
    node ── rank                                the result: the node is the rank's parent

Only for roles that `warm_start.py` forked themselves. The zygote is forked while the role has one
thread and nothing open, so that ranks inherit neither gRPC's threads nor its descriptors.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from pdserve.common.core.host import die_with_parent
from pdserve.common.distributed import launch, rank_main, shared_memory
from pdserve.router.api import fork_server

NAME = "zygote"
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
_libc = ctypes.CDLL(None)


def use(role: str) -> Zygote:
    """Has a node's executors fork their ranks, and a router its fork server, from now on. Call this
    while the process has one thread."""
    return _use_in_router() if role == "router" else _use_in_node()


def _use_in_node() -> Zygote:
    zygote = Zygote(_run_rank)

    async def spawn(directory: Path, rank: int) -> Forked:
        """Replaces `pdserve.common.distributed.launch.spawn`."""
        read, write = os.pipe()
        try:
            return Forked(zygote.fork(f"{rank} {directory}", read), write)
        finally:
            os.close(read)

    launch.spawn = spawn  # type: ignore[assignment]
    return zygote


def _use_in_router() -> Zygote:
    zygote = Zygote(_run_fork_server)

    async def spawn(module: str, control: int) -> Forked:
        """Replaces `pdserve.router.api.fork_server.spawn`."""
        return Forked(zygote.fork(module, control))

    fork_server.spawn = spawn  # type: ignore[assignment]
    return zygote


def _run_rank(order: str) -> int:
    rank, _, directory = order.partition(" ")
    shared_memory._SPIN = 0.0  # it would take the cores from other nodes of this host
    return rank_main.main(Path(directory), int(rank))


def _run_fork_server(module: str) -> int:
    os.environ.update(fork_server.ENVIRONMENT)
    return int(import_module(module).main(0))


class Zygote:
    """Forks children of this process, each of which runs `main`. Call `close` before the process
    ends."""

    def __init__(self, main: Callable[[str], int]) -> None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans below become this process's children
        parent = os.getpid()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._orders.close()
            _serve(theirs, main, parent)
        theirs.close()

    def fork(self, order: str, stdin: int) -> int:
        """Returns the pid of a child that runs `main(order)`, with `stdin` as its descriptor 0."""
        socket.send_fds(self._orders, [order.encode()], [stdin])
        return int(self._orders.recv(64))

    def close(self) -> None:
        self._orders.close()
        os.waitpid(self._pid, 0)


class Forked:
    """A forked process, with the part of `asyncio.subprocess.Process` that callers use."""

    stdin = None  # no caller closes the pipe

    def __init__(self, pid: int, stdin: int | None = None) -> None:
        """`stdin`: kept open while the process runs; its EOF tells a rank that this process has
        ended."""
        self.pid = pid
        self._stdin = stdin
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watched = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._watched, self._ended)

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        if self._status.done():
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        if self._stdin is not None:
            os.close(self._stdin)
        _, status = os.waitpid(self.pid, 0)
        self._status.set_result(os.waitstatus_to_exitcode(status))


# ---- in the zygote ----


def _serve(orders: socket.socket, main: Callable[[str], int], parent: int) -> Any:
    die_with_parent()
    _libc.prctl(PR_SET_NAME, NAME.encode())
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 4096, 1)
        if not order:
            os._exit(0)
        (stdin,) = descriptors
        between = os.fork()
        if between == 0:
            if (pid := os.fork()) == 0:
                _become(stdin, main, order.decode(), parent)
            orders.send(str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        os.close(stdin)


def _become(stdin: int, main: Callable[[str], int], order: str, parent: int) -> Any:
    """Runs `main` once this process is a child of `parent`; never returns."""
    code = 1
    try:
        while os.getppid() != parent:
            os.kill(parent, 0)  # raises once the parent has ended
            time.sleep(0.001)
        _libc.prctl(PR_SET_NAME, b"python3")
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(2, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        code = main(order)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
