"""The servers of a node, gRPC and metrics, and its registration with the router."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

import grpc
from prometheus_client.registry import Collector

from pdserve.common.config.node import NodeConfig
from pdserve.common.http.server import WebServer
from pdserve.common.obs.http import Readiness, bind_metrics, start_metrics_server
from pdserve.common.rpc.channels import Channels, Credentials
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.server import GrpcServer
from pdserve.common.rpc.tls import tls_mismatch

logger = logging.getLogger(__name__)

_STOP_GRACE = 1.0  # seconds in which gRPC calls must end when the node stops
_HEALTH_PERIOD = 0.5  # seconds between two calls of `ready`
_RPC_TIMEOUT = 2.0  # seconds
_RETRY_DELAY = 0.3
_PATIENCE = 3.0  # seconds without a router after which a warning is logged
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

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
        self._registration: Registration | None = None
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
        load: Callable[[], pb.NodeLoad],
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
        self._registration = Registration(
            self.config.router, info, load, self.channels, over_tls=self._tls is not None
        )
        self._tasks = [spawn(self._registration.run()), spawn(self._watch(ready))]
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
        """Deregisters, so that the router places no more jobs here."""
        registration, self._registration = self._registration, None
        for task in self._tasks:
            task.cancel()
        if registration is not None:
            await registration.deregister()

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


class Registration:
    """Keeps one node registered with one router until `deregister`, by heartbeats with its load.

    Router and node may start in any order, and the router may restart: whenever the router does not
    know the node, the node registers again. It also retries after a refusal, which may be about a
    node of the same id that has just died.
    """

    def __init__(
        self,
        router: str,
        info: pb.NodeInfo,
        load: Callable[[], pb.NodeLoad],
        channels: Channels,
        *,
        over_tls: bool = False,
    ) -> None:
        self._router = router
        self._stub = pb_grpc.RegistryStub(channels.get(router))
        self._info = info
        self._load = load
        self._over_tls = over_tls
        self._interval = 1.0
        self._registered = False

    async def run(self) -> None:
        """Runs until cancelled and retries for ever. A router that answered a moment ago may be
        restarting, or stopping with this node, so its absence is not logged at once."""
        reported, last_contact = "", -math.inf
        while True:
            try:
                await self._beat()
                reported, last_contact = "", monotonic()
            except grpc.aio.AioRpcError as error:
                self._registered = False
                reason = error.details() or error.code().name
                if error.code() not in _AWAY and reason != reported:
                    logger.warning("router %s: %s; trying again", self._router, reason)
                    reported = reason
                elif not reported and monotonic() - last_contact > _PATIENCE:
                    mismatch = await tls_mismatch(self._router, self._over_tls)
                    logger.warning("router %s: %s; trying again", self._router, mismatch or reason)
                    reported = reason
            await asyncio.sleep(self._interval if self._registered else _RETRY_DELAY)

    async def _beat(self) -> None:
        node_id, instance = self._info.node_id, self._info.instance
        if self._registered:
            beat = pb.HeartbeatRequest(
                node_id=node_id, load=self._load(), instance=instance, time_s=time.time()
            )
            self._registered = (await self._stub.Heartbeat(beat, timeout=_RPC_TIMEOUT)).known
        if not self._registered:
            request = pb.RegisterRequest(node=self._info, load=self._load(), time_s=time.time())
            response = await self._stub.Register(request, timeout=_RPC_TIMEOUT)
            self._interval, self._registered = response.heartbeat_interval_s, True
            logger.info("registered with router %s as %s", self._router, self._info.node_id)

    async def deregister(self) -> None:
        """Asks the router to send no more jobs; an unreachable router is ignored."""
        self._registered = False
        try:
            request = pb.DeregisterRequest(node_id=self._info.node_id, instance=self._info.instance)
            await self._stub.Deregister(request, timeout=_RPC_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            logger.info("router %s is away: %s", self._router, error.details())
