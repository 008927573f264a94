"""Bounds on server reflection, which is open to everyone on servers without authentication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pdserve.common.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from pdserve.common.rpc.receive import EOF, Context, Handler, parsed
from pdserve.common.rpc.status import serving

MAX_NBYTES = 4096  # per request, which is a name
MAX_CALLS = 32  # concurrent calls
LASTS = 60.0  # seconds per call, which may have many requests


class Reflection:
    """Bounds the reflection calls of one server."""

    def __init__(self) -> None:
        self._calls = 0

    def bounded(self, handler: Handler, admit: Callable[[Context], None]) -> Handler:
        """Returns the handler with bounds. `admit` raises for callers without permission."""

        async def answer(_: Any, context: Context) -> None:
            async with serving(context):
                admit(context)
                with self._counted():
                    await _answer(handler, context)

        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._calls >= MAX_CALLS:
            raise Overloaded("too many concurrent reflection calls", retry_after=1.0)
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1


async def _answer(handler: Handler, context: Context) -> None:
    try:
        async with asyncio.timeout(LASTS):
            while (raw := await context.read()) is not EOF:
                if len(raw) > MAX_NBYTES:
                    raise InvalidRequest(f"a request has at most {MAX_NBYTES} bytes")
                async for answer in handler.stream_stream(_one(parsed(handler, raw)), context):
                    await context.write(answer)
    except TimeoutError:
        raise DeadlineExceeded(f"a reflection call has at most {LASTS:.0f} s") from None


async def _one(question: Any) -> AsyncIterator[Any]:
    yield question
