"""JSON responses and server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from pdserve.router.http.connection import connection_of

_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )


class EventStream:
    """A response of server-sent events, ended by `data: [DONE]`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_SSE_HEADERS)

    @property
    def connected(self) -> bool:
        transport = self._request.transport
        return transport is not None and not transport.is_closing()

    async def open(self) -> None:
        """Sends the status and the headers: from here on an error can only be an event."""
        await self._response.prepare(self._request)

    async def send(self, event: Any) -> None:
        """Raises ConnectionError when the client is gone."""
        if (connection := connection_of(self._request)) is not None:
            await connection.drain()
        await self._response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def close(self) -> web.StreamResponse:
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response
