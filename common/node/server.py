"""What every node has besides its engine: a gRPC server, a metrics server, a registration."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry

from pdserve.common.config.node import NodeConfig
from pdserve.common.node.registration import Registration
from pdserve.common.obs.http import MetricsServer, Readiness, bind_metrics, start_metrics_server
from pdserve.common.rpc.channels import Credentials
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.server import GrpcServer

logger = logging.getLogger(__name__)

_STOP_GRACE = 1.0  # seconds gRPC calls in flight get when the node stops
_HEALTH_PERIOD = 0.5  # seconds between two calls of `ready`

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs work in the background; an exception that the work lets pass ends the node."""


class NodeServer:
    """Start order: `bind` (the address is known), `start`; later `drain`, `stop`."""

    def __init__(self, config: NodeConfig, credentials: Credentials) -> None:
        self.config = config
        self._auth = credentials.interceptor()
        self.grpc = GrpcServer(self._auth)
        self.channels = credentials.channels()
        self._tls = credentials.tls
        self._registration: Registration | None = None
        self._metrics_socket: socket.socket | None = None  # until it is served
        self._metrics: MetricsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def bind(self) -> str:
        """Takes the ports, before anything else is done; returns the address to announce."""
        self._metrics_socket = bind_metrics(self.config.host, self.config.metrics_port)
        port = self.grpc.bind(self.config.host, self.config.grpc_port, self._tls)
        self._auth.address = f"{self._host}:{port}"
        return self._auth.address

    @property
    def _host(self) -> str:
        """Under which others reach this node."""
        if self.config.advertise_host == "auto":
            return socket.gethostname()
        return self.config.advertise_host or self.config.host

    def add(self, service: str, add_to_server: Any, servicer: Any) -> None:
        """Adds one of cluster.proto's services."""
        self.grpc.add(pb.DESCRIPTOR.services_by_name[service], add_to_server, servicer)

    async def start(
        self,
        info: pb.NodeInfo,
        load: Callable[[], pb.NodeLoad],
        metrics: CollectorRegistry,
        ready: Readiness,
        spawn: Spawn,
    ) -> None:
        """Serves, then registers: a node is never known before it can answer."""
        await self.grpc.start()
        await self.grpc.set_healthy(True)
        bound, self._metrics_socket = self._metrics_socket, None
        assert bound is not None, "bind comes first"
        self._metrics = await start_metrics_server(bound, metrics, ready)
        info.metrics_address = f"{self._host}:{self._metrics.port}"
        info.host = socket.gethostname()
        self._registration = Registration(
            self.config.router, info, load, self.channels, over_tls=self._tls is not None
        )
        self._tasks = [spawn(self._registration.run()), spawn(self._watch(ready))]
        logger.info("serving gRPC on %s, metrics on %s", info.address, info.metrics_address)

    async def _watch(self, ready: Readiness) -> None:
        """The standard health service says what `ready` says; every change is logged."""
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
        """The router places nothing here any more."""
        registration, self._registration = self._registration, None
        for task in self._tasks:
            task.cancel()
        if registration is not None:
            await registration.deregister()

    async def drain(self, idle: Callable[[], bool]) -> None:
        """Returns when `idle` says that the old work is done."""
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
