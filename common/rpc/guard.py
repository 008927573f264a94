"""At the door of a gRPC server: who may make which call. And the other side: calls that say who
makes them."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from pdserve.common.core.errors import ClusterAuthError
from pdserve.common.rpc.auth import (
    OPEN,
    TOKEN_KEY,
    Caller,
    ClusterKey,
    caller_var,
    check_role,
    missing_here,
)
from pdserve.common.rpc.status import abort
from pdserve.common.rpc.tls import certified_roles

logger = logging.getLogger(__name__)

_COMPLAINT_S = 1.0  # between two lines about refused calls: a stranger shall not fill the log

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose types know no asyncio


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls before their message is read. With a key, callers show a token; without one,
    but with TLS, a certificate that names their role; with neither, everybody may call."""

    def __init__(self, key: ClusterKey | None = None, *, by_certificate: bool = False) -> None:
        self._key = key
        self._by_certificate = by_certificate and key is None
        self.address = ""  # where callers dial this server, once it is known
        self._complained, self._silent = float("-inf"), 0

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler: Handler | None = await continuation(details)
        method: str = details.method
        if handler is None or method.startswith(OPEN):
            return handler
        token = dict(details.invocation_metadata or ()).get(TOKEN_KEY)
        try:
            caller_var.set(self._caller(token, method))
        except ClusterAuthError as error:
            self._complain(method, error)
            return _refuse(error)
        return self._certified(handler, method) if self._by_certificate else handler

    def _caller(self, token: str | None, method: str) -> Caller | None:
        if self._key is not None:
            return self._key.check(token, method, self.address)
        if token is not None:
            raise missing_here()
        return None

    def _certified(self, handler: Handler, method: str) -> Handler:
        """The handler, for callers whose certificate names a role that may call it. (Only the
        handler's own context knows the certificate.)"""

        async def check(context: Context) -> None:
            roles = certified_roles(context.auth_context())
            try:
                check_role(roles, method)
            except ClusterAuthError as error:
                self._complain(method, error)
                await abort(context, error)
            caller_var.set(Caller(roles))

        async def unary(request: Any, context: Context) -> Any:
            await check(context)
            return await handler.unary_unary(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            await check(context)
            async with aclosing(handler.unary_stream(request, context)) as answers:
                async for answer in answers:
                    yield answer

        coding = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, *coding)
        return grpc.unary_unary_rpc_method_handler(unary, *coding)

    def _complain(self, method: str, error: ClusterAuthError) -> None:
        now = time.monotonic()
        if now - self._complained < _COMPLAINT_S:
            self._silent += 1
            return
        more = f" ({self._silent} more since the last line)" if self._silent else ""
        logger.warning("refused a call of %s: %s%s", method, error.message, more)
        self._complained, self._silent = now, 0


def _refuse(error: ClusterAuthError) -> Handler:
    """Answers any call with the error; its messages are never read."""

    async def refuse(requests: Any, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class SignedChannel:
    """A channel each of whose calls carries a token of its own; as much of `grpc.aio.Channel` as
    our stubs use."""

    def __init__(self, channel: grpc.aio.Channel, sign: Callable[[str], str]) -> None:
        """`sign` makes the token of a call of a method."""
        self._channel = channel
        self._sign = sign

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._signed(method, self._channel.unary_unary(method, *args, **options))

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._signed(method, self._channel.unary_stream(method, *args, **options))

    def _signed(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def signed(request: Any, *, metadata: Sequence[Any] | None = None, **options: Any) -> Any:
            token = (TOKEN_KEY, self._sign(method))
            return call(request, metadata=(*(metadata or ()), token), **options)

        return signed

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)
