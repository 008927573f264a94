"""The servers of a node, gRPC and metrics."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from prometheus_client.registry import Collector

from pdserve.common.config.node import NodeConfig
from pdserve.common.http.server import WebServer
from pdserve.common.node.registration import Registrations
from pdserve.common.obs.http import Readiness, bind_metrics, start_metrics_server
from pdserve.common.rpc.channels import Credentials
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.server import GrpcServer

logger = logging.getLogger(__name__)

_STOP_GRACE = 1.0  # seconds in which gRPC calls must end when the node stops
_HEALTH_PERIOD = 0.5  # seconds between two calls of `ready`

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs work in the background; an exception of the work ends the node."""


class NodeServer:
    """Runs the servers. The order of calls is `bind`, `start`, `drain`, `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        credentials: Credentials,
        trace: grpc.aio.ServerInterceptor | None = None,
    ) -> None:
        self.config = config
        self._auth = credentials.interceptor()
        self.grpc = GrpcServer(self._auth, trace=trace)
        self.channels = credentials.channels()
        self._tls = credentials.tls
        self._registrations: Registrations | None = None
        self._metrics_socket: socket.socket | None = None  # until it is served
        self._metrics: WebServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def bind(self) -> str:
        """Binds the ports, before the ranks start; returns the address to announce."""
        self._metrics_socket = bind_metrics(self.config.host, self.config.metrics_port)
        port = self.grpc.bind(self.config.host, self.config.grpc_port, self._tls)
        self._auth.address = f"{self._host}:{port}"
        return self._auth.address

    @property
    def _host(self) -> str:
        """Returns the host by which others reach this node."""
        if self.config.advertise_host == "auto":
            return socket.gethostname()
        return self.config.advertise_host or self.config.host

    def add(self, service: str, add_to_server: Any, servicer: Any) -> None:
        """Adds a service of cluster.proto."""
        self.grpc.add(pb.DESCRIPTOR.services_by_name[service], add_to_server, servicer)

    async def start(
        self,
        info: pb.NodeInfo,
        load: Callable[[str], pb.NodeLoad],
        metrics: Collector,
        ready: Readiness,
        spawn: Spawn,
    ) -> None:
        """Serves, then registers, so that a registered node can answer."""
        await self.grpc.start()
        await self.grpc.set_healthy(True)
        bound, self._metrics_socket = self._metrics_socket, None
        assert bound is not None, "bind comes first"
        self._metrics = await start_metrics_server(bound, metrics, ready)
        info.metrics_address = f"{self._host}:{self._metrics.port}"
        info.host = socket.gethostname()
        self._registrations = Registrations(
            self.config.routers, info, load, self.channels, over_tls=self._tls is not None
        )
        self._tasks = [spawn(self._registrations.run()), spawn(self._watch(ready))]
        logger.info("serving gRPC on %s, metrics on %s", info.address, info.metrics_address)

    async def _watch(self, ready: Readiness) -> None:
        """Keeps the standard health service equal to `ready`, and logs every change."""
        was_healthy = True
        while True:
            healthy, reason = ready()
            if healthy != was_healthy:
                level = logging.INFO if healthy else logging.WARNING
                logger.log(level, "%s: %s", "healthy again" if healthy else "unhealthy", reason)
                await self.grpc.set_healthy(healthy)
            was_healthy = healthy
            await asyncio.sleep(_HEALTH_PERIOD)

    async def leave(self) -> None:
        """Deregisters, so that no router places more jobs here."""
        registrations, self._registrations = self._registrations, None
        for task in self._tasks:
            task.cancel()
        if registrations is not None:
            await registrations.deregister()

    async def drain(self, idle: Callable[[], bool]) -> None:
        """Returns once the node is `idle`."""
        await self.grpc.set_healthy(False)
        while not idle():
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        await self.leave()
        await self.grpc.stop(_STOP_GRACE)
        if self._metrics is not None:
            await self._metrics.close()
        if self._metrics_socket is not None:
            self._metrics_socket.close()
        await self.channels.close()
