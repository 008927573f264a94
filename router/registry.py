"""Which nodes there are, how loaded they are, and which may be used now.

A node is judged by what this router sees on its own calls to it. What one node says of another
concerns the pair (`Pairs`): neither is worse for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import (
    Blame,
    NodeError,
    Overloaded,
    PdserveError,
    TransferError,
    Unavailable,
)
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.breaker import BreakerState, CircuitBreaker, Pairs
from pdserve.router.clock import AwakeClock

logger = logging.getLogger(__name__)

# A node that says so, or that did not answer, gets nothing until it is heard from again.
LOST_CODES = frozenset(
    {
        "PEER_LOST",
        "PEER_SILENT",
        "UNREACHABLE",
        "DRAINING",
        "NODE_STOPPING",
        "RANK_DIED",
        "ENGINE_STALLED",
    }
)
# Of transfers: the way between two nodes, not either of them.
PARTED_CODES = frozenset({"PEER_LOST", "CONNECT_FAILED", "LEASE_EXPIRED", "NO_COMMON_CONNECTOR"})
# Registered at a time, lost ones included until they are forgotten; and new ones, which is enough
# for a big cluster that comes back at once and stops a node that dies and returns for ever.
MAX_NODES = 1024
NEW_NODES_BURST, NEW_NODES_PER_S = 256, 32.0
ROLE_NAMES: dict[int, str] = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode"}


@dataclass(slots=True, eq=False)
class Node:
    """One registered node, as this router sees it."""

    info: pb.NodeInfo
    load: pb.NodeLoad
    last_seen: float
    breaker: CircuitBreaker
    in_flight: int = 0  # requests this router has on the node
    # Tokens that it still has to prefill for each of them, in order of arrival.
    prefilling: dict[Use, int] = field(default_factory=dict)
    prefill_tokens: int = 0  # their sum
    suspect: object = None  # of a request that has its last chance here
    lost: bool = False  # a call found nobody there since the last heartbeat
    silent: bool = False  # its heartbeats, or its answers, have stopped
    unreachable: str = ""  # why it does not answer us, though we may hear its heartbeats
    last_answer: float = 0.0  # when it did last
    # What to tell when they stop: a stalled host breaks no connection.
    on_lost: set[Callable[[PdserveError], None]] = field(default_factory=set)

    @property
    def role(self) -> str:
        return ROLE_NAMES[self.info.role]

    @property
    def replicas(self) -> int:
        """Those that share its load; a node of an older version does not say and has one."""
        return max(1, self.info.data_parallel_size)


class Use:
    """One request on a node, while it is there."""

    def __init__(
        self, registry: Registry, node: Node, prefill_tokens: int, suspect: object = None
    ) -> None:
        self._registry = registry
        self._node = node
        self._suspect = suspect
        node.suspect = suspect or node.suspect
        self.had_its_turn = False  # when it failed, it was the first in line to be prefilled
        node.in_flight += 1
        node.breaker.placed()
        if prefill_tokens:
            node.prefilling[self] = prefill_tokens
            node.prefill_tokens += prefill_tokens

    def worked(self) -> None:
        """The node has made a token: nothing more is to prefill, and a breaker's trial is over,
        as is the suspicion that the request kills nodes."""
        self._prefilled()
        self._cleared()
        self._node.breaker.succeeded()

    def failed(self, error: PdserveError) -> None:
        """A call to the node ended so."""
        self.had_its_turn = next(iter(self._node.prefilling), None) is self
        self._registry.failed(self._node, error)

    def end(self) -> None:
        self._prefilled()
        self._cleared()
        self._node.in_flight -= 1

    def _cleared(self) -> None:
        if self._suspect is not None and self._node.suspect is self._suspect:
            self._node.suspect = None
            self._registry.notify()
        self._suspect = None

    def _prefilled(self) -> None:
        self._node.prefill_tokens -= self._node.prefilling.pop(self, 0)


class Registry:
    """Nodes by id. A node whose heartbeats stop is not used, and forgotten after ten
    time-outs; when it comes back it registers again."""

    def __init__(self, config: RoutingConfig, now: Callable[[], float] | None = None) -> None:
        """`sweep` is to be called four times in each `--heartbeat-timeout`."""
        self._config = config
        self._now = now = now or AwakeClock(config.heartbeat_timeout / 2)
        self._nodes: dict[str, Node] = {}
        self._leaving: list[Node] = []  # deregistered; what they have goes on
        self._changed = asyncio.Event()
        self._room_for_new = float(NEW_NODES_BURST)  # a token bucket, as of `_filled_at`
        self._filled_at = now()
        self.pairs = Pairs(now)

    def register(self, info: pb.NodeInfo, load: pb.NodeLoad) -> None:
        """
        Raises:
            Unavailable: NODE_ID_TAKEN, another process has this id, and lives elsewhere.
            Overloaded: too many nodes, or too many new ones at once.
        """
        known = self._nodes.get(info.node_id)
        if known is not None and known.info.instance == info.instance:
            known.info, known.load = info, load
            known.last_seen, known.lost, known.silent = self._now(), False, False
        else:
            if known is None:
                self._check_room()
            else:
                self._make_way(known, info)
            breaker = CircuitBreaker(
                self._config.breaker_failures, self._config.breaker_cooldown, self._now
            )
            now = self._now()
            self._nodes[info.node_id] = Node(info, load, now, breaker, last_answer=now)
            logger.info(
                "%s registered: %s, %d KV blocks, tp %d, pp %d, ep %d, dp %d, connectors %s, "
                "fingerprint %s",
                info.node_id, info.address, info.num_blocks, info.tensor_parallel_size,
                info.pipeline_parallel_size, info.expert_parallel_size, info.data_parallel_size,
                ", ".join(info.kv_connectors), info.fingerprint,
            )  # fmt: skip
        self.notify()

    def _check_room(self) -> None:
        now = self._now()
        refilled = self._room_for_new + (now - self._filled_at) * NEW_NODES_PER_S
        self._room_for_new, self._filled_at = min(refilled, NEW_NODES_BURST), now
        if len(self._nodes) >= MAX_NODES:
            raise Overloaded(f"{MAX_NODES} nodes are registered", retry_after=10)
        if self._room_for_new < 1:
            raise Overloaded(
                f"more than {NEW_NODES_PER_S:.0f} new nodes a second register", retry_after=1
            )
        self._room_for_new -= 1

    def _make_way(self, known: Node, info: pb.NodeInfo) -> None:
        """For another process with the id of a node: at the same address the older one cannot be
        there any more; elsewhere it must have fallen silent."""
        if self._alive(known) and known.info.address != info.address:
            logger.warning(
                "refused to register %s at %s: that node lives, at %s",
                info.node_id, info.address, known.info.address,
            )  # fmt: skip
            raise Unavailable(
                f"{info.node_id} is a node that lives elsewhere: end it, or wait until it is lost",
                code="NODE_ID_TAKEN",
            )
        logger.warning(
            "%s at %s is replaced by a new process at %s",
            info.node_id, known.info.address, info.address,
        )  # fmt: skip
        self._leaving.append(known)
        self._end_requests(known, "PEER_LOST", "was replaced by a new process")

    def heartbeat(self, node_id: str, load: pb.NodeLoad, instance: str = "") -> bool:
        """False: the node is unknown and must register."""
        node = self._nodes.get(node_id)
        if node is None or node.info.instance != instance:
            return False
        revived = not self._alive(node) or (load.healthy and not node.load.healthy)
        node.load, node.last_seen, node.lost = load, self._now(), False
        node.silent = node.silent and bool(node.unreachable)
        if revived:
            self.notify()
        return True

    def answered(self, node: Node) -> None:
        """It answers calls of this router."""
        node.last_answer = self._now()
        if node.unreachable:
            logger.info("%s can be reached again", node.info.node_id)
            node.unreachable, node.silent = "", False
            self.notify()

    def unanswered(self, node: Node, reason: str, refused: bool) -> None:
        """It did not; `refused`: there is no connection at all, so that there is no point in
        waiting as long as for a heartbeat."""
        late = self._now() - node.last_answer > self._config.heartbeat_timeout
        if not node.unreachable and (refused or late):
            logger.warning("%s cannot be reached: %s", node.info.node_id, reason)
            node.unreachable = reason
        if late and not node.silent:
            self._fell_silent(node)

    def deregister(self, node_id: str, instance: str = "") -> None:
        """The node drains: what it has goes on, nothing new is placed on it."""
        node = self._nodes.get(node_id)
        if node is not None and node.info.instance == instance:
            del self._nodes[node_id]
            self._leaving.append(node)
            logger.info("%s deregistered", node_id)

    @contextmanager
    def using(self, node: Node, prefill_tokens: int = 0, suspect: object = None) -> Iterator[Use]:
        """A request on a node, which has so many tokens to prefill for it: counted while it
        lasts; how it ends is told to the breaker. A node that was not there is not used until
        it is heard from again. `suspect`: of all that may have killed nodes it is the one here."""
        use = Use(self, node, prefill_tokens, suspect)
        try:
            yield use
        except PdserveError as error:
            use.failed(error)
            raise
        except BaseException:
            node.breaker.undecided()
            raise
        else:
            node.breaker.succeeded()
        finally:
            use.end()

    def failed(self, node: Node, error: PdserveError) -> None:
        """Only a failure that is the node's own counts: not one of the network between two
        nodes, of a sequence, or of another node."""
        transfer = isinstance(error, TransferError) and error.code in PARTED_CODES
        if error.blame.value != node.role or transfer or error.code == "SEQUENCE_FAILED":
            node.breaker.undecided()
            return
        node.breaker.failed()
        node.lost = node.lost or error.code in LOST_CODES
        if error.code == "UNREACHABLE":
            self.unanswered(node, error.message, refused=True)

    def alive(self, role: int) -> list[Node]:
        """Nodes of a role that are there, whether or not they may be used."""
        return [
            node for node in self._nodes.values() if node.info.role == role and self._alive(node)
        ]

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def in_use(self) -> list[Node]:
        """Those of which requests of this router hope for something: a node that drains, too,
        which sends no heartbeats any more."""
        return self.nodes() + [node for node in self._leaving if node.in_flight]

    def usable(self, role: int) -> list[Node]:
        """Nodes of a role on which a request may be placed now."""
        return [node for node in self.alive(role) if node.load.healthy and node.breaker.allows()]

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
        self._end_requests(node, "PEER_SILENT", "is silent")

    def _end_requests(self, node: Node, code: str, why: str) -> None:
        message = f"{node.info.node_id} {why}"
        error = NodeError(message, code=code, blame=Blame(node.role))
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
        return fresh and not node.lost and not node.unreachable

    def _state(self, node: Node) -> str:
        if not self._alive(node):
            return "lost"
        if not node.load.healthy:
            return "unhealthy"
        return "ready" if node.breaker.state is BreakerState.CLOSED else "broken"

    def _why_unusable(self, node: Node) -> str:
        if node.unreachable:
            return f"it cannot be reached: {node.unreachable}"
        if not self._alive(node):
            return "it does not answer"
        if not node.load.healthy:
            return node.load.reason
        return "its circuit breaker is open"

    def _describe(self, node: Node) -> dict[str, Any]:
        load = node.load
        info = MessageToDict(node.info, preserving_proto_field_name=True)
        info["role"] = node.role
        info.pop("instance", None)  # a secret between the node and this router
        return {
            **info,
            "state": self._state(node),
            "reason": node.unreachable or load.reason,
            "breaker": node.breaker.state.value,
            "in_flight": node.in_flight,
            "prefill_tokens": node.prefill_tokens,
            "running": load.running,
            "waiting": load.waiting,
            "free_blocks": load.free_blocks,
            "most_free_blocks": load.most_free_blocks,
            "total_blocks": load.total_blocks,
            "kv_cache_usage": 1 - load.free_blocks / max(1, load.total_blocks),
            "seconds_since_heartbeat": round(self._now() - node.last_seen, 3),
        }

    def notify(self) -> None:
        """Whoever waits for a node looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
