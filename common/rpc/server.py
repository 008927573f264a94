"""gRPC servers, made one way for every role, and who may make which call of them."""

from __future__ import annotations

import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from pdserve.common.core.errors import ClusterAuthError, ConfigError
from pdserve.common.core.host import bind
from pdserve.common.core.throttle import LogThrottle
from pdserve.common.rpc.auth import (
    TOKEN_KEY,
    Caller,
    ClusterKey,
    caller_var,
    check_message,
    check_role,
    no_key_here,
)
from pdserve.common.rpc.health import SERVICE as HEALTH
from pdserve.common.rpc.health import Health
from pdserve.common.rpc.receive import (
    MAX_NBYTES,
    Context,
    Handler,
    max_nbytes,
    read_message,
    reading_first,
    refuse,
)
from pdserve.common.rpc.reflection import Reflection
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
    ("grpc.max_receive_message_length", MAX_NBYTES),
    ("grpc.max_send_message_length", MAX_NBYTES),
]
WINDOW = 16 * 2**10  # bytes of a call that are taken before its handler reads
MAX_PENDING = 2**15  # calls that have come and that the event loop has not seen yet
SILENCE_MS = 5_000  # in which a connection speaks TLS and HTTP/2, and answers our settings
IDLE_MS = 60_000  # that a connection may have no call
CONNECTIONS = 0.25  # of the files that this process may open
_OPTIONS = [
    *MESSAGE_LIMITS,
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail
    *KEEPALIVE,
    ("grpc.http2.max_ping_strikes", 0),  # no number of pings is too many
    # Seconds that a call waits until the event loop turns to it. After 30, which is gRPC's own
    # number, it would be cancelled without a word; those who wait have deadlines of their own.
    ("grpc.server_max_unrequested_time_in_server", 24 * 3600),
    # And so would calls be of which more than 1,000 wait. What is too much, handlers say.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    ("grpc.http2.lookahead_bytes", WINDOW),
    ("grpc.http2.bdp_probe", 0),  # else the window grows to megabytes
    ("grpc.server_handshake_timeout_ms", SILENCE_MS),
    ("grpc.http2.settings_timeout", SILENCE_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
]


class GrpcServer:
    """A grpc.aio server with the standard health service and reflection."""

    def __init__(
        self,
        auth: Door | None = None,
        max_message: int | None = None,
        trace: grpc.aio.ServerInterceptor | None = None,
    ) -> None:
        """Without `auth` everybody may call; `max_message` are bytes."""
        auth = auth or AuthInterceptor()
        # Of an option that is there twice gRPC takes the first.
        limit = [] if max_message is None else [("grpc.max_receive_message_length", max_message)]
        crowd = ("grpc.max_allowed_incoming_connections", max_connections())
        options = [*limit, crowd, *_OPTIONS]
        interceptors = [auth, *filter(None, [trace])]
        self.server = grpc.aio.server(options=options, interceptors=interceptors)
        self.health = Health(reads=not auth.guarded)
        self.server.add_generic_rpc_handlers((self.health,))
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
        self.health.set(("", *self._services), value)

    async def stop(self, grace: float) -> None:
        await self.server.stop(grace)


def _server_credentials(tls: TLS) -> grpc.ServerCredentials:
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.ca.read_bytes(), require_client_auth=True)


def max_connections() -> int:
    """Of one server: a crowd at its port leaves files for the other ports, and for peers."""
    return int(CONNECTIONS * resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class Door(grpc.aio.ServerInterceptor):
    """Decides who may call, before a message is read."""

    guarded = False  # strangers reach this port, and may ask for its health alone


class AuthInterceptor(Door):
    """Lets roles in. With a key, callers show a token; without one, but with TLS, a certificate
    that names their role; with neither, everybody may call."""

    def __init__(self, key: ClusterKey | None = None, *, by_certificate: bool = False) -> None:
        self._key = key
        self._by_certificate = by_certificate and key is None
        self.guarded = key is not None or by_certificate
        self._reflection = Reflection()
        self.address = ""  # where callers dial this server, once it is known
        self._log = LogThrottle(logger)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler: Handler | None = await continuation(details)
        method: str = details.method
        if handler is None or method.startswith(HEALTH):
            return handler
        token = dict(details.invocation_metadata or ()).get(TOKEN_KEY)
        try:
            caller = self._caller(token, method)
        except ClusterAuthError as error:
            self._log_refusal(method, error)
            return refuse(error)
        caller_var.set(caller)
        if handler.request_streaming:  # no other method of roles is
            return self._reflection.bounded(handler, lambda context: self._certify(context, method))
        return reading_first(handler, lambda context: self._reading(context, method, caller))

    def _caller(self, token: str | None, method: str) -> Caller | None:
        if self._key is not None:
            return self._key.check(token, method, self.address)
        if token is not None:
            raise no_key_here()
        return None

    @asynccontextmanager
    async def _reading(
        self, context: Context, method: str, caller: Caller | None
    ) -> AsyncIterator[bytes]:
        self._certify(context, method)
        raw = await read_message(context, max_nbytes(method))
        if caller is not None:
            try:
                check_message(caller, raw)
            except ClusterAuthError as error:
                self._log_refusal(method, error)
                raise
        yield raw

    def _certify(self, context: Context, method: str) -> None:
        """The peer's certificate must name a role that may call. (Only the handler's own context
        knows the certificate.)"""
        if not self._by_certificate:
            return
        roles = certified_roles(context.auth_context())
        try:
            check_role(roles, method)
        except ClusterAuthError as error:
            self._log_refusal(method, error)
            raise
        caller_var.set(Caller(roles))

    def _log_refusal(self, method: str, error: ClusterAuthError) -> None:
        self._log.warning("refused a call of %s: %s", method, error.message)
