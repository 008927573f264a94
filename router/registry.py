"""Which nodes there are, how loaded they are, and which may be used now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from google.protobuf.json_format import MessageToDict

from common.config.schema import RoutingConfig
from common.core.errors import Blame, NodeError, PdserveError
from common.rpc.pb import cluster_pb2 as pb
from router.breaker import BreakerState, CircuitBreaker

logger = logging.getLogger(__name__)

# A node that says so, or that did not answer, gets nothing until it is heard from again.
LOST_CODES = frozenset({"PEER_LOST", "DRAINING", "NODE_STOPPING", "RANK_DIED", "ENGINE_STALLED"})
ROLE_NAMES: dict[int, str] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


@dataclass(slots=True, eq=False)
class Node:
    """One registered node, as this router sees it."""

    info: pb.NodeInfo
    load: pb.NodeLoad
    last_seen: float
    breaker: CircuitBreaker
    in_flight: int = 0  # requests this router has on the node
    lost: bool = False  # a call found nobody there since the last heartbeat
    silent: bool = False  # its heartbeats have stopped
    # What to tell when they stop: a stalled host breaks no connection.
    on_lost: set[Callable[[PdserveError], None]] = field(default_factory=set)

    @property
    def role(self) -> str:
        return ROLE_NAMES[self.info.role]

    @property
    def replicas(self) -> int:
        """Those that share its load; a node of an older version does not say and has one."""
        return max(1, self.info.data_parallel_size)


class Registry:
    """Nodes by id. A node whose heartbeats stop is not used, and forgotten after ten
    time-outs; when it comes back it registers again."""

    def __init__(self, config: RoutingConfig, now: Callable[[], float] = monotonic) -> None:
        self._config = config
        self._now = now
        self._nodes: dict[str, Node] = {}
        self._leaving: list[Node] = []  # deregistered; what they have goes on
        self._changed = asyncio.Event()

    def register(self, info: pb.NodeInfo, load: pb.NodeLoad) -> None:
        breaker = CircuitBreaker(
            self._config.breaker_failures, self._config.breaker_cooldown, self._now
        )
        known = self._nodes.get(info.node_id)
        if known is not None:
            known.info, known.load = info, load
            known.last_seen, known.lost, known.silent = self._now(), False, False
        else:
            self._nodes[info.node_id] = Node(info, load, self._now(), breaker)
            logger.info(
                "%s registered: %s, %d KV blocks, tp %d, pp %d, ep %d, dp %d, connectors %s, "
                "fingerprint %s",
                info.node_id, info.address, info.num_blocks, info.tensor_parallel_size,
                info.pipeline_parallel_size, info.expert_parallel_size, info.data_parallel_size,
                ", ".join(info.kv_connectors), info.fingerprint,
            )  # fmt: skip
        self._notify()

    def heartbeat(self, node_id: str, load: pb.NodeLoad) -> bool:
        """False: the node is unknown and must register."""
        node = self._nodes.get(node_id)
        if node is None:
            return False
        revived = not self._alive(node) or (load.healthy and not node.load.healthy)
        node.load, node.last_seen, node.lost, node.silent = load, self._now(), False, False
        if revived:
            self._notify()
        return True

    def deregister(self, node_id: str) -> None:
        """The node drains: what it has goes on, nothing new is placed on it."""
        if (node := self._nodes.pop(node_id, None)) is not None:
            self._leaving.append(node)
            logger.info("%s deregistered", node_id)

    @contextmanager
    def using(self, node: Node) -> Iterator[None]:
        """A request on a node: counted while it lasts; how it ends is told to the breaker. A
        node that was not there is not used until it is heard from again."""
        node.in_flight += 1
        node.breaker.placed()
        try:
            yield
        except PdserveError as error:
            if error.blame.value == node.role:
                node.breaker.failed()
                node.lost = node.lost or error.code in LOST_CODES
            else:
                node.breaker.undecided()
            raise
        except BaseException:
            node.breaker.undecided()
            raise
        else:
            node.breaker.succeeded()
        finally:
            node.in_flight -= 1

    def usable(self, role: int) -> list[Node]:
        """Nodes of a role on which a request may be placed now."""
        return [
            node
            for node in self._nodes.values()
            if node.info.role == role
            and self._alive(node)
            and node.load.healthy
            and node.breaker.allows()
        ]

    def unusable_reasons(self, role: int) -> list[str]:
        """Why the registered nodes of a role on which no request may be placed now are so."""
        usable = self.usable(role)
        return [
            f"{node.info.node_id}: {self._why_unusable(node)}"
            for node in self._nodes.values()
            if node.info.role == role and node not in usable
        ]

    async def wait_for_change(self) -> None:
        """Returns when a node came or came back."""
        await self._changed.wait()

    def sweep(self) -> None:
        """Ends what is in flight on nodes that have fallen silent; drops those that have been
        silent for long."""
        for node in list(self._nodes.values()):
            if not node.silent and self._now() - node.last_seen > self._config.heartbeat_timeout:
                self._fell_silent(node)
        limit = 10 * self._config.heartbeat_timeout
        for node_id, node in list(self._nodes.items()):
            if self._now() - node.last_seen > limit and node.in_flight == 0:
                logger.warning("%s is lost: silent for %.0f s", node_id, limit)
                del self._nodes[node_id]

    def _fell_silent(self, node: Node) -> None:
        node.silent = True
        logger.warning("%s is silent; its requests go elsewhere", node.info.node_id)
        error = NodeError(
            f"{node.info.node_id} is silent", code="PEER_LOST", blame=Blame(node.role)
        )
        for tell in list(node.on_lost):
            tell(error)

    def addresses(self) -> set[str]:
        """Of the nodes that are registered or still have requests of this router."""
        self._leaving = [node for node in self._leaving if node.in_flight]
        return {node.info.address for node in (*self._nodes.values(), *self._leaving)}

    def describe(self) -> list[dict[str, Any]]:
        """All nodes, for `/v1/cluster`."""
        return [self._describe(node) for node in self._nodes.values()]

    def counts(self) -> dict[tuple[str, str], int]:
        """Nodes by (role, state), for the metrics."""
        counts: dict[tuple[str, str], int] = {}
        for node in self._nodes.values():
            key = (node.role, self._state(node))
            counts[key] = counts.get(key, 0) + 1
        return counts

    def trips(self) -> int:
        """How often the breakers of the present nodes opened."""
        return sum(node.breaker.trips for node in self._nodes.values())

    def _alive(self, node: Node) -> bool:
        fresh = self._now() - node.last_seen <= self._config.heartbeat_timeout
        return fresh and not node.lost

    def _state(self, node: Node) -> str:
        if not self._alive(node):
            return "lost"
        if not node.load.healthy:
            return "unhealthy"
        return "ready" if node.breaker.state is BreakerState.CLOSED else "broken"

    def _why_unusable(self, node: Node) -> str:
        if not self._alive(node):
            return "it does not answer"
        if not node.load.healthy:
            return node.load.reason
        return "its circuit breaker is open"

    def _describe(self, node: Node) -> dict[str, Any]:
        load = node.load
        info = MessageToDict(node.info, preserving_proto_field_name=True)
        info["role"] = node.role
        return {
            **info,
            "state": self._state(node),
            "reason": load.reason,
            "breaker": node.breaker.state.value,
            "in_flight": node.in_flight,
            "running": load.running,
            "waiting": load.waiting,
            "free_blocks": load.free_blocks,
            "most_free_blocks": load.most_free_blocks,
            "total_blocks": load.total_blocks,
            "kv_cache_usage": 1 - load.free_blocks / max(1, load.total_blocks),
            "seconds_since_heartbeat": round(self._now() - node.last_seen, 3),
        }

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
