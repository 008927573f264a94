"""Takes connections, and stays able to: asyncio's own servers take as many as the process may open
files, and then say so 128 times a second."""

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
_PAUSE = 0.1  # seconds in which nothing is accepted when all connections are busy
_PAUSE_FOR_ROOM = 0.01  # seconds that those which make room take to be gone, and more
_LOOK = 0.01  # seconds between two looks at whether new connections have asked for something
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Listener:
    """Accepts on `sockets`, which become its own. When the crowd is full, one that waits makes room
    for a new one; when all are busy, new ones wait in the kernel."""

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
        self._opening: dict[asyncio.Task[None], None] = {}  # in TLS' handshake; the oldest first
        self._resuming: asyncio.TimerHandle | None = None
        self._log = LogThrottle(logger)

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Raises OSError: another process listens there; all sockets are closed then."""
        try:
            for each in self._sockets:
                each.setblocking(False)
                each.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        self._resume()

    async def finish(self, timeout: float) -> None:
        """Takes what the kernel has accepted, which a closed socket would reset, and no more; waits
        up to `timeout` seconds until each connection has asked for something."""
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
        with suppress(OSError):  # there are no more, or no more files
            while not self._crowd.is_full(len(self._opening) + 1):
                accepted, _ = listening.accept()
                self._open(accepted)

    def close(self) -> None:
        """A second time does no harm."""
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
        """Also of those whose TLS handshake takes long, when they are most of all."""
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
        with suppress(OSError):  # no handshake: a stranger, or a client that has left
            await self._loop.connect_accepted_socket(
                self._make,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HEADER_TIMEOUT if self._tls else None,
            )


async def bind_all(host: str, port: int, shared: bool = False) -> list[socket.socket]:
    """A socket for each of the addresses of `host`; nothing listens yet. `shared`: other processes
    of this user may bind and listen there, too.

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
