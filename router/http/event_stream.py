"""A response of server-sent events to a client that may be slow."""

from __future__ import annotations

from aiohttp import HttpVersion11, web

from pdserve.common.http.connection import connection_of

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


class EventStream:
    """Sends events: `send` waits while the client is behind, `send_now` never waits."""

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self.response.enable_chunked_encoding()
        self._request = request
        self._connection = connection_of(request)
        self._sent = False  # the headers, with the first events

    async def begin(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, events: bytes) -> None:
        """Raises ConnectionError: the client is gone."""
        if self._connection is not None:
            await self._connection.drain()
        if events:
            self._sent = True
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
            self._connection.write(events)

    async def end(self, events: bytes) -> None:
        await self.response.write_eof(events)
