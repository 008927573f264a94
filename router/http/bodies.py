"""Reading bodies: how many bytes of them are held at once, whose, and how slowly they may come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import hdrs, web

from pdserve.common.core.errors import Overloaded, Unavailable
from pdserve.router.fair_share import FairShare

SMALL = 64 * 1024  # bytes of a body that counts for nothing, and is prepared by a thread
MAX_WAITING = 256  # bodies; what a connection has received of one that waits is some 100 KiB
GRACE = 20.0  # seconds a body may take
RATE = 128 * 1024  # and a second more for so many bytes


class Bodies:
    """Two bodies of the largest size are held at once, from their first byte until they are
    prepared; others wait with their clients."""

    def __init__(self, max_body_size: int, timeout: float = 30.0, share: float = 0.75) -> None:
        self._max_body_size = max_body_size
        self._held = FairShare(2 * max_body_size, share)
        self._timeout = timeout
        self._waiting = 0

    @asynccontextmanager
    async def reading(self, request: web.Request, client: str) -> AsyncIterator[bytearray]:
        """The body's bytes, while they may be held.

        Raises:
            web.HTTPRequestEntityTooLarge: it has more than --max-body-size.
            web.HTTPRequestTimeout: it comes drop by drop.
            Overloaded, Unavailable: too many bodies are being read already.
        """
        size = request.content_length
        if size is not None and size > self._max_body_size:
            raise web.HTTPRequestEntityTooLarge(self._max_body_size, size)
        if size is None or request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
            size = self._max_body_size  # nobody knows
        if size <= SMALL:
            yield await _read(request, size)
            return
        await self._take(client, size)
        try:
            yield await _read(request, self._max_body_size)
        finally:
            self._held.give_back(client, size)

    async def _take(self, client: str, size: int) -> None:
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} large bodies are waiting already", retry_after=1.0)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout):
                await self._held.take(client, size)
        except TimeoutError:
            raise Unavailable(
                f"the body could not be read within {self._timeout:g} s: others are large, too",
                code="QUEUE_TIMEOUT",
                retry_after=2.0,
            ) from None
        finally:
            self._waiting -= 1


async def _read(request: web.Request, limit: int) -> bytearray:
    start = asyncio.get_running_loop().time() + GRACE
    raw = bytearray()
    try:
        async with asyncio.timeout_at(start) as timeout:
            while chunk := await request.content.readany():
                raw += chunk
                if len(raw) > limit:
                    raise web.HTTPRequestEntityTooLarge(limit, len(raw))
                timeout.reschedule(start + len(raw) / RATE)
                await asyncio.sleep(0)  # what is there already comes without a pause otherwise
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body comes too slowly") from None
    return raw
