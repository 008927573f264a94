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
CROWDED = 0.25  # of the connections that may be open
MAX_UNSENT = 2**28  # bytes that the clients of all connections together have not taken yet
CROWDED_KEEP_ALIVE = 5.0  # seconds that a connection may be idle when so many are open


@dataclass(frozen=True, slots=True)
class Limits:
    """How long connections wait, in seconds, and how many may be open at once."""

    timeout_keep_alive: float = 75.0
    write_timeout: float = 30.0
    max_connections: int = 1024

    @property
    def period(self) -> float:
        """Between two checks of all connections."""
        return min(1.0, self.timeout_keep_alive / 4, self.write_timeout / 4)


class Crowd:
    """All connections of a server, in the order in which they make room for others: first those
    that have never asked for anything, then those that are idle or owe a body, each time the
    longest waiting one. A connection whose request is being answered never makes room."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self._most = most
        self._now = now
        self._stood_still = 0.0  # seconds
        self._all: set[Connection] = set()
        # Both without those that are busy; the longest waiting one first.
        self._silent: OrderedDict[Connection, None] = OrderedDict()
        self._idle: OrderedDict[Connection, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    def now(self) -> float:
        """Seconds, without those in which this process stood still: it finds requests in its
        sockets then, which are no idle connections."""
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
        """Whether these and `opening` more are too many."""
        return len(self._all) + opening > self._most

    @property
    def can_make_room(self) -> bool:
        return bool(self._silent or self._idle)

    def make_room(self, count: int = 1) -> None:
        """Ends up to `count` connections at once."""
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
        """While too much is not taken, hangs up on the connection with most of the host with most:
        one that takes its answers drop by drop is never late."""
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
            logger.warning("%s has not taken %d bytes, the most of all: hung up", host, nbytes)
            worst.abort()


class Connection(asyncio.Protocol):
    """Between a transport and the HTTP protocol, which knows nothing of it."""

    def __init__(self, http: asyncio.Protocol, limits: Limits, crowd: Crowd) -> None:
        self._http = http
        self._limits = limits
        self._crowd = crowd
        self._requests = 0  # being answered
        self._since = crowd.now()  # since when it is idle, or a client has taken nothing
        self._header = True  # has begun; a new connection has as long for its first one
        self._unsent = 0  # bytes, at the last check
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
        """A whole header has come, and its request is being answered."""
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
        """Its client owes the rest of a body: it makes room as an idle connection does."""
        self._crowd.idle(self)
        try:
            yield
        finally:
            self._crowd.busy(self)

    @property
    def unsent(self) -> int:
        """Bytes that its client has not taken yet."""
        return self._transport.get_write_buffer_size()

    @property
    def host(self) -> str:
        return str((self._peer or ("?",))[0])

    @property
    def is_writable(self) -> bool:
        """Whether the client is there, and not behind."""
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
        """Ends the connection when its time is up, which comes sooner in a crowd."""
        unsent = self._transport.get_write_buffer_size()
        if self._requests and self._writable.is_set():
            return  # what is unsent may grow: nothing can be said
        if unsent < self._unsent or (not unsent and self._requests):
            self._since = self._crowd.now()
        waited = self._crowd.now() - self._since
        self._unsent = unsent
        if unsent:
            if waited >= self._limits.write_timeout:
                logger.info("%s took nothing for %.0f s: hung up", self._peer, waited)
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
    """None when it is gone, or a server of aiohttp's own serves the application."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


@web.middleware
async def answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The request's connection is busy meanwhile."""
    # From Python 3.12 on aiohttp begins a task at once: a pipeline of requests whose handlers do
    # not wait would be answered in one turn of the event loop.
    await asyncio.sleep(0)
    connection = connection_of(request)
    with nullcontext() if connection is None else connection.answering():
        return await handler(request)
