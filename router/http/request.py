"""Reads HTTP requests: their client and their body. It bounds the bytes that bodies hold, fairly
between clients, and how slowly a body may come."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from time import monotonic
from typing import Any

from aiohttp import hdrs, web

from pdserve.common.core.errors import InvalidRequest, Unavailable
from pdserve.common.http.connection import connection_of
from pdserve.common.http.server import ask_for_body
from pdserve.router.api.app_state import SMALL, AppState
from pdserve.router.api.auth import HEADER as AUTHORIZATION
from pdserve.router.api.preprocess import BodyBuffer, Preprocessed
from pdserve.router.requests.fair_share import FairShare
from pdserve.router.requests.slo import slo_of
from pdserve.router.requests.stages import RequestArrival, arrival_var

IGNORED = web.RequestKey("ignored", Sequence[str])  # what the answer is made without
TIMELINE_HEADER = "X-PDServe-Timeline"
MAX_WAITING = 256  # bodies; a connection that waits holds READ_AHEAD twice, and a read
GRACE = 20.0  # seconds that any body may take
RATE = 128 * 1024  # bytes per second in which the rest must come
IDENTITY = frozenset({"", "identity"})
COMPRESSED = frozenset({"gzip", "deflate"})
STEP = 64 * 1024  # bytes that one step inflates to, at most: a fraction of a millisecond
MAX_MEMBERS = 1024  # in one gzip body; each costs a step, however small it is
_INPUT = 16 * 1024  # compressed bytes at a time, as each step copies the rest of them
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits`


class Bodies:
    """Holds as many bytes as two bodies of the largest size have, from a body's first byte until it
    is preprocessed; other bodies wait at their clients."""

    def __init__(self, max_body_size: int, timeout: float = 30.0, share: float = 0.75) -> None:
        self._max_body_size = max_body_size
        self._held = FairShare(2 * max_body_size, share)
        self._timeout = timeout

    @asynccontextmanager
    async def reading(self, request: web.Request, client: str) -> AsyncIterator[BodyBuffer]:
        """Reads the body; the context holds its bytes.

        Raises:
            web.HTTPRequestEntityTooLarge: it has, or inflates to, more than --max-body-size.
            InvalidRequest: its compressed stream is broken.
            web.HTTPRequestTimeout: it comes too slowly.
            Overloaded, Unavailable: too many bodies are being read already.
        """
        size = request.content_length
        if size is not None and size > self._max_body_size:
            raise web.HTTPRequestEntityTooLarge(self._max_body_size, size)
        if size is None or encoding_of(request) not in IDENTITY:
            size = self._max_body_size  # its size is not known
        if size <= SMALL:
            yield await _read(request, size)
            return
        await self._acquire(client, size)
        try:
            yield await _read(request, self._max_body_size)
        finally:
            self._held.release(client, size)

    async def _acquire(self, client: str, size: int) -> None:
        self._held.make_room(client, MAX_WAITING, "large bodies")
        try:
            async with asyncio.timeout(self._timeout):
                await self._held.acquire(client, size)
        except TimeoutError:
            raise Unavailable(
                f"the body was not read within {self._timeout:g} s: other large ones come first",
                code="QUEUE_TIMEOUT",
                retry_after=2.0,
            ) from None


async def _read(request: web.Request, limit: int) -> BodyBuffer:
    encoding, connection = encoding_of(request), connection_of(request)
    inflater = None if encoding in IDENTITY else Inflater(encoding)
    start = asyncio.get_running_loop().time() + GRACE
    raw, received = BodyBuffer(), 0
    try:
        with nullcontext() if connection is None else connection.reading():
            async with asyncio.timeout_at(start) as timeout:
                await ask_for_body(request)
                while chunk := await request.content.readany():
                    received += len(chunk)
                    timeout.reschedule(start + received / RATE)
                    for piece in (chunk,) if inflater is None else inflater.steps(chunk):
                        raw.add(piece)
                        if (size := max(received, len(raw))) > limit:
                            raise web.HTTPRequestEntityTooLarge(limit, size)
                        await asyncio.sleep(0)  # bytes that are there come without a pause
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body comes too slowly") from None
    if inflater is not None:
        inflater.end()
    return raw


def encoding_of(request: web.Request) -> str:
    """Returns the Content-Encoding; several are joined."""
    return ", ".join(request.headers.getall(hdrs.CONTENT_ENCODING, ())).strip().lower()


STATE = web.AppKey("state", AppState)
GENERATING = frozenset({"completion", "chat", "responses", "messages"})  # bodies that want tokens
BODIES = web.AppKey("bodies", Bodies)


def client_of(request: web.Request) -> str:
    """Returns the client's name, as `APIKeys.client` has it."""
    return request.app[STATE].keys.client(authorization_of(request), request.remote)


def authorization_of(request: web.Request) -> str | None:
    """Returns the key as OpenAI's clients send it; Anthropic's have a header of their own."""
    own = request.headers.get("X-Api-Key")
    return request.headers.get(AUTHORIZATION) or (own and f"Bearer {own}")


async def preprocess(request: web.Request, kind: str) -> Preprocessed[Any]:
    """Reads and preprocesses a JSON body, as `AppState.preprocess` does.

    Raises:
        PdserveError: the body is wrong, or too many bodies wait.
        web.HTTPException: the body cannot be read.
    """
    if "Content-Type" in request.headers and not _is_json(request.content_type):
        raise web.HTTPUnsupportedMediaType(text="the Content-Type must be application/json")
    if encoding_of(request) not in IDENTITY | COMPRESSED:
        raise web.HTTPUnsupportedMediaType(text="the Content-Encoding must be gzip or deflate")
    client, arrival = client_of(request), arrival_var.get() or RequestArrival()
    arrival.slo = slo_of(request.headers.get)
    async with request.app[BODIES].reading(request, client) as raw:
        arrival.read = monotonic()
        if kind in GENERATING:
            request.app[STATE].pipeline.check_room(client)
        done = await request.app[STATE].preprocess(kind, raw, client)
    asked = request.headers.get(TIMELINE_HEADER, "").lower() in ("1", "true")
    arrival.operation = "text_completion" if kind == "completion" else "chat"
    request[IGNORED] = done.ignored
    arrival.wants_timeline = asked or bool(getattr(done.body, "timeline", False))
    return done


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")


# ---- compressed bodies -----------------------------------------------------------------------


class Inflater:
    """Inflates one body step by step: a megabyte of gzip may hold a gigabyte. `deflate` is zlib's
    format or, as some clients send it, the bare stream; gzip may have several members."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: Any = None  # zlib's; None before the first byte and between members
        self._members = 0

    def steps(self, data: bytes) -> Iterator[bytes]:
        """Inflates the next bytes lazily, into pieces of up to STEP bytes; some may be empty.

        Raises:
            InvalidRequest: the stream is broken.
        """
        for start in range(0, len(data), _INPUT):
            yield from self._inflate(data[start : start + _INPUT])

    def end(self) -> None:
        """Raises InvalidRequest: the stream is cut off."""
        if self._stream is not None:
            raise self._error("it ends too early")

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        is_more = bool(data)
        while is_more:
            stream = self._stream = self._stream or self._begin(data)
            try:
                piece = stream.decompress(data, STEP)
            except zlib.error:
                raise self._error("it is broken") from None
            yield piece
            # Output may be left when the input is used up.
            data = stream.unconsumed_tail
            is_more = bool(data) or len(piece) == STEP
            if stream.eof:
                data, self._stream = stream.unused_data, None
                is_more = bool(data)

    def _begin(self, data: bytes) -> Any:
        self._members += 1
        if self._members > (MAX_MEMBERS if self._encoding == "gzip" else 1):
            raise self._error("too much follows its end")
        if self._encoding == "gzip":
            return zlib.decompressobj(_GZIP)
        return zlib.decompressobj(_ZLIB if data[0] & 0xF == 8 else _RAW)  # RFC 1950: its method

    def _error(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"the body cannot be read as {self._encoding}: {what}")
