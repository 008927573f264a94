"""Server reflection, with bounds: strangers may ask for the contracts where no key guards them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pdserve.common.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from pdserve.common.rpc.receive import EOF, Context, Handler, parsed
from pdserve.common.rpc.status import serving

MAX_NBYTES = 4096  # of a question, which is a name
MAX_CALLS = 32  # at a time
LASTS = 60.0  # seconds of a call, which may have many questions


class Reflection:
    """The calls of one server."""

    def __init__(self) -> None:
        self._calls = 0

    def bounded(self, handler: Handler, admit: Callable[[Context], None]) -> Handler:
        """The handler, within bounds. `admit` raises for callers who may not ask."""

        async def answer(_: Any, context: Context) -> None:
            async with serving(context):
                admit(context)
                with self._counted():
                    await _answer(handler, context)

        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._calls >= MAX_CALLS:
            raise Overloaded("too many ask for the contracts at once", retry_after=1.0)
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
                    raise InvalidRequest(f"a question has at most {MAX_NBYTES} bytes")
                async for answer in handler.stream_stream(_one(parsed(handler, raw)), context):
                    await context.write(answer)
    except TimeoutError:
        raise DeadlineExceeded(f"ask within {LASTS:.0f} s, or in another call") from None


async def _one(question: Any) -> AsyncIterator[Any]:
    yield question
