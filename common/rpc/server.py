"""gRPC servers and channels, made one way for every role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from common.core.errors import ConfigError

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.so_reuseport", 0),  # a second server on the same port must fail
]
_CHANNEL_OPTIONS = [
    *_OPTIONS[:2],
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]


class GrpcServer:
    """A grpc.aio server with the standard health service and reflection."""

    def __init__(self) -> None:
        self.server = grpc.aio.server(options=_OPTIONS)
        self.health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self._services: list[str] = []

    def add(self, descriptor: Any, add_to_server: Any, servicer: Any) -> None:
        """Adds one service, e.g. `add(pb.DESCRIPTOR.services_by_name["Decode"], …)`."""
        add_to_server(servicer, self.server)
        self._services.append(descriptor.full_name)

    def bind(self, host: str, port: int) -> int:
        """Takes the port (0: a free one) and returns it; nothing is answered before `start`."""
        try:
            return self.server.add_insecure_port(f"{host}:{port}")
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
    """Channels by address, made on first use and kept."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            self._channels[address] = channel
        return channel

    async def drop(self, addresses: Iterable[str]) -> None:
        for address in list(addresses):
            channel = self._channels.pop(address, None)
            if channel is not None:
                await channel.close(None)

    async def close(self) -> None:
        await self.drop(list(self._channels))
