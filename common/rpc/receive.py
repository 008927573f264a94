"""The message of a call, read when the server is ready for it.

By itself grpc.aio reads and parses the one message of a call before its handler runs, whoever sent
it and however large it is. Here the handler of such a call reads a stream, and until it does so
HTTP/2 lets the peer send no more than `server.WINDOW` bytes of it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PdserveError
from pdserve.common.rpc.status import Details, abort, serving

MAX_NBYTES = 64 * 2**20  # of the message of a method in LARGE
SMALL_NBYTES = 2**20  # and of any other's: no other takes prompts, log-probabilities or digests
LARGE = frozenset(
    {
        "/pdserve.v1.Prefill/Run",
        "/pdserve.v1.Decode/Run",
        "/pdserve.v1.KVTransfer/Commit",
    }
)
GRACE = 20.0  # seconds that a message may take
RATE = 128 * 1024  # and a second more for so many bytes that it may have

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose types know no asyncio
Reading = Callable[[Context], AbstractAsyncContextManager[bytes]]
"""Lets a call's message in, and counts it as held until the context ends."""


def max_nbytes(method: str) -> int:
    """Of the message that a role may send to another."""
    return MAX_NBYTES if method in LARGE else SMALL_NBYTES


def reading_first(
    handler: Handler, reading: Reading, details: Details = lambda error: ()
) -> Handler:
    """The handler of one message, as one that reads it itself, inside of `reading`."""

    async def unary(_: Any, context: Context) -> Any:
        async with serving(context, details=details), reading(context) as raw:
            request = parsed(handler, raw)
            del raw
            return await handler.unary_unary(request, context)

    async def stream(_: Any, context: Context) -> None:
        async with serving(context, details=details), reading(context) as raw:
            answers = handler.unary_stream(parsed(handler, raw), context)
            del raw
            if not inspect.isasyncgen(answers):
                await answers
                return
            async with aclosing(answers):
                async for answer in answers:
                    await context.write(answer)

    serializer = handler.response_serializer
    if handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(_forgetting(stream), None, serializer)
    return grpc.stream_unary_rpc_method_handler(_forgetting(unary), None, serializer)


def _forgetting(answer: Handler) -> Handler:
    """The same. A call keeps the error that it is ended with, the error's traceback keeps the
    frames, and these the call: thousands of refused calls would be left to the garbage collector,
    and the event loop stands still while it looks for them."""

    async def answered(messages: Any, context: Context | None) -> Any:
        try:
            return await answer(messages, context)
        except grpc.aio.AbortError as error:
            messages = context = None
            raise error.with_traceback(None) from None

    return answered


def parsed(handler: Handler, raw: bytes) -> Any:
    """Raises InvalidRequest: these bytes are not the method's message."""
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise InvalidRequest("the message is not of the method's type") from None


async def read_message(context: Context, limit: int) -> bytes:
    """The one message of a call, of at most `limit` bytes.

    Raises:
        InvalidRequest: it is longer, or it is none, or more than one.
        DeadlineExceeded: it comes drop by drop.
    """
    try:
        async with asyncio.timeout(GRACE + limit / RATE):
            raw = await context.read()
            more = raw is not EOF and await context.read() is not EOF
    except TimeoutError:
        raise DeadlineExceeded(
            "the call's message came too slowly", code="MESSAGE_TOO_SLOW"
        ) from None
    if raw is EOF or more:  # EOF is also what gRPC makes of a message beyond the server's limit
        raise InvalidRequest(
            f"a call of this method has exactly one message, of at most {limit} bytes"
        )
    if len(raw) > limit:
        raise InvalidRequest(
            f"the message has {len(raw)} bytes, and this method takes {limit}",
            code="REQUEST_TOO_LARGE",
        )
    return bytes(raw)


@contextmanager
def one_of_few(
    calls: Counter[str], context: Context, most: int, own: int, what: str
) -> Iterator[None]:
    """Counts the call as its host's meanwhile. Raises Overloaded: there are `most` such calls
    already, or `own` of its host."""
    host = context.peer().rpartition(":")[0]
    if calls.total() >= most or calls[host] >= own:
        raise Overloaded(f"too many {what} at once", retry_after=1.0)
    calls[host] += 1
    try:
        yield
    finally:
        calls[host] -= 1
        if not calls[host]:
            del calls[host]


def refuse(error: PdserveError, details: Details = lambda error: ()) -> Handler:
    """Answers any call with the error; its messages are never read."""

    async def refused(_: Any, context: Context) -> None:
        await abort(context, error, details(error))

    return grpc.stream_stream_rpc_method_handler(_forgetting(refused))
