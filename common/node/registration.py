"""A node's life at the router: register, heartbeat with the load, deregister.

The order of start does not matter, and neither does a router that restarts: whenever the
router does not know the node, the node registers again. A refusal is tried again as well: it may
be about a node of the same id that has just died.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from time import monotonic

import grpc

from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.tls import tls_mismatch

logger = logging.getLogger(__name__)

_RPC_TIMEOUT = 2.0  # seconds
_RETRY_DELAY = 0.3
_PATIENCE = 3.0  # seconds a router may be away before that is worth a warning
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Registration:
    """Keeps one node registered with one router until `deregister`."""

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
        """Runs until cancelled; a router that is away is retried for ever, quietly. One that was
        there a moment ago may be restarting, or be stopping as this node is about to."""
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
            beat = pb.HeartbeatRequest(node_id=node_id, load=self._load(), instance=instance)
            self._registered = (await self._stub.Heartbeat(beat, timeout=_RPC_TIMEOUT)).known
        if not self._registered:
            request = pb.RegisterRequest(node=self._info, load=self._load())
            response = await self._stub.Register(request, timeout=_RPC_TIMEOUT)
            self._interval, self._registered = response.heartbeat_interval_s, True
            logger.info("registered with router %s as %s", self._router, self._info.node_id)

    async def deregister(self) -> None:
        """Tells the router to send nothing more; a router that is away needs no telling."""
        self._registered = False
        try:
            request = pb.DeregisterRequest(node_id=self._info.node_id, instance=self._info.instance)
            await self._stub.Deregister(request, timeout=_RPC_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            logger.info("router %s is away: %s", self._router, error.details())
