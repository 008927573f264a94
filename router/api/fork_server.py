"""A process that loads everything once and forks workers. A new worker starts within milliseconds
and shares the loaded pages, however the last one ended.

    this process ── spec ──▶ fork server           loads what its workers need, once
                 ◀── its process id ──             is ready
                 ── 0, a connection ──▶            forks a worker, which serves the connection
                 ◀── the worker's process id ──
                 ── a worker's process id ──▶      kills it

A worker ends with the fork server, and the fork server ends with this process.
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

LENGTH = struct.Struct("!Q")  # bytes that follow
_PID = struct.Struct("!i")  # a negative one is an errno
_FORK = 0
START_TIMEOUT = 60.0  # seconds to load everything
FORK_TIMEOUT = 20.0  # seconds a busy host may take for a fork
STOP_TIMEOUT = 2.0  # seconds a killed process may take to end
LOOK_PERIOD = 1.0  # seconds between two checks of a process that owes an answer
FROZEN_LOOKS = 4  # checks in a row that find it stopped, after which it is given up


class FrozenError(ConnectionError):
    """A process that owes an answer is stopped, for instance by SIGSTOP."""


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped the process. Waiting for CPU or disk does not count."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    return False


async def unless_stopped(pid: int, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that needs an answer from this process.

    Raises:
        FrozenError: the process is stopped.
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
    """A worker, seen from this process."""

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
        """Kills the worker and waits until it is gone; if that fails, ends its server, too."""
        self._server.kill(self.pid)
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                while await self.reader.read(2**16):
                    pass
        except TimeoutError:
            await self._server.end()
        except ConnectionError:
            pass  # it had not read everything
        finally:
            self.writer.transport.abort()


# The work of one worker is one thread's: clients share the cores.
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}


async def spawn(module: str, control: int) -> asyncio.subprocess.Process:
    """Starts a fork server that takes its orders from the descriptor `control`."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(control)),
        pass_fds=[control],
        stdin=asyncio.subprocess.DEVNULL,
        env=helper_environment(ENVIRONMENT),
        # Ctrl-C in a terminal is for this process alone, which ends its children itself.
        start_new_session=True,
    )


class ForkServer:
    """The fork server, seen from this process."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._turn = asyncio.Lock()  # one caller waits for an answer at a time

    @classmethod
    async def start(cls, module: str, spec: bytes) -> ForkServer:
        """Runs `python -m module FD`, which calls `serve`.

        Raises:
            OSError: the host has no room for a process, or the process does not start.
        """
        with ExitStack() as opened:
            ours, theirs = socket.socketpair()
            opened.enter_context(theirs)
            opened.callback(ours.close)
            ours.setblocking(False)
            server = cls(await spawn(module, theirs.fileno()), ours)
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
        """Forks a worker.

        Raises:
            OSError: the host has no room for it, or the server is gone or stopped.
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
        """Asks the server to kill it: the server knows which process ids are still its workers'."""
        with suppress(OSError):  # a server that is gone or stopped has been ended
            self._control.send(_PID.pack(pid))

    async def end(self) -> None:
        """Kills the server and with it its workers; returns when it is gone."""
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
                self._give_up()  # a late answer would be taken for the next one's
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


# ---- in the fork server ----------------------------------------------------------------------

Work = Callable[[socket.socket], None]
"""A worker's main function; it serves its connection until that ends."""


def serve(control: socket.socket, load: Callable[[bytes], Work]) -> int:
    """Serves requests to fork; `load` turns the spec into the workers' main function. Returns when
    the other end is gone."""
    (size,) = LENGTH.unpack(_exactly(control, LENGTH.size))
    work = load(_exactly(control, size))
    gc.collect()
    gc.freeze()  # so that a collection in a worker writes to no shared page
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
    """Returns the worker's process id, or a negative errno."""
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
    """Keeps the process id of a child that has ended from being used again."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _exactly(control: socket.socket, size: int) -> bytes:
    """Reads `size` bytes without buffering, because descriptors come with the next ones."""
    data = bytearray()
    while len(data) < size:
        if not (piece := control.recv(size - len(data))):
            raise EOFError
        data += piece
    return bytes(data)
