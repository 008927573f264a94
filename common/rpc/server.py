"""gRPC servers, made one way for every role, and who may make which call of them."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from pdserve.common.core.errors import ClusterAuthError, ConfigError
from pdserve.common.core.host import bind
from pdserve.common.rpc.auth import (
    OPEN,
    TOKEN_KEY,
    Caller,
    ClusterKey,
    caller_var,
    check_role,
    no_key_here,
)
from pdserve.common.rpc.status import abort
from pdserve.common.rpc.tls import TLS, certified_roles

logger = logging.getLogger(__name__)

# Either end of a link that is cut without a word knows it after 15 seconds: a client's call fails,
# a server's is cancelled, which frees its blocks.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # else a minute: it outweighs the one above
    ("grpc.http2.max_pings_without_data", 0),  # pings go on while a call is silent
]
MESSAGE_LIMITS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
]
_OPTIONS = [
    *MESSAGE_LIMITS,
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail
    *KEEPALIVE,
    ("grpc.http2.max_ping_strikes", 0),  # no number of pings is too many
    # Seconds that a call waits until the event loop turns to it. After 30, which is gRPC's own
    # number, it would be cancelled without a word; those who wait have deadlines of their own.
    ("grpc.server_max_unrequested_time_in_server", 24 * 3600),
]
_LOG_INTERVAL = 1.0  # between two lines about refused calls: a stranger shall not fill the log

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose types know no asyncio


class GrpcServer:
    """A grpc.aio server with the standard health service and reflection."""

    def __init__(
        self,
        auth: AuthInterceptor | None = None,
        max_message: int | None = None,
        trace: grpc.aio.ServerInterceptor | None = None,
    ) -> None:
        """Without `auth` everybody may call; `max_message` are bytes."""
        limit = [] if max_message is None else [("grpc.max_receive_message_length", max_message)]
        options = [*_OPTIONS, *limit]
        interceptors = [auth or AuthInterceptor(), *filter(None, [trace])]
        self.server = grpc.aio.server(options=options, interceptors=interceptors)
        self.health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self._services: list[str] = []

    def add(self, descriptor: Any, add_to_server: Any, servicer: Any) -> None:
        """Adds one service, e.g. `add(pb.DESCRIPTOR.services_by_name["Decode"], …)`."""
        add_to_server(servicer, self.server)
        self._services.append(descriptor.full_name)

    def bind(self, host: str, port: int, tls: TLS | None = None, flag: str = "--grpc-port") -> int:
        """Takes the port (0: a free one) and returns it; nothing is answered before `start`.
        With `tls`, only clients that show a certificate of its CA are answered. `flag` names the
        port's option."""
        if port:  # gRPC does not say why it cannot have it
            bind(host.strip("[]"), port, "gRPC", flag).close()
        try:
            if tls is None:
                return self.server.add_insecure_port(f"{host}:{port}")
            return self.server.add_secure_port(f"{host}:{port}", _server_credentials(tls))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port} for gRPC: {error}") from error

    async def start(self) -> None:
        names = [*self._services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self.server)
        await self.server.start()

    async def set_healthy(self, healthy: bool) -> None:
        """Sets the health of every service, and of the server as a whole ('')."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if healthy else status.NOT_SERVING
        for name in ("", *self._services):
            await self.health.set(name, value)

    async def stop(self, grace: float) -> None:
        await self.server.stop(grace)


def _server_credentials(tls: TLS) -> grpc.ServerCredentials:
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.ca.read_bytes(), require_client_auth=True)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls before their message is read. With a key, callers show a token; without one,
    but with TLS, a certificate that names their role; with neither, everybody may call."""

    def __init__(self, key: ClusterKey | None = None, *, by_certificate: bool = False) -> None:
        self._key = key
        self._by_certificate = by_certificate and key is None
        self.address = ""  # where callers dial this server, once it is known
        self._logged_at, self._unlogged = float("-inf"), 0

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler: Handler | None = await continuation(details)
        method: str = details.method
        if handler is None or method.startswith(OPEN):
            return handler
        token = dict(details.invocation_metadata or ()).get(TOKEN_KEY)
        try:
            caller_var.set(self._caller(token, method))
        except ClusterAuthError as error:
            self._log_refusal(method, error)
            return _refuse(error)
        return self._certified(handler, method) if self._by_certificate else handler

    def _caller(self, token: str | None, method: str) -> Caller | None:
        if self._key is not None:
            return self._key.check(token, method, self.address)
        if token is not None:
            raise no_key_here()
        return None

    def _certified(self, handler: Handler, method: str) -> Handler:
        """The handler, for callers whose certificate names a role that may call it. (Only the
        handler's own context knows the certificate.)"""

        async def check(context: Context) -> None:
            roles = certified_roles(context.auth_context())
            try:
                check_role(roles, method)
            except ClusterAuthError as error:
                self._log_refusal(method, error)
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

    def _log_refusal(self, method: str, error: ClusterAuthError) -> None:
        now = time.monotonic()
        if now - self._logged_at < _LOG_INTERVAL:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        logger.warning("refused a call of %s: %s%s", method, error.message, more)
        self._logged_at, self._unlogged = now, 0


def _refuse(error: ClusterAuthError) -> Handler:
    """Answers any call with the error; its messages are never read."""

    async def refuse(requests: Any, context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
