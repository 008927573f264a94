"""Bounds how long a client's connection may be idle, and how long it may keep the server waiting.

opened ──▶ idle ──header──▶ busy ──answered, all of it taken──▶ idle
            │                │
 timeout_keep_alive          └─ write_timeout without a byte taken ─▶ aborted
 HEADER_TIMEOUT for a header that has begun ─▶ closed
 max_connections are open and one more comes ─▶ aborted, the longest silent one first
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

logger = logging.getLogger(__name__)

HEADER_TIMEOUT = 10.0  # seconds from a header's first byte to its last
CROWDED = 0.25  # share of `max_connections` above which CROWDED_KEEP_ALIVE applies
MAX_UNSENT = 2**28  # bytes of answers that all clients together have not read yet
CROWDED_KEEP_ALIVE = 5.0  # seconds until an idle connection is closed


@dataclass(frozen=True, slots=True)
class Limits:
    """How long connections wait, in seconds, and how many may be open at once."""

    timeout_keep_alive: float = 75.0
    write_timeout: float = 30.0
    max_connections: int = 1024

    @property
    def period(self) -> float:
        """The seconds between two checks of all connections."""
        return min(1.0, self.timeout_keep_alive / 4, self.write_timeout / 4)


class Crowd:
    """All connections of a server. When it is full, a new connection replaces an old one: first
    one that has never sent a request, then one that is idle or owes a body, each time the longest
    waiting. A connection whose request is being answered is never replaced."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most = most
        self._now = now
        self._stood_still = 0.0  # seconds in which the event loop stood still
        self._all: set[Connection] = set()
        # Neither contains busy connections; both are ordered, the longest waiting first.
        self._silent: OrderedDict[Connection, None] = OrderedDict()
        self._idle: OrderedDict[Connection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def now(self) -> float:
        """Returns seconds, not counting pauses of the event loop: requests that arrived in a pause
        are still in the sockets, so those connections only look idle."""
        return self._now() - self._stood_still

    @property
    def num_silent(self) -> int:
        """Connections that have never asked for anything."""
        return len(self._silent)

    @property
    def busy_count(self) -> int:
        return len(self._all) - len(self._silent) - len(self._idle)

    def add(self, connection: Connection) -> None:
        self._all.add(connection)
        self._silent[connection] = None

    def busy(self, connection: Connection) -> None:
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        if connection in self._all and connection not in self._silent:
            self._idle.setdefault(connection)

    def remove(self, connection: Connection) -> None:
        self._all.discard(connection)
        self.busy(connection)

    def is_full(self, opening: int) -> bool:
        """Returns whether the connections and `opening` more exceed the limit."""
        return len(self._all) + opening > self._most

    @property
    def can_make_room(self) -> bool:
        return bool(self._silent or self._idle)

    def make_room(self, count: int = 1) -> None:
        """Aborts up to `count` connections that are not busy."""
        for _ in range(count):
            if waiting := self._silent or self._idle:
                connection = next(iter(waiting))
                self.remove(connection)
                connection.abort()

    async def watch(self, period: float) -> None:
        """Checks all connections every `period` seconds until cancelled."""
        while True:
            before = self._now()
            await asyncio.sleep(period)
            self._stood_still += max(0.0, self._now() - before - 2 * period)
            is_crowded = len(self._all) > CROWDED * self._most
            for connection in list(self._all):
                connection.check(is_crowded)
            self.bound_unsent()

    def bound_unsent(self) -> None:
        """While clients have left more than MAX_UNSENT bytes unread, aborts the connection with the
        most of the host with the most. (`check` does not find a client that reads byte by byte.)"""
        unsent = Counter({each: nbytes for each in self._all if (nbytes := each.unsent)})
        if (excess := unsent.total() - MAX_UNSENT) <= 0:
            return
        hosts: Counter[str] = Counter()
        for connection, nbytes in unsent.items():
            hosts[connection.host] += nbytes
        while excess > 0:
            [(host, _)] = hosts.most_common(1)
            worst = max((each for each in unsent if each.host == host), key=unsent.__getitem__)
            nbytes = unsent.pop(worst)
            hosts[host] -= nbytes
            excess -= nbytes
            logger.warning("closed: %s has left %d bytes unread, the most of all", host, nbytes)
            worst.abort()


class Connection(asyncio.Protocol):
    """Sits between a transport and aiohttp's protocol, which does not know of it."""

    def __init__(self, http: asyncio.Protocol, limits: Limits, crowd: Crowd) -> None:
        self._http = http
        self._limits = limits
        self._crowd = crowd
        self._requests = 0  # requests being answered
        self._since = crowd.now()  # since when it is idle, or its client has read nothing
        self._header = True  # has begun; a new connection has as long for its first one
        self._unsent = 0  # unsent bytes at the last check
        self._is_behind = False
        self._writable = asyncio.Event()
        self._writable.set()

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._crowd.add(self)
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.remove(self)
        self._writable.set()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._requests and not self._header:
            self._header, self._since = True, self._crowd.now()
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._since, self._unsent = self._crowd.now(), self._transport.get_write_buffer_size()
        self._is_behind = True
        self._writable.clear()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._is_behind = False
        self._writable.set()
        self._http.resume_writing()

    # ---- what the server asks ---------------------------------------------------------------

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Marks the connection as busy: a whole header has arrived and is being answered."""
        self._requests += 1
        self._header = False
        self._crowd.busy(self)
        try:
            yield
        finally:
            self._requests -= 1
            self._since, self._unsent = self._crowd.now(), self._transport.get_write_buffer_size()
            if not self._requests and not self._unsent:
                self._crowd.idle(self)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Counts the connection as idle while its client owes the rest of a body."""
        self._crowd.idle(self)
        try:
            yield
        finally:
            self._crowd.busy(self)

    @property
    def unsent(self) -> int:
        """The bytes that its client has not read yet."""
        return self._transport.get_write_buffer_size()

    @property
    def host(self) -> str:
        return str((self._peer or ("?",))[0])

    @property
    def is_writable(self) -> bool:
        """Whether the client is connected and reads fast enough."""
        return not (self._is_behind or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Sends part of the answer that is being written."""
        self._transport.write(data)

    async def drain(self) -> None:
        """Waits while the client is behind; for how long, `check` decides."""
        await self._writable.wait()

    def abort(self) -> None:
        self._transport.abort()

    def check(self, is_crowded: bool = False) -> None:
        """Closes the connection if it has waited too long; limits are shorter `is_crowded`."""
        unsent = self._transport.get_write_buffer_size()
        if self._requests and self._writable.is_set():
            return  # the answer is still being written, so the buffer may grow
        if unsent < self._unsent or (not unsent and self._requests):
            self._since = self._crowd.now()
        waited = self._crowd.now() - self._since
        self._unsent = unsent
        if unsent:
            if waited >= self._limits.write_timeout:
                logger.info("closed: %s has read nothing for %.0f s", self._peer, waited)
                self._transport.abort()
            return
        if not self._requests:
            self._crowd.idle(self)
        if waited >= self._patience(is_crowded):
            self._transport.close()

    def _patience(self, is_crowded: bool) -> float:
        if self._header:
            return HEADER_TIMEOUT
        most = self._limits.timeout_keep_alive
        return min(most, CROWDED_KEEP_ALIVE) if is_crowded else most

    @property
    def _peer(self) -> Any:
        return self._transport.get_extra_info("peername")


def connection_of(request: web.Request) -> Connection | None:
    """Returns None if it is closed, or if one of aiohttp's own servers runs the application."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


@web.middleware
async def answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Marks the request's connection as busy while the handler runs."""
    # From Python 3.12 on aiohttp begins a task at once: a pipeline of requests whose handlers do
    # not wait would be answered in one turn of the event loop.
    await asyncio.sleep(0)
    connection = connection_of(request)
    with nullcontext() if connection is None else connection.answering():
        return await handler(request)
