"""gRPC servers and channels, made one way for every role."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import bind
from pdserve.common.rpc.guard import Guard, SignedChannel
from pdserve.common.rpc.tls import TLS

# Either end of a link that is cut without a word knows it after 15 seconds: a client's call fails,
# a server's is cancelled, which frees its blocks.
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # else a minute: it outweighs the one above
    ("grpc.http2.max_pings_without_data", 0),  # pings go on while a call is silent
]
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail
    *KEEPALIVE,
    ("grpc.http2.max_ping_strikes", 0),  # no number of pings is too many
]
_CHANNEL_OPTIONS = [
    *_OPTIONS[:2],
    *KEEPALIVE,
    # A peer that restarts at its old address is found again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # despite its name: how long one attempt may take
    ("grpc.dns_ares_query_timeout", 3_000),  # a name that does not resolve fails soon …
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # … and is tried again soon
    ("grpc.enable_http_proxy", 0),
]


class GrpcServer:
    """A grpc.aio server with the standard health service and reflection."""

    def __init__(self, guard: Guard | None = None, max_message: int | None = None) -> None:
        """Without a guard everybody may call; `max_message` are bytes."""
        limit = [] if max_message is None else [("grpc.max_receive_message_length", max_message)]
        options = [*_OPTIONS, *limit]
        self.server = grpc.aio.server(options=options, interceptors=(guard or Guard(),))
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


class Channels:
    """Channels by address, made on first use and kept; mutual TLS with `tls`."""

    def __init__(
        self, tls: TLS | None = None, sign: Callable[[str, str], str] | None = None
    ) -> None:
        """`sign` makes the token of a call, given its method and the address."""
        self._credentials = None if tls is None else _channel_credentials(tls)
        self._sign = sign
        self._channels: dict[str, grpc.aio.Channel | SignedChannel] = {}

    def get(self, address: str) -> Any:
        """A `grpc.aio.Channel`, or what stands for one with those who sign their calls."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._signed(address)
        return channel

    def _signed(self, address: str) -> grpc.aio.Channel | SignedChannel:
        channel, sign = self._open(address), self._sign
        return SignedChannel(channel, lambda method: sign(method, address)) if sign else channel

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=_CHANNEL_OPTIONS)

    async def drop(self, addresses: Iterable[str]) -> None:
        for address in list(addresses):
            channel = self._channels.pop(address, None)
            if channel is not None:
                await channel.close(None)

    async def keep(self, addresses: Collection[str]) -> None:
        """Drops the channels to all others: each costs a connection, and trying for ever to
        reach what is gone."""
        await self.drop([address for address in self._channels if address not in addresses])

    def __len__(self) -> int:
        return len(self._channels)

    async def close(self) -> None:
        await self.drop(list(self._channels))


def _server_credentials(tls: TLS) -> grpc.ServerCredentials:
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], tls.ca.read_bytes(), require_client_auth=True)


def _channel_credentials(tls: TLS) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        tls.ca.read_bytes(), tls.key.read_bytes(), tls.cert.read_bytes()
    )
