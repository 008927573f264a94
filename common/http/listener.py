"""Accepts connections up to a limit. asyncio's own servers accept until the process is out of file
descriptors, and then log an error 128 times a second."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress

from pdserve.common.core.throttle import LogThrottle
from pdserve.common.http.connection import HEADER_TIMEOUT, Crowd

logger = logging.getLogger(__name__)

BACKLOG = 128  # connections the kernel has accepted and this process has not
# Connections accepted in one turn of the event loop. In a flood a new one has several turns to ask
# for something before so many others come that it must make room.
_BATCH = 8
_PAUSE = 0.1  # seconds without accepting when all connections are busy
_PAUSE_FOR_ROOM = 0.01  # seconds in which aborted connections close
_LOOK = 0.01  # seconds between two checks whether new connections have sent a request
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Listener:
    """Accepts on `sockets`, which it then owns. When the limit is reached, a new connection
    replaces a waiting one; when all are busy, new ones wait in the kernel."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        crowd: Crowd,
        make: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sockets = sockets
        self._crowd = crowd
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], None] = {}  # in the TLS handshake, oldest first
        self._resuming: asyncio.TimerHandle | None = None
        self._log = LogThrottle(logger)

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Raises OSError if another process listens there; all sockets are closed then."""
        try:
            for each in self._sockets:
                each.setblocking(False)
                each.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        self._resume()

    async def finish(self, timeout: float) -> None:
        """Accepts the connections that are in the kernel's queue, which closing would reset, and no
        more; waits up to `timeout` seconds until each of them has sent a request."""
        self._pause_for(None)
        for each in self._sockets:
            if each.fileno() >= 0:
                self._accept_all(each)
                each.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._opening or self._crowd.num_silent:
                    await asyncio.sleep(_LOOK)

    def _accept_all(self, listening: socket.socket) -> None:
        with suppress(OSError):  # the queue is empty, or file descriptors have run out
            while not self._crowd.is_full(len(self._opening) + 1):
                accepted, _ = listening.accept()
                self._open(accepted)

    def close(self) -> None:
        """Closes the sockets. Calling it again does nothing."""
        self._pause_for(None)
        for each in self._sockets:
            each.close()
        for task in self._opening:
            task.cancel()

    def _resume(self) -> None:
        self._resuming = None
        for each in self._sockets:
            self._loop.add_reader(each, self._accept, each)

    def _pause_for(self, seconds: float | None) -> None:
        for each in self._sockets:
            if each.fileno() >= 0:
                self._loop.remove_reader(each)
        if self._resuming is not None:
            self._resuming.cancel()
        self._resuming = None if seconds is None else self._loop.call_later(seconds, self._resume)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_BATCH):
            is_full = self._crowd.is_full(len(self._opening) + 1)
            if is_full and not self._can_make_room:
                self._log.warning("no room for a connection: %d are busy", self._crowd.busy_count)
                self._pause_for(_PAUSE)
                return
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._log.warning("no room for a connection: %s", error.strerror)
                self._pause_for(_PAUSE_FOR_ROOM if self._can_make_room else _PAUSE)
                self._make_room(_BATCH)
                return
            self._open(accepted)
            if is_full:
                self._make_room(1)

    @property
    def _can_make_room(self) -> bool:
        return self._crowd.can_make_room or (self._tls is not None and bool(self._opening))

    def _make_room(self, count: int) -> None:
        """Closes `count` connections: in the TLS handshake, if most are, else waiting ones."""
        if self._tls is not None and len(self._opening) > len(self._crowd):
            for task in list(self._opening)[:count]:
                task.cancel()
        else:
            self._crowd.make_room(count)

    def _open(self, accepted: socket.socket) -> None:
        task = self._loop.create_task(self._connect(accepted))
        self._opening[task] = None
        task.add_done_callback(self._opening.pop)

    async def _connect(self, accepted: socket.socket) -> None:
        with suppress(OSError):  # the TLS handshake failed, or the client has left
            await self._loop.connect_accepted_socket(
                self._make,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HEADER_TIMEOUT if self._tls else None,
            )


async def bind_all(host: str, port: int, shared: bool = False) -> list[socket.socket]:
    """Returns a bound socket for each address of `host`; none listens yet. `shared`: other
    processes of this user may bind and listen there, too.

    Raises:
        OSError: one of them cannot be bound.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        asyncio.Protocol, host, port, start_serving=False, reuse_port=shared
    )
    try:
        return [each.dup() for each in server.sockets]
    finally:
        server.close()
