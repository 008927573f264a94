"""gRPC servers with the same options for every role, and the interceptor that checks callers."""

from __future__ import annotations

import logging
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from pdserve.common.core.errors import ClusterAuthError, ConfigError
from pdserve.common.core.host import bind
from pdserve.common.core.throttle import LogThrottle
from pdserve.common.rpc.auth import (
    REFLECTION,
    TOKEN_KEY,
    Caller,
    ClusterKey,
    caller_var,
    check_certificate,
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
    two_way,
)
from pdserve.common.rpc.reflection import Reflection
from pdserve.common.rpc.tls import TLS, certified_roles

logger = logging.getLogger(__name__)

# Both ends notice a silently broken connection after 15 seconds: a client's call fails, a server's
# is cancelled, which frees its blocks.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # overrides the one above; default: a minute
    ("grpc.http2.max_pings_without_data", 0),  # keep pinging during a silent call
]
MESSAGE_LIMITS = [
    ("grpc.max_receive_message_length", MAX_NBYTES),
    ("grpc.max_send_message_length", MAX_NBYTES),
]
WINDOW = 16 * 2**10  # bytes of a call that are buffered before its handler reads
MAX_PENDING = 2**15  # arrived calls that the event loop has not seen yet
# Limit for the TLS and HTTP/2 handshakes of a connection. A client on a full machine may take
# seconds until it answers the server's settings.
SILENCE_MS = 20_000
IDLE_MS = 60_000  # limit for a connection without calls
CONNECTIONS = 0.25  # connections as a share of this process's limit of open files
_OPTIONS = [
    *MESSAGE_LIMITS,
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail
    *KEEPALIVE,
    ("grpc.http2.max_ping_strikes", 0),  # do not limit pings
    # gRPC would silently cancel calls that the event loop has not accepted within 30 seconds;
    # callers have their own deadlines.
    ("grpc.server_max_unrequested_time_in_server", 24 * 3600),
    # gRPC would also cancel calls beyond 1,000 pending ones; handlers limit the load instead.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    ("grpc.http2.lookahead_bytes", WINDOW),
    ("grpc.http2.bdp_probe", 0),  # else the window grows to megabytes
    ("grpc.server_handshake_timeout_ms", SILENCE_MS),
    ("grpc.http2.settings_timeout", SILENCE_MS),
    # Else gRPC counts ended calls for `max_streams` until the event loop has let go of them, and
    # refuses more of a client that keeps to the bound (REFUSED_STREAM, which is UNAVAILABLE).
    ("grpc.http.overload_protection", 0),
    ("grpc.max_connection_idle_ms", IDLE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
]


def _is_no_late_status(record: logging.LogRecord) -> bool:
    """Leaves out gRPC's traceback of a status that could not be sent, because the client ended the
    call at the same moment."""
    return not str(record.msg).startswith("ExecuteBatchError raised in core by servicer method")


class GrpcServer:
    """A grpc.aio server with the standard health service and reflection."""

    def __init__(
        self,
        auth: Door | None = None,
        max_message: int | None = None,
        trace: grpc.aio.ServerInterceptor | None = None,
        shares_port: bool = False,
        max_streams: int | None = None,
        patient: bool = False,
    ) -> None:
        """Without `auth` everyone may call. `max_message`: bytes. `shares_port`: other processes of
        this user may listen at its port, too, and the kernel spreads connections over all.
        `max_streams`: calls of a connection at once; its client holds the others back. `patient`: a
        peer that does not answer a ping has 20 s instead of 5 s: its machine may be full."""
        auth = auth or AuthInterceptor()
        # If an option occurs twice, gRPC uses the first.
        limit = [] if max_message is None else [("grpc.max_receive_message_length", max_message)]
        crowd = ("grpc.max_allowed_incoming_connections", max_connections())
        shared = [("grpc.so_reuseport", 1)] if shares_port else []
        streams = [] if max_streams is None else [("grpc.max_concurrent_streams", max_streams)]
        pings = [("grpc.http2.ping_timeout_ms", SILENCE_MS)] if patient else []
        options = [*limit, crowd, *shared, *streams, *pings, *_OPTIONS]
        self._shares_port = shares_port
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
        """Binds the port (0: a free one) and returns it; it answers only after `start`. With `tls`,
        clients need a certificate of its CA. `flag`: the port's option, for errors."""
        if (
            port and not self._shares_port
        ):  # gRPC's own error does not say why the port is unavailable
            bind(host.strip("[]"), port, "gRPC", flag).close()
        bare = host.strip("[]")
        address = f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"
        try:
            if tls is None:
                return self.server.add_insecure_port(address)
            return self.server.add_secure_port(address, _server_credentials(tls))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port} for gRPC: {error}") from error

    async def start(self) -> None:
        names = [*self._services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self.server)
        await self.server.start()
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_late_status)

    async def set_healthy(self, healthy: bool) -> None:
        """Sets the health of every service, and of the server as a whole ('')."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if healthy else status.NOT_SERVING
        self.health.set(("", *self._services), value)

    async def stop(self, grace: float) -> None:
        await self.server.stop(grace)


def _server_credentials(tls: TLS) -> grpc.ServerCredentials:
    """Returns credentials that follow the files: gRPC asks for them before each handshake, in
    threads of its own."""
    files = tls.renewals()

    def read() -> Any:
        pair = (tls.key.read_bytes(), tls.cert.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], tls.ca.read_bytes())

    def renewed() -> Any:
        return read() if files.renewed() else None

    return grpc.dynamic_ssl_server_credentials(read(), renewed, require_client_authentication=True)


def max_connections() -> int:
    """Returns the limit of connections to one server, which leaves files for other ports and
    peers."""
    return int(CONNECTIONS * resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class Door(grpc.aio.ServerInterceptor):
    """An interceptor that decides who may call, before a message is read."""

    guarded = False  # true: callers must authenticate, except for health


class AuthInterceptor(Door):
    """Admits roles: by token if there is a key, else by certificate if there is TLS; with neither,
    everyone may call. With both, a certificate that names roles must name the token's."""

    def __init__(self, key: ClusterKey | None = None, *, by_certificate: bool = False) -> None:
        self._key = key
        self._by_certificate = by_certificate
        self.guarded = key is not None or by_certificate
        self._reflection = Reflection()
        self.address = ""  # this server's address for callers, once it is known
        self.on_refused: Callable[[str, ClusterAuthError], None] = lambda method, error: None
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
        if handler.request_streaming:

            def certify(context: Context) -> None:
                self._certify(context, method, caller)

            if method.startswith(REFLECTION):
                return self._reflection.bounded(handler, certify)
            return two_way(handler, certify)
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
        self._certify(context, method, caller)
        raw = await read_message(context, max_nbytes(method))
        if caller is not None:
            try:
                check_message(caller, raw)
            except ClusterAuthError as error:
                self._log_refusal(method, error)
                raise
        yield raw

    def _certify(self, context: Context, method: str, caller: Caller | None) -> None:
        """Checks that the peer's certificate names a role that may call, or `caller`'s, of the
        token. (Only the handler's context has the certificate.)"""
        if not self._by_certificate:
            return
        roles = certified_roles(context.auth_context())
        try:
            if caller is not None:
                check_certificate(caller, roles)
                return
            check_role(roles, method)
        except ClusterAuthError as error:
            self._log_refusal(method, error)
            raise
        caller_var.set(Caller(roles))

    def _log_refusal(self, method: str, error: ClusterAuthError) -> None:
        self._log.warning("refused a call to %s: %s", method, error.message)
        self.on_refused(method, error)
