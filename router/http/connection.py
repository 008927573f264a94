"""What a client's connection may do to the server: not keep it idle, and not keep it waiting.

opened ──▶ idle ──header──▶ busy ──answered, all of it taken──▶ idle
            │                │
 timeout_keep_alive          └─ write_timeout without a byte taken ─▶ aborted
 HEADER_TIMEOUT for a header that has begun ─▶ closed
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from aiohttp import web

logger = logging.getLogger(__name__)

HEADER_TIMEOUT = 10.0  # seconds from a header's first byte to its last
CROWD = 0.25  # of the files that the process may open
CROWDED_KEEP_ALIVE = 5.0  # seconds that a connection may be idle when so many are open


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds."""

    timeout_keep_alive: float = 75.0
    write_timeout: float = 30.0

    @property
    def period(self) -> float:
        """Between two checks of all connections."""
        return min(1.0, self.timeout_keep_alive / 4, self.write_timeout / 4)


class Connection(asyncio.Protocol):
    """Between a transport and the HTTP protocol, which knows nothing of it."""

    def __init__(
        self, http: asyncio.Protocol, limits: Limits, now: Callable[[], float], all: set[Connection]
    ) -> None:
        self._http = http
        self._limits = limits
        self._now = now
        self._all = all
        self._requests = 0  # being answered
        self._since = now()  # since when it is idle, or a client has taken nothing
        self._header = True  # has begun; a new connection has as long for its first one
        self._unsent = 0  # bytes, at the last check
        self._writable = asyncio.Event()
        self._writable.set()

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._all.add(self)
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.discard(self)
        self._writable.set()
        self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._requests and not self._header:
            self._header, self._since = True, self._now()
        self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received()

    def pause_writing(self) -> None:
        self._since, self._unsent = self._now(), self._transport.get_write_buffer_size()
        self._writable.clear()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._writable.set()
        self._http.resume_writing()

    # ---- what the server asks ---------------------------------------------------------------

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A whole header has come, and its request is being answered."""
        self._requests += 1
        self._header = False
        try:
            yield
        finally:
            self._requests -= 1
            self._since, self._unsent = self._now(), self._transport.get_write_buffer_size()

    async def drain(self) -> None:
        """Waits while the client is behind; for how long, `check` decides."""
        await self._writable.wait()

    def check(self, crowded: bool = False) -> None:
        """Ends the connection when its time is up, which comes sooner in a crowd."""
        unsent = self._transport.get_write_buffer_size()
        if self._requests and self._writable.is_set():
            return  # what is unsent may grow: nothing can be said
        if unsent < self._unsent or (not unsent and self._requests):
            self._since = self._now()
        waited = self._now() - self._since
        self._unsent = unsent
        if unsent:
            if waited >= self._limits.write_timeout:
                logger.info("%s took nothing for %.0f s: hung up", self._peer, waited)
                self._transport.abort()
        elif waited >= self._patience(crowded):
            self._transport.close()

    def _patience(self, crowded: bool) -> float:
        if self._header:
            return HEADER_TIMEOUT
        most = self._limits.timeout_keep_alive
        return min(most, CROWDED_KEEP_ALIVE) if crowded else most

    @property
    def _peer(self) -> object:
        return self._transport.get_extra_info("peername")


def connection_of(request: web.Request) -> Connection | None:
    """None when it is gone, or a server of aiohttp's own serves the application."""
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, Connection) else None


async def watch(connections: set[Connection], limits: Limits) -> None:
    """Checks all connections until cancelled."""
    while True:
        await asyncio.sleep(limits.period)
        crowded = len(connections) > CROWD * resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        for connection in list(connections):
            connection.check(crowded)
