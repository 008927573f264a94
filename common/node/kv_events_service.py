"""Serves a node's KV events: to routers over gRPC and, if configured, over ZeroMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc

from pdserve.common.config.kv_events import KVEventsConfig
from pdserve.common.core.errors import Blame
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.node.kv_events import KVEventLog, Subscription
from pdserve.common.node.kv_publisher import KVEventPublisher
from pdserve.common.node.server import Spawn
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import serving


class KVEventsService(pb_grpc.KVEventsServicer):
    """Sends KV events to the routers that subscribe, and to the ZeroMQ publishers."""

    def __init__(self, metrics: NodeMetrics, blame: Blame) -> None:
        self._metrics = metrics
        self._blame = blame
        self._logs: list[KVEventLog] = []  # of each replica
        self._subscriptions: set[Subscription] = set()
        self._publishers: list[KVEventPublisher] = []  # of each replica, if configured

    def bind(self, config: KVEventsConfig, replicas: int) -> None:
        """Makes the publishers, before the ranks start. Raises ConfigError: an endpoint cannot be
        used."""
        for replica in range(replicas):
            self._publishers.append(KVEventPublisher(config, replica))

    def start(self, pools: Sequence[KVPool], spawn: Spawn) -> None:
        """Follows the pools of all replicas."""
        self._logs = [KVEventLog(*each, self._metrics) for each in enumerate(pools)]
        for log, publisher in zip(self._logs, self._publishers, strict=False):
            log.attach(publisher.publish)
            spawn(publisher.serve())

    async def Subscribe(
        self, request: pb.KVEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.KVEventsMessage]:
        async with serving(context, self._blame):
            subscription = Subscription(self._logs, self._metrics)
            self._subscriptions.add(subscription)
            try:
                async with aclosing(subscription.messages()) as messages:
                    async for message in messages:
                        yield message
            finally:
                self._subscriptions.discard(subscription)

    def end(self) -> None:
        """Ends all subscriptions, as the node stops."""
        for subscription in self._subscriptions:
            subscription.end()

    def close(self) -> None:
        """Closes the publishers, once nothing that `spawn` runs uses them."""
        for log, publisher in zip(self._logs, self._publishers, strict=False):
            log.detach(publisher.publish)
        for publisher in self._publishers:
            publisher.close()
