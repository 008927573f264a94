"""Membership and liveness of nodes.

The router judges a node by its own calls to it. If one node reports a failure of another, only the
link between them counts as broken (`LinkBreakers`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf, isfinite

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Blame, NodeError, Overloaded, Unavailable
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.health import (
    AwakeClock,
    CircuitBreaker,
    Flows,
    LinkBreakers,
    Refusals,
)
from pdserve.router.cluster.kinds import Kinds
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.reports import note_impossible
from pdserve.router.cluster.window import note_short, offered

logger = logging.getLogger(__name__)

# Registered nodes, including lost ones until they are forgotten. New nodes have a rate, enough for
# a big cluster that comes back at once; it slows a node down that dies and returns endlessly.
MAX_NODES = 2048
NEW_NODES_BURST, NEW_NODES_PER_S = 1024, 32.0
MAX_SKEW = 10.0  # seconds; beyond WINDOW_S of `rpc.auth` calls are refused at first
MAX_GONE = 64  # versions whose lost prefill nodes are remembered


class Registry:
    """Nodes by id. A node without heartbeats is not used, and is forgotten after ten time-outs;
    when it comes back it registers again."""

    def __init__(
        self,
        config: RoutingConfig,
        now: Callable[[], float] | None = None,
        router_id: str = "",
    ) -> None:
        """Call `sweep` four times in each `--heartbeat-timeout`. `router_id`: this router's id, by
        which nodes distinguish its jobs from those of others."""
        self.router_id = router_id
        self._config = config
        self.clock = AwakeClock()
        self.now = now = now or self.clock
        self._nodes: dict[str, Node] = {}
        self.kinds = Kinds()  # of `_nodes`
        # The tokens of context that the router offers; None: no node is registered.
        self.window: int | None = None
        self.least_window = inf  # tokens that every registered node holds
        self._leaving: list[Node] = []  # deregistered nodes with requests in flight
        self._changed = asyncio.Event()
        self._room_for_new = float(NEW_NODES_BURST)  # a token bucket, filled at `_filled_at`
        self._filled_at = now()
        self.links = LinkBreakers(now)
        self.refusals = Refusals(now)
        # By fingerprint: when a lost and forgotten prefill node was last heard of.
        self.gone_prefills: dict[str, float] = {}
        self.flows = Flows()

    # ---- reports of nodes about themselves ---------------------------------------------------

    def register(self, info: pb.NodeInfo, load: pb.NodeLoad) -> None:
        """Adds the node, or renews its description.

        Raises:
            Unavailable: NODE_ID_TAKEN, another live process has this id.
            Overloaded: too many nodes are registered, or too many new ones at once.
        """
        known = self._nodes.get(info.node_id)
        if known is not None and known.info.instance == info.instance:
            known.info, known.load, known.adapters = info, load, frozenset(info.adapters)
            known.last_seen, known.lost, known.silent = self.now(), False, False
            self.kinds.described_anew(known)
        else:
            if known is None:
                self._check_room()
            else:
                self._replace(known, info)
            breaker = CircuitBreaker(
                self._config.breaker_failures, self._config.breaker_cooldown, self.now
            )
            now = self.now()
            node = self._nodes[info.node_id] = Node(
                info, load, now, breaker, adapters=frozenset(info.adapters), last_answer=now,
                clock=self.clock,
            )  # fmt: skip
            self.kinds.add(node)
            logger.info(
                "%s registered: %s, %d KV blocks, tp %d, pp %d, ep %d, dp %d, connectors %s, "
                "fingerprint %s",
                info.node_id, info.address, info.num_blocks, info.tensor_parallel_size,
                info.pipeline_parallel_size, info.expert_parallel_size, info.data_parallel_size,
                ", ".join(info.kv_connectors) or "none", info.fingerprint,
            )  # fmt: skip
        self._note_report(self._nodes[info.node_id])
        self._find_window()
        self.notify()

    def _note_report(self, node: Node) -> None:
        note_impossible(node)
        self.kinds.changed(node)

    def _find_window(self) -> None:
        self.window = offered(self._nodes.values())
        known = (node.info.max_model_len for node in self._nodes.values())
        self.least_window = min(filter(None, known), default=inf)
        note_short(self._nodes.values(), self.window)

    def _check_room(self) -> None:
        now = self.now()
        refilled = self._room_for_new + (now - self._filled_at) * NEW_NODES_PER_S
        self._room_for_new, self._filled_at = min(refilled, NEW_NODES_BURST), now
        if len(self._nodes) >= MAX_NODES:
            raise Overloaded(f"{MAX_NODES} nodes are registered", retry_after=10)
        if self._room_for_new < 1:
            raise Overloaded(
                f"more than {NEW_NODES_PER_S:.0f} new nodes a second register", retry_after=1
            )
        self._room_for_new -= 1

    def _replace(self, known: Node, info: pb.NodeInfo) -> None:
        """Gives the id to another process. At the same address the older process must be gone; at
        another address it must have fallen silent."""
        if self.is_alive(known) and known.info.address != info.address:
            logger.warning(
                "refused to register %s at %s: a live node has this id, at %s",
                info.node_id, info.address, known.info.address,
            )  # fmt: skip
            raise Unavailable(
                f"a live node has the id {info.node_id}: stop it, or wait until it is lost",
                code="NODE_ID_TAKEN",
            )
        logger.warning(
            "%s at %s is replaced by a new process at %s",
            info.node_id, known.info.address, info.address,
        )  # fmt: skip
        self.kinds.remove(known)
        self._leaving.append(known)
        self._end_requests(known, "PEER_LOST", "was replaced by a new process")

    def heartbeat(self, node_id: str, load: pb.NodeLoad, instance: str = "") -> bool:
        """Returns false if the node is unknown and must register."""
        node = self._nodes.get(node_id)
        if node is None or node.info.instance != instance:
            return False
        revived = not self.is_alive(node) or (load.healthy and not node.load.healthy)
        node.load, node.last_seen, node.lost = load, self.now(), False
        node.silent = node.silent and bool(node.unreachable)
        self._note_report(node)
        if revived:
            self.notify()
        return True

    def clock_shown(self, node_id: str, time_s: float) -> None:
        """Compares the Unix time of a message that has just come. The result is for people only:
        peers correct refused times themselves (`rpc.auth`)."""
        node, skew = self._nodes.get(node_id), time_s - time.time()
        if node is None or not time_s or not isfinite(skew) or self.clock.stood_still():
            return
        was, node.skew = node.skew, skew if abs(skew) > MAX_SKEW else 0.0
        if node.skew and not was:
            logger.warning("%s: %s", node.id, node.clock_off)
        elif was and not node.skew:
            logger.info("%s: its clock agrees with the router's again", node.id)

    def deregister(self, node_id: str, instance: str = "") -> None:
        """Marks the node as draining: its requests continue, and it gets no new ones."""
        node = self._nodes.get(node_id)
        if node is not None and node.info.instance == instance:
            del self._nodes[node_id]
            self.kinds.remove(node)
            self._find_window()
            self._leaving.append(node)
            if node.info.role == pb.ROLE_PREFILL:
                self.gone_prefills.pop(node.info.fingerprint, None)
            logger.info("%s deregistered", node_id)

    # ---- observations of this router ---------------------------------------------------------

    def answered(self, node: Node) -> None:
        """Notes that a node has answered a call."""
        node.last_answer, node.missed = self.now(), 0
        if node.unreachable:
            logger.info("%s can be reached again", node.id)
            node.unreachable, node.silent = "", False
            self.kinds.changed(node)
            self.notify()

    def unanswered(self, node: Node, reason: str, refused: bool) -> None:
        """Notes that a node has not answered; `refused`: there is no connection at all, so that
        waiting as long as for a heartbeat is useless."""
        node.missed += 1
        late = self.now() - node.last_answer > self._config.heartbeat_timeout and node.missed > 1
        refused = refused and not self.clock.stood_still()
        if not node.unreachable and (refused or late):
            logger.warning("%s cannot be reached: %s", node.id, reason)
            node.unreachable = reason
            self.kinds.changed(node)
        if late and not node.silent:
            self._fell_silent(node)

    def lacks_adapter(self, node: Node, digest: str) -> None:
        """Notes that a node lacks an adapter, which another router had it drop."""
        node.adapters -= {digest}
        self.notify()

    def sweep(self) -> None:
        """Ends the requests on nodes that have fallen silent; forgets nodes that have been silent
        for long."""
        for node in self.nodes():
            if not node.silent and self.now() - node.last_seen > self._config.heartbeat_timeout:
                self._fell_silent(node)
        limit = 10 * self._config.heartbeat_timeout
        for node in self.nodes():
            if self.now() - node.last_seen > limit and node.in_flight == 0:
                logger.warning("%s is lost: silent for %.0f s", node.id, limit)
                self._forget(node)

    def _forget(self, node: Node) -> None:
        del self._nodes[node.id]
        self.kinds.remove(node)
        self._find_window()
        if node.info.role == pb.ROLE_PREFILL:
            gone = self.gone_prefills
            gone.pop(node.info.fingerprint, None)
            gone[node.info.fingerprint] = node.last_seen
            if len(gone) > MAX_GONE:
                del gone[next(iter(gone))]

    def _fell_silent(self, node: Node) -> None:
        node.silent = True
        self.kinds.changed(node)
        logger.warning("%s is silent; its requests move to other nodes", node.id)
        self._end_requests(node, "PEER_SILENT", "is silent")

    def _end_requests(self, node: Node, code: str, why: str) -> None:
        error = NodeError(f"{node.id} {why}", code=code, blame=Blame(node.role))
        for on_lost in list(node.on_lost):
            on_lost(error)

    # ---- registered nodes --------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def connected(self) -> list[Node]:
        """Returns registered nodes, and leaving ones that still have requests of this router; the
        latter send no heartbeats."""
        self._leaving = [node for node in self._leaving if node.in_flight]
        return self.nodes() + self._leaving

    def is_alive(self, node: Node) -> bool:
        fresh = self.now() - node.last_seen <= self._config.heartbeat_timeout
        return fresh and not node.lost and not node.unreachable

    async def wait_for_change(self) -> None:
        """Returns when a node came or came back."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wakes up the requests that wait for a node."""
        self._changed.set()
        self._changed = asyncio.Event()
