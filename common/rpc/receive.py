"""Reads the message of a call only when the server is ready for it.

grpc.aio reads and parses the message of a unary call before its handler runs, whatever its sender
and size. Here such handlers are registered as streaming ones, so that HTTP/2 flow control limits
the peer to `server.WINDOW` bytes until the handler reads.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PdserveError
from pdserve.common.rpc.status import Details, abort, serving

MAX_NBYTES = 64 * 2**20  # per message of a method in LARGE
SMALL_NBYTES = 2**20  # per message of other methods, which have no prompts, logprobs or digests
LARGE = frozenset(
    {
        "/pdserve.v1.Prefill/Run",
        "/pdserve.v1.Decode/Run",
        "/pdserve.v1.KVTransfer/Commit",
    }
)
GRACE = 20.0  # seconds for a message
SILENCE = 60.0  # seconds that a stream of messages may be silent
RATE = 128 * 1024  # plus a second per this many bytes of its limit

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose type stubs lack asyncio
Reading = Callable[[Context], AbstractAsyncContextManager[bytes]]
"""Reads a call's message, and counts its bytes as in use until the context ends."""


def max_nbytes(method: str) -> int:
    """Returns the size limit of a role's message to the method."""
    return MAX_NBYTES if method in LARGE else SMALL_NBYTES


def reading_first(
    handler: Handler, reading: Reading, details: Details = lambda error: ()
) -> Handler:
    """Returns a handler of one message that reads the message itself, within `reading`."""

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


def two_way(handler: Handler, admit: Callable[[Context], None]) -> Handler:
    """Returns a handler of a stream of small messages and answers, in any order. It ends after
    SILENCE seconds without a message or an answer. `admit` raises for callers without
    permission."""

    async def answer(_: Any, context: Context) -> None:
        async with serving(context):
            admit(context)
            try:
                async with asyncio.timeout(SILENCE) as limit:
                    await converse(handler, context, SMALL_NBYTES, limit)
            except TimeoutError:
                raise DeadlineExceeded(f"the call was silent for {SILENCE:.0f} s") from None

    return grpc.stream_stream_rpc_method_handler(
        _forgetting(answer), None, handler.response_serializer
    )


async def converse(
    handler: Handler, context: Context, most: int, limit: asyncio.Timeout | None = None
) -> None:
    """Passes messages of at most `most` bytes to the handler and sends its answers, until it ends.
    Each message and each answer extends the time limit `limit`.

    Raises:
        InvalidRequest: one is longer, or is not of the method's type.
    """

    def moved() -> None:
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time() + SILENCE)

    async def messages() -> AsyncIterator[Any]:
        while (raw := await context.read()) is not EOF:
            if len(raw) > most:
                raise InvalidRequest(f"a message has at most {most} bytes")
            moved()
            yield parsed(handler, raw)

    async with aclosing(handler.stream_stream(messages(), context)) as answers:
        async for answer in answers:
            await context.write(answer)
            moved()


def _forgetting(answer: Handler) -> Handler:
    """Breaks a reference cycle: a call keeps the error that ended it, the error's traceback keeps
    the frames, and these keep the call. Thousands of refused calls would be left to the garbage
    collector, whose runs block the event loop."""

    async def answered(messages: Any, context: Context | None) -> Any:
        try:
            return await answer(messages, context)
        except grpc.aio.AbortError as error:
            messages = context = None
            raise error.with_traceback(None) from None

    return answered


def parsed(handler: Handler, raw: bytes) -> Any:
    """Parses the method's message; raises InvalidRequest if the bytes are something else."""
    try:
        return handler.request_deserializer(raw)
    except DecodeError:
        raise InvalidRequest("the message is not of the method's type") from None


async def read_message(context: Context, limit: int) -> bytes:
    """Reads the single message of a call, of at most `limit` bytes.

    Raises:
        InvalidRequest: it is longer, missing, or there are several.
        DeadlineExceeded: it arrives too slowly.
    """
    try:
        async with asyncio.timeout(GRACE + limit / RATE):
            raw = await context.read()
            more = raw is not EOF and await context.read() is not EOF
    except TimeoutError:
        raise DeadlineExceeded(
            "the call's message arrived too slowly", code="MESSAGE_TOO_SLOW"
        ) from None
    if raw is EOF or more:  # gRPC also returns EOF for a message beyond the server's limit
        raise InvalidRequest(
            f"a call of this method has exactly one message, of at most {limit} bytes"
        )
    if len(raw) > limit:
        raise InvalidRequest(
            f"the message has {len(raw)} bytes, and this method accepts at most {limit}",
            code="REQUEST_TOO_LARGE",
        )
    return bytes(raw)


@contextmanager
def one_of_few(
    calls: Counter[str], context: Context, most: int, own: int, what: str
) -> Iterator[None]:
    """Counts the call for its host while the block runs. Raises Overloaded if `most` calls run
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


async def _at_once(context: Context) -> None:
    pass


def refuse(
    error: PdserveError,
    details: Details = lambda error: (),
    turn: Callable[[Context], Awaitable[None]] = _at_once,
) -> Handler:
    """Returns a handler that answers with the error without reading messages. `turn`: waits until
    the call may be answered."""

    async def refused(_: Any, context: Context) -> None:
        await turn(context)
        await abort(context, error, details(error))

    return grpc.stream_stream_rpc_method_handler(_forgetting(refused))
