"""Admits a client's gRPC call: checks its API key, then waits for room for its message."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from math import ceil
from typing import Any
from urllib.parse import unquote

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import (
    Overloaded,
    PdserveError,
    RequestError,
    Unauthenticated,
    Unavailable,
)
from pdserve.common.core.printable import cut_bytes
from pdserve.common.obs.logging import request_id_var
from pdserve.common.rpc.auth import REFLECTION
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.receive import Context, read_message, reading_first, refuse
from pdserve.common.rpc.reflection import Reflection
from pdserve.common.rpc.server import Door
from pdserve.common.rpc.status import MAX_MESSAGE
from pdserve.router.api.auth import HEADER as AUTHORIZATION
from pdserve.router.api.auth import APIKeys, host_of
from pdserve.router.requests.fair_share import FairShare

INFERENCE = "/pdserve.v1.Inference/"
# Bytes; enough for parameters at their bounds and a prompt as long as most windows.
MAX_NBYTES = 2**18
HELD = 16  # messages of MAX_NBYTES; parsed, one may be 45 times as large
SPARE_STREAMS = 64  # of a connection, for what takes no place
MAX_WAITING = 4096  # calls; for each gRPC holds metadata and the first 16 KiB of a message
REFUSALS = 32  # calls that are refused within
REFUSAL_PAUSE = 0.1  # seconds

DOMAIN = "pdserve"
RETRY_DELAY = 1.0  # seconds, where the error names none

_held: ContextVar[Callable[[], None]] = ContextVar("held")


def message_done() -> None:
    """Releases the room that the current call's message holds. The handler must have dropped it."""
    if (release := _held.get(None)) is not None:
        release()


def max_streams(config: RoutingConfig) -> int:
    """Returns how many calls of a connection the router takes at once: as many as a client may have
    places and wait for. gRPC has the calls of all connections in one line, in which a burst would
    stand before those of others until each of it is refused."""
    most = config.max_client_share * (config.max_concurrent_requests + config.max_queued_requests)
    return ceil(most) + SPARE_STREAMS


class Messages:
    """Bounds the bytes that clients' messages hold, from their first byte until they have become
    requests. Other calls wait, with their messages unread."""

    def __init__(self, limit: int, timeout: float = 30.0, share: float = 0.75) -> None:
        """`limit`: bytes of one message; `timeout`: seconds that a call may wait; `share`: the part
        of the room that one client may take."""
        self._limit = limit
        self._timeout = timeout
        self._room = FairShare(max(2 * limit, HELD * MAX_NBYTES), share)

    @asynccontextmanager
    async def reading(self, client: str, context: Context) -> AsyncIterator[bytes]:
        """Reads the message and holds its bytes until `message_done` or the end of the context.

        Raises:
            InvalidRequest, DeadlineExceeded: as `read_message`.
            Overloaded, Unavailable: too many messages are being read already.
        """
        held = self._limit  # until the message is there, its length is not known

        def release(rest: int = 0) -> None:
            nonlocal held
            if held > rest:
                held, surplus = rest, held - rest
                self._room.release(client, surplus)

        await self._acquire(client)
        try:
            raw = await read_message(context, self._limit)
            release(max(1, len(raw)))
            _held.set(release)
            yield raw
        finally:
            release()

    async def _acquire(self, client: str) -> None:
        self._room.make_room(client, MAX_WAITING, "calls")
        try:
            async with asyncio.timeout(self._timeout):
                await self._room.acquire(client, self._limit)
        except TimeoutError:
            raise Unavailable(
                f"the message was not read within {self._timeout:g} s: other large ones come first",
                code="QUEUE_TIMEOUT",
                retry_after=2.0,
            ) from None


class Refusals:
    """Sets a pace for refusals, in which hosts take turns. A client that is refused asks again at
    once, and its calls stand before those of others until the event loop has seen them; meanwhile
    it can have no more calls than its connections carry."""

    def __init__(self) -> None:
        self._turns = FairShare(REFUSALS)

    async def turn(self, context: Context) -> None:
        """Waits until the call may be refused: not at all if too many wait."""
        host = host_of(_address(context))
        try:
            self._turns.make_room(host, MAX_WAITING, "refusals")
            await self._turns.acquire(host)
        except Overloaded:
            return
        asyncio.get_running_loop().call_later(REFUSAL_PAUSE, self._turns.release, host)


class ClientDoor(Door):
    """Refuses calls without a key before their message is read, and admits the others."""

    def __init__(
        self,
        keys: APIKeys,
        messages: Messages,
        refused: Callable[[PdserveError, str], None],
        max_calls: int = 2**31,
    ) -> None:
        """`refused`: as `AppState.refused`. `max_calls`: that a client may have at once, over all
        of its connections."""
        self._max_calls = max_calls
        self._calls: Counter[str] = Counter()  # by client
        self._refusals = Refusals()
        self._keys = keys
        self._messages = messages
        self._refused = refused
        self._reflection = Reflection()

    async def intercept_service(self, continuation: Any, call: Any) -> Any:
        handler = await continuation(call)
        if handler is None or not call.method.startswith((INFERENCE, REFLECTION)):
            return handler  # reads nothing, or little
        given = dict(call.invocation_metadata or ()).get(AUTHORIZATION)
        try:
            self._keys.check(given if isinstance(given, str) else None)
        except Unauthenticated as error:
            self._refused(error, "")
            return refuse(error, details, self._refusals.turn)
        if handler.request_streaming:
            return self._reflection.bounded(handler, lambda context: None)
        return reading_first(handler, self._reading, details)

    @asynccontextmanager
    async def _reading(self, context: Context) -> AsyncIterator[bytes]:
        client = client_of(self._keys, context)
        try:
            if self._calls[client] >= self._max_calls:
                await self._refusals.turn(context)
                raise Overloaded(
                    f"this client has {self._max_calls} calls already", retry_after=1.0
                )
            with self._counted(client):
                async with self._messages.reading(client, context) as raw:
                    yield raw
        except PdserveError as error:
            self._refused(error, client)
            raise

    @contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        self._calls[client] += 1
        try:
            yield
        finally:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]


def client_of(keys: APIKeys, context: Context) -> str:
    """Returns the client's name, as `APIKeys.client` has it."""
    return keys.client(metadata_of(context, AUTHORIZATION), _address(context))


def _address(context: Context) -> str:
    # "ipv4:127.0.0.1:5000", "ipv6:%5B::1%5D:5000", "unix:…"
    return unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")


def metadata_of(context: Context, key: str) -> str | None:
    value = dict(context.invocation_metadata() or ()).get(key)
    return value if isinstance(value, str) else None


# ---- `google.rpc.Status`, for clients that do not read our metadata --------------------------


def details(error: PdserveError, request: Message | None = None) -> Sequence[Message]:
    """Returns the details of an error; `request` resolves the path of a wrong field."""
    about = {"blame": str(error.blame), "retryable": str(error.retryable).lower()}
    found: list[Message] = [ErrorInfo(reason=error.code, domain=DOMAIN, metadata=about)]
    if isinstance(error, RequestError) and error.param is not None and request is not None:
        wrong = BadRequest.FieldViolation(
            field=_path(error.param, request),
            description=cut_bytes(error.message, MAX_MESSAGE),
        )
        found.append(BadRequest(field_violations=[wrong]))
    if error.retryable:
        delay = Duration()
        delay.FromNanoseconds(int(1e9 * (error.retry_after or RETRY_DELAY)))
        found.append(RetryInfo(retry_delay=delay))
    if (request_id := request_id_var.get()) != "-":
        found.append(RequestInfo(request_id=request_id))
    return found


def _path(param: str, request: Message) -> str:
    """Returns the path from the gRPC request to the field that HTTP calls `param`."""
    first = re.split(r"[.\[]", param, maxsplit=1)[0]
    if first not in request.DESCRIPTOR.fields_by_name:
        if first == "tokens" and isinstance(request, pb.DetokenizeRequest):
            return param.replace(first, "token_ids", 1)
        if first in pb.SamplingParams.DESCRIPTOR.fields_by_name:
            return f"sampling.{param}"
        if first in pb.Chat.DESCRIPTOR.fields_by_name or first == "tool_choice":
            return f"chat.{param}".replace(".function.", ".")
        if first == "prompt" and isinstance(request, pb.GenerateRequest | pb.TokenizeRequest):
            return request.WhichOneof("prompt") or param
    return param
