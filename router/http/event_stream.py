"""A response of server-sent events to a client that may be slow."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aiohttp import HttpVersion11, web

from pdserve.common.http.connection import connection_of

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}

# Seconds without an event after which a comment shows that this server lives: more than the default
# --queue-timeout, before whose end an error should have its own status; less than clients and
# proxies wait, often 60 (`pdserve/client/resuming.py`).
COMMENT_AFTER = 35.0
COMMENT = b":\n\n"


class EventStream:
    """Sends events: `send` waits while the client is behind, `send_now` never waits. Use it as a
    context manager: meanwhile it begins the response, and sends comments, if no event comes for
    long."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self.response.enable_chunked_encoding()
        self._request = request
        self._connection = connection_of(request)
        self._sent = False  # the headers, with the first events
        self.begun = False
        self._beginning = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()  # when something was sent
        self._comment: asyncio.Task[None] | None = None

    def __enter__(self) -> EventStream:
        self._timer = self._loop.call_later(COMMENT_AFTER, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _look(self) -> None:
        left = self._last + COMMENT_AFTER - self._loop.time()
        if left <= 0:
            left = COMMENT_AFTER
            if self._comment is None or self._comment.done():
                self._comment = self._loop.create_task(self._send_comment())
        self._timer = self._loop.call_later(left, self._look)

    async def _send_comment(self) -> None:
        with suppress(ConnectionError):  # the client is gone, as the next event will find
            await self.begin()
            await self.send(COMMENT)

    async def begin(self) -> None:
        self.begun = True
        async with self._beginning:
            await self.response.prepare(self._request)

    async def send(self, events: bytes) -> None:
        """Raises ConnectionError: the client is gone."""
        if self._connection is not None:
            await self._connection.drain()
        if events:
            self._sent, self._last = True, self._loop.time()
            await self.response.write(events)

    @property
    def keeps_up(self) -> bool:
        """Whether the client is there, has got something, and is not behind."""
        return self._sent and self._connection is not None and self._connection.is_writable

    def send_now(self, events: bytes) -> None:
        """Sends to a client that keeps up, behind what `send` has sent."""
        assert self._connection is not None, "it keeps up"
        if events:
            if self._chunked:
                events = b"%x\r\n%b\r\n" % (len(events), events)
            self._last = self._loop.time()
            self._connection.write(events)

    async def end(self, events: bytes) -> None:
        await self.response.write_eof(events)
