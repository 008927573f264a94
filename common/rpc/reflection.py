"""Bounds on server reflection, which is open to everyone on servers without authentication."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from pdserve.common.core.errors import DeadlineExceeded
from pdserve.common.rpc.receive import Context, Handler, converse, one_of_few
from pdserve.common.rpc.status import serving

MAX_NBYTES = 4096  # of a question, which is a name
MAX_CALLS, MAX_OWN_CALLS = 32, 8  # at a time, and those of one host
LASTS = 60.0  # seconds of a call, which may have many questions


class Reflection:
    """Bounds the reflection calls of one server."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()  # by host

    def bounded(self, handler: Handler, admit: Callable[[Context], None]) -> Handler:
        """Returns the handler with bounds. `admit` raises for callers without permission."""

        async def answer(_: Any, context: Context) -> None:
            async with serving(context):
                admit(context)
                with one_of_few(
                    self._calls, context, MAX_CALLS, MAX_OWN_CALLS, "ask for contracts"
                ):
                    await _answer(handler, context)

        return grpc.stream_stream_rpc_method_handler(answer, None, handler.response_serializer)


async def _answer(handler: Handler, context: Context) -> None:
    try:
        async with asyncio.timeout(LASTS):
            await converse(handler, context, MAX_NBYTES)
    except TimeoutError:
        raise DeadlineExceeded(f"a reflection call has at most {LASTS:.0f} s") from None
