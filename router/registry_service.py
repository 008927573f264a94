"""The registry over gRPC."""

from __future__ import annotations

import grpc

from common.core.errors import InvalidRequest
from common.rpc.pb import cluster_pb2 as pb
from common.rpc.pb import cluster_pb2_grpc as pb_grpc
from common.rpc.status import serving
from router.registry import ROLE_NAMES, Registry


class RegistryService(pb_grpc.RegistryServicer):
    """Nodes of another model are refused: the router could not tokenize for them."""

    def __init__(self, registry: Registry, model: str, heartbeat_interval: float) -> None:
        self._registry = registry
        self._model = model
        self._heartbeat_interval = heartbeat_interval

    async def Register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext
    ) -> pb.RegisterResponse:
        async with serving(context):
            self._check(request.node)
            self._registry.register(request.node, request.load)
        return pb.RegisterResponse(heartbeat_interval_s=self._heartbeat_interval)

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> pb.HeartbeatResponse:
        return pb.HeartbeatResponse(known=self._registry.heartbeat(request.node_id, request.load))

    async def Deregister(
        self, request: pb.DeregisterRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeregisterResponse:
        self._registry.deregister(request.node_id)
        return pb.DeregisterResponse()

    def _check(self, node: pb.NodeInfo) -> None:
        if node.role not in ROLE_NAMES or not node.node_id or not node.address:
            raise InvalidRequest("a node must state its id, role and address")
        if node.model != self._model:
            raise InvalidRequest(
                f"{node.node_id} serves {node.model!r} but this router serves {self._model!r}: "
                "give both the same --model or --served-model-name"
            )
