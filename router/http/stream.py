"""A generation as server-sent events: the one way, whatever an API's events say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from aiohttp import web

from pdserve.common.core.errors import PdserveError
from pdserve.common.http.connection import connection_of
from pdserve.router.http.encoding import as_typed, stopping
from pdserve.router.requests.generation import Update, Updates

News = Updates[Update]  # (prompt's index, what is new of it)

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


class Frames(Protocol):
    """What is sent. One object per response."""

    last: bytes  # whatever happened

    def begin(self) -> bytes: ...

    async def told(self, news: News) -> bytes:
        """The events of what comes together."""

    def end(self) -> bytes: ...

    def failed(self, error: PdserveError) -> bytes:
        """Instead of what would follow."""


async def respond_stream(
    request: web.Request, updates: AsyncGenerator[News, None], frames: Frames
) -> web.StreamResponse:
    """Raises PdserveError: it failed before the first token. Until then there is no response yet,
    so an error still has its own status."""
    first = await anext(updates, None)
    if first is None:
        raise unfinished()
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    connection = connection_of(request)

    async def write(sent: bytes) -> None:
        if connection is not None:
            await connection.drain()
        await response.write(sent)

    try:
        async with aclosing(_sent(first, updates, frames)) as batches:
            async for batch in batches:
                if batch:
                    await write(batch)
    except asyncio.CancelledError:
        if request.transport is None or request.transport.is_closing():
            raise
        await write(frames.failed(stopping()))  # it is this server that goes
    await response.write_eof(frames.last)
    return response


async def _sent(
    first: News, updates: AsyncGenerator[News, None], frames: Frames
) -> AsyncGenerator[bytes, None]:
    try:
        yield frames.begin() + await frames.told(first)
        async for news in updates:
            yield await frames.told(news)
        yield frames.end()
    except Exception as error:
        yield frames.failed(as_typed(error))


def unfinished() -> PdserveError:
    return PdserveError("the generation ended without a result")
