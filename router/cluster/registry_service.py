"""The registry over gRPC, at a port of its own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import ClusterAuthError, InvalidRequest, PdserveError
from pdserve.common.core.host import is_address
from pdserve.common.core.kv_groups import MAX_PART_LENGTH
from pdserve.common.core.printable import printable
from pdserve.common.rpc.auth import caller_var
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import serving
from pdserve.router.cluster.node import ROLE_NAMES
from pdserve.router.cluster.registry import Registry

MAX_MESSAGE_NBYTES = 1 << 20
MAX_HEARTBEATS_PER_S = 500  # of all nodes; more nodes send them more rarely
LONGEST_INTERVAL = 0.4  # of --heartbeat-timeout, between two heartbeats for that reason
MAX_REASON_LENGTH = 1000  # longer reasons are cut
_MAX_LENGTHS = {  # characters
    "model": 1024, "fingerprint": 128, "host": 255, "metrics_address": 261, "instance": 64,
}  # fmt: skip
_MAX_PARTS = 64
_MAX_REPLICAS = 1024  # each is a place of the prefix index
_MAX_CONNECTORS, _MAX_CONNECTOR_LENGTH = 16, 128
_MAX_ADAPTERS, _MAX_DIGEST_LENGTH = 2048, 64
_ELSEWHERE = (
    "nodes do not register at this port: give the router's --registry-port (8002) in --router"
)
_NODE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryService(pb_grpc.RegistryServicer):
    """Registers nodes. It refuses nodes of another model, because the router cannot tokenize for
    them."""

    def __init__(
        self,
        registry: Registry,
        model: str,
        routing: RoutingConfig,
        sibling_ports: Sequence[int] = (),
    ) -> None:
        """`sibling_ports`: where other workers of this router take registrations."""
        self._registry = registry
        self._model = model
        self._routing = routing
        self._sibling_ports = sibling_ports

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        async with serving(context):
            with self._noting_refusal():
                check_shape(request.node)
                self._check(request.node)
                _cut(request.load)
                self._registry.register(request.node, request.load)
            self._registry.clock_shown(request.node.node_id, request.time_s)
        return pb.RegisterResponse(
            heartbeat_interval_s=self._interval(),
            router=self._registry.router_id,
            sibling_ports=self._sibling_ports,
        )

    async def Heartbeats(
        self, requests: AsyncIterator[pb.HeartbeatRequest], context: Context
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        async for request in requests:
            _cut(request.load)
            known = self._registry.heartbeat(request.node_id, request.load, request.instance)
            if known:
                self._registry.clock_shown(request.node_id, request.time_s)
            yield pb.HeartbeatResponse(known=known, heartbeat_interval_s=self._interval())

    async def Deregister(
        self, request: pb.DeregisterRequest, context: Context
    ) -> pb.DeregisterResponse:
        async with serving(context):
            self._registry.deregister(request.node_id, request.instance)
        return pb.DeregisterResponse()

    def _interval(self) -> float:
        """Returns the seconds between a node's heartbeats: more in a large cluster, but so few that
        two may be lost."""
        usual = self._routing.heartbeat_interval
        most = max(usual, LONGEST_INTERVAL * self._routing.heartbeat_timeout)
        return min(max(usual, self._registry.num_nodes / MAX_HEARTBEATS_PER_S), most)

    @contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        try:
            yield
        except PdserveError as error:
            self.refused("", error)
            raise

    def refused(self, method: str, error: PdserveError) -> None:
        """Notes that a node was refused, here or because it could not authenticate."""
        self._registry.refusals.note(printable(error.message, MAX_REASON_LENGTH))

    def _check(self, node: pb.NodeInfo) -> None:
        if node.model != self._model:
            raise InvalidRequest(
                f"{node.node_id} serves {node.model!r} but this router serves {self._model!r}: "
                "give both the same --model or --served-model-name"
            )
        caller, role = caller_var.get(), ROLE_NAMES[node.role]
        if caller is not None and not caller.is_node(role, node.node_id):
            raise ClusterAuthError(f"the caller is not the {role} node {node.node_id}")


class ElsewhereRegistry(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers nodes that call the clients' port with the name of the right one."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if not details.method.startswith("/pdserve.v1.Registry/"):
            return None
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: Any, context: Context) -> None:
        self._registry.refusals.note(_ELSEWHERE, "clients")
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, _ELSEWHERE)


def check_shape(node: pb.NodeInfo) -> None:
    """Raises InvalidRequest: a field is missing, malformed or too long."""
    if node.role not in ROLE_NAMES or not node.node_id or not node.address:
        raise InvalidRequest("a node must state its id, role and address")
    if not _NODE_ID.fullmatch(node.node_id):
        raise InvalidRequest("a node's id has 1 to 64 letters, digits, dots and dashes")
    if not is_address(node.address):
        raise InvalidRequest("a node's address is HOST:PORT")
    for name, limit in _MAX_LENGTHS.items():
        if len(getattr(node, name)) > limit:
            raise InvalidRequest(f"a node's {name} has at most {limit} characters")
    if node.data_parallel_size > _MAX_REPLICAS:
        raise InvalidRequest(f"a node has at most {_MAX_REPLICAS} replicas")
    parts = node.fingerprint_parts
    if len(parts) > _MAX_PARTS or any(
        len(text) > MAX_PART_LENGTH for item in parts.items() for text in item
    ):
        raise InvalidRequest(
            f"a fingerprint has at most {_MAX_PARTS} parts of {MAX_PART_LENGTH} characters"
        )
    if len(node.kv_connectors) > _MAX_CONNECTORS or any(
        len(name) > _MAX_CONNECTOR_LENGTH for name in node.kv_connectors
    ):
        raise InvalidRequest(
            f"a node has at most {_MAX_CONNECTORS} connectors, with names of at most "
            f"{_MAX_CONNECTOR_LENGTH} characters"
        )
    if len(node.adapters) > _MAX_ADAPTERS or any(
        len(digest) > _MAX_DIGEST_LENGTH for digest in node.adapters
    ):
        raise InvalidRequest(
            f"a node has at most {_MAX_ADAPTERS} adapters, with digests of at most "
            f"{_MAX_DIGEST_LENGTH} characters"
        )


def _cut(load: pb.NodeLoad) -> None:
    """Cuts the reason, which clients see."""
    load.reason = printable(load.reason, MAX_REASON_LENGTH)
