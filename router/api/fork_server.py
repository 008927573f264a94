"""Processes that are forked from one which has loaded everything: a new one is there in
milliseconds and shares the loaded pages, however the last one ended.

    this process ── spec ──▶ fork server           loads what its workers need, once
                 ◀── its process id ──             and is ready
                 ── 0, a connection ──▶            forks a worker, which serves the connection
                 ◀── the worker's process id ──
                 ── a worker's process id ──▶      kills it

A worker ends with the fork server, and that with this process.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pdserve.common.core.host import die_with_parent, helper_environment, leave

logger = logging.getLogger(__name__)

T = TypeVar("T")

LENGTH = struct.Struct("!Q")  # of the spec, which follows it
_PID = struct.Struct("!i")  # a negative one is an errno
_FORK = 0
START_TIMEOUT = 60.0  # seconds until it has loaded everything
FORK_TIMEOUT = 20.0  # seconds a busy host may take for a fork
STOP_TIMEOUT = 2.0  # seconds a killed process may take to end
LOOK_PERIOD = 1.0  # seconds between two looks at a process that owes an answer
FROZEN_LOOKS = 4  # in a row at which it was stopped, after which it is given up


class FrozenError(ConnectionError):
    """A process that owes an answer was stopped, as by SIGSTOP, and is given up."""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it. One that waits for a busy host's CPU or disk is not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    return False


async def unless_stopped(pid: int, work: Coroutine[Any, Any, T]) -> T:
    """What comes of the work that waits for this process.

    Raises:
        FrozenError: the process stands still.
    """
    task, seen = asyncio.create_task(work), 0
    try:
        while not (await asyncio.wait([task], timeout=LOOK_PERIOD))[0]:
            seen = seen + 1 if is_stopped(pid) else 0
            if seen >= FROZEN_LOOKS:
                raise FrozenError(errno.ETIMEDOUT, f"process {pid} is stopped")
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Fork:
    """A worker as this process sees it."""

    def __init__(
        self,
        server: ForkServer,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._server = server
        self.pid = pid
        self.reader = reader
        self.writer = writer

    @property
    def alive(self) -> bool:
        return not self.reader.at_eof() and self.reader.exception() is None

    async def end(self) -> None:
        """Kills it; returns when it is gone. One that cannot be killed so ends with its server."""
        self._server.kill(self.pid)
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                while await self.reader.read(2**16):
                    pass
        except TimeoutError:
            await self._server.end()
        except ConnectionError:
            pass  # it had not read all it was sent
        finally:
            self.writer.transport.abort()


class ForkServer:
    """This process's end."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._turn = asyncio.Lock()  # one answer is waited for at a time

    @classmethod
    async def start(cls, module: str, spec: bytes) -> ForkServer:
        """Runs `python -m module FD`, which calls `serve`.

        Raises:
            OSError: the host has no room for a process, or this one does not come to life.
        """
        with ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            opened.callback(ours.close)
            ours.setblocking(False)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                # The work of one worker is one thread's: clients share the cores.
                env=helper_environment({"TOKENIZERS_PARALLELISM": "false"}),
                # Ctrl-C in a terminal is for this process, which ends its own itself.
                start_new_session=True,
            )
            server = cls(process, ours)
            try:
                theirs.close()
                await server._say(spec)
            except BaseException:
                await server.end()
                raise
            opened.pop_all()
        return server

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and self._control.fileno() >= 0

    async def ended(self) -> None:
        await self._process.wait()

    async def fork(self) -> Fork:
        """A new worker.

        Raises:
            OSError: the host has no room for one, or the server is gone or stands still.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = await unless_stopped(self._process.pid, self._pid_of(theirs))
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
        return Fork(self, pid, reader, writer)

    def kill(self, pid: int) -> None:
        """The server does it: it knows which of its numbers still name its own workers."""
        with suppress(OSError):  # it is gone, or stands still: then it is ended
            self._control.send(_PID.pack(pid))

    async def end(self) -> None:
        """Kills it, and with it its workers; returns when it is gone."""
        self._give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._process.wait()

    async def _say(self, spec: bytes) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(START_TIMEOUT):
            await loop.sock_sendall(self._control, LENGTH.pack(len(spec)) + spec)
            await self._answer()

    async def _pid_of(self, connection: socket.socket) -> int:
        async with self._turn:
            try:
                async with asyncio.timeout(FORK_TIMEOUT):
                    socket.send_fds(self._control, [_PID.pack(_FORK)], [connection.fileno()])
                    pid = await self._answer()
            except BaseException:
                self._give_up()  # its answer would be taken for the next one's
                raise
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid

    async def _answer(self) -> int:
        data = await asyncio.get_running_loop().sock_recv(self._control, _PID.size)
        if len(data) < _PID.size:
            raise ConnectionError(errno.EPIPE, "the process that forks others ended")
        return int(_PID.unpack(data)[0])

    def _give_up(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._control.close()


# ---- in the fork server --------------------------------------------------------------------------

Work = Callable[[socket.socket], None]
"""A worker's life: serves its connection until that ends."""


def serve(control: socket.socket, load: Callable[[bytes], Work]) -> int:
    """`load` makes of the spec what workers do. Returns when the other end is gone."""
    (size,) = LENGTH.unpack(_exactly(control, LENGTH.size))
    work = load(_exactly(control, size))
    gc.collect()
    gc.freeze()  # a collection in a worker writes to no page that others share
    children: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children))
    control.sendall(_PID.pack(os.getpid()))
    while True:
        data, fds, _, _ = socket.recv_fds(control, _PID.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(data) < _PID.size:
            return 0
        (pid,) = _PID.unpack(data)
        with _children_stay():
            if pid != _FORK:
                if pid in children:
                    os.kill(pid, signal.SIGKILL)
                continue
            answer = _fork(socket.socket(fileno=fds[0]), control, work)
            if answer > 0:
                children.add(answer)
        control.sendall(_PID.pack(answer))


def _fork(connection: socket.socket, control: socket.socket, work: Work) -> int:
    """The worker's process id, or why there is none."""
    assert threading.active_count() == 1, "a lock that another thread holds would stay held"
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if pid:
        connection.close()
        return pid
    status = 1
    try:
        die_with_parent()
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if os.getppid() == parent:
            work(connection)
        status = 0
    except (EOFError, ConnectionError):
        status = 0  # the other end is gone
    except Exception:
        logger.exception("a worker failed")
    finally:
        leave(status)


def _reap(children: set[int]) -> None:
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            children.discard(pid)


@contextmanager
def _children_stay() -> Iterator[None]:
    """Meanwhile no number of a child that has ended can become another process's."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _exactly(control: socket.socket, size: int) -> bytes:
    """Unbuffered: what follows comes with descriptors."""
    data = bytearray()
    while len(data) < size:
        if not (piece := control.recv(size - len(data))):
            raise EOFError
        data += piece
    return bytes(data)
