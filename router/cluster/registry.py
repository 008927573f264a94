"""Membership and liveness of nodes.

The router judges a node by its own calls to it. If one node reports a failure of another, only the
link between them counts as broken (`LinkBreakers`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

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
from pdserve.router.cluster.health import (
    AwakeClock,
    CircuitBreaker,
    Flows,
    LinkBreakers,
    Refusals,
)

logger = logging.getLogger(__name__)

# Registered nodes, including lost ones until they are forgotten. New nodes have a rate, enough for
# a big cluster that comes back at once; it slows a node down that dies and returns endlessly.
MAX_NODES = 1024
NEW_NODES_BURST, NEW_NODES_PER_S = 256, 32.0
MAX_SKEW = 10.0  # seconds; beyond WINDOW_S of `rpc.auth` calls are refused at first
MAX_GONE = 64  # versions whose lost prefill nodes are remembered
# Errors of calls that a standstill of this router may cause.
BY_STANDSTILL = frozenset(
    {"PEER_LOST", "UNREACHABLE", "PEER_SILENT", "TOKEN_STREAM_LOST", "LEASE_EXPIRED"}
)
ROLE_NAMES: dict[int, str] = {
    pb.ROLE_PREFILL: "prefill",
    pb.ROLE_DECODE: "decode",
    pb.ROLE_BOTH: "both",
}


@dataclass(slots=True, eq=False)
class Node:
    """One registered node and its state at this router."""

    info: pb.NodeInfo
    load: pb.NodeLoad
    last_seen: float
    breaker: CircuitBreaker
    # ---- this router's requests on it; `InFlightLoad` writes these
    in_flight: int = 0
    # Tokens that it still has to prefill for each request, in order of arrival.
    prefilling: dict[object, int] = field(default_factory=dict)
    prefill_tokens: int = 0  # their sum
    prompt_tokens: int = 0  # tokens of the prompts that it has prefilled
    cached_tokens: int = 0  # those of them that were in its prefix cache
    adapters: frozenset[str] = frozenset()  # digests of its LoRA adapters
    last_chance: str = ""  # id of the request that has its last chance here
    # Called when the node is lost, because a stalled host breaks no connection.
    on_lost: set[Callable[[PdserveError], None]] = field(default_factory=set)
    clock: AwakeClock = field(default_factory=AwakeClock)  # the registry's
    # ---- liveness; `Registry` writes these
    lost: bool = False  # a call has failed since the last heartbeat
    silent: bool = False  # its heartbeats, or its answers, have stopped
    skew: float = 0.0  # seconds by which its clock is ahead of this host's, if too many
    unreachable: str = ""  # why it does not answer, though its heartbeats may come
    last_answer: float = 0.0  # the time of its last answer
    # ---- `info` as JSON; `ClusterView` writes it
    described: tuple[pb.NodeInfo, dict[str, Any]] | None = None

    @property
    def id(self) -> str:
        return self.info.node_id

    @property
    def role(self) -> str:
        return ROLE_NAMES[self.info.role]

    @property
    def num_requests(self) -> int:
        """The requests on it: this router's now, and others' sequences by its last report."""
        return self.in_flight + self.load.others

    @property
    def num_prefill_tokens(self) -> int:
        """The tokens that it still has to prefill, as `num_requests`."""
        return self.prefill_tokens + self.load.others_tokens

    @property
    def replicas(self) -> int:
        """The replicas that share its load."""
        return max(1, self.info.data_parallel_size)

    @property
    def last_heard(self) -> float:
        """The time when it last served: its heartbeats may come though it does not answer."""
        return min(self.last_seen, self.last_answer) if self.unreachable else self.last_seen

    @property
    def clock_off(self) -> str:
        """Its clock's difference, and what to do; empty if the clock is right."""
        if not self.skew:
            return ""
        way = "ahead of" if self.skew > 0 else "behind"
        return f"its clock is {abs(self.skew):.0f} s {way} the router's: set the clocks (NTP)"

    def excused(self, error: PdserveError) -> PdserveError:
        """The error of a call to it, or another one if a standstill of this router explains it."""
        between_nodes = isinstance(error, TransferError) and error.code != "LEASE_EXPIRED"
        if error.code not in BY_STANDSTILL or between_nodes or not self.clock.stood_still():
            return error
        return NodeError(
            f"this router stood still: {error.message}",
            code="ROUTER_STOOD_STILL",
            blame=Blame.NETWORK,
        )

    def prefilled(self, num_tokens: int, num_cached: int) -> None:
        """A prompt of so many tokens, so many of which it had, if that can be."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += min(num_tokens, num_cached)


class Registry:
    """Nodes by id. A node whose heartbeats stop is not used, and is forgotten after ten time-outs;
    when it comes back it registers again."""

    def __init__(
        self,
        config: RoutingConfig,
        now: Callable[[], float] | None = None,
        router_id: str = "",
    ) -> None:
        """Call `sweep` four times in each `--heartbeat-timeout`. `router_id`: this router's, by
        which nodes tell its jobs from those of others."""
        self.router_id = router_id
        self._config = config
        self.clock = AwakeClock()
        self.now = now = now or self.clock
        self._nodes: dict[str, Node] = {}
        # The fewest tokens of context that a registered node holds; None: no node is registered.
        self.window: int | None = None
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
        """Adds the node, or renews what it says about itself.

        Raises:
            Unavailable: NODE_ID_TAKEN, another live process has this id.
            Overloaded: too many nodes are registered, or too many new ones at once.
        """
        known = self._nodes.get(info.node_id)
        if known is not None and known.info.instance == info.instance:
            known.info, known.load, known.adapters = info, load, frozenset(info.adapters)
            known.last_seen, known.lost, known.silent = self.now(), False, False
        else:
            if known is None:
                self._check_room()
            else:
                self._replace(known, info)
            breaker = CircuitBreaker(
                self._config.breaker_failures, self._config.breaker_cooldown, self.now
            )
            now = self.now()
            self._nodes[info.node_id] = Node(
                info, load, now, breaker, adapters=frozenset(info.adapters), last_answer=now,
                clock=self.clock,
            )  # fmt: skip
            logger.info(
                "%s registered: %s, %d KV blocks, tp %d, pp %d, ep %d, dp %d, connectors %s, "
                "fingerprint %s",
                info.node_id, info.address, info.num_blocks, info.tensor_parallel_size,
                info.pipeline_parallel_size, info.expert_parallel_size, info.data_parallel_size,
                ", ".join(info.kv_connectors), info.fingerprint,
            )  # fmt: skip
        self._find_window()
        self.notify()

    def _find_window(self) -> None:
        known = [node.info.max_model_len for node in self._nodes.values()]
        self.window = min(filter(None, known), default=None)  # 0: the node does not say

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
        """The node drains: its requests go on, and it gets no new ones."""
        node = self._nodes.get(node_id)
        if node is not None and node.info.instance == instance:
            del self._nodes[node_id]
            self._find_window()
            self._leaving.append(node)
            if node.info.role == pb.ROLE_PREFILL:
                self.gone_prefills.pop(node.info.fingerprint, None)
            logger.info("%s deregistered", node_id)

    # ---- observations of this router ---------------------------------------------------------

    def answered(self, node: Node) -> None:
        """Notes that a node has answered a call."""
        node.last_answer = self.now()
        if node.unreachable:
            logger.info("%s can be reached again", node.id)
            node.unreachable, node.silent = "", False
            self.notify()

    def unanswered(self, node: Node, reason: str, refused: bool) -> None:
        """Notes that a node has not answered; `refused`: there is no connection at all, so that
        waiting as long as for a heartbeat is useless."""
        late = self.now() - node.last_answer > self._config.heartbeat_timeout
        refused = refused and not self.clock.stood_still()
        if not node.unreachable and (refused or late):
            logger.warning("%s cannot be reached: %s", node.id, reason)
            node.unreachable = reason
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
        self._find_window()
        if node.info.role == pb.ROLE_PREFILL:
            gone = self.gone_prefills
            gone.pop(node.info.fingerprint, None)
            gone[node.info.fingerprint] = node.last_seen
            if len(gone) > MAX_GONE:
                del gone[next(iter(gone))]

    def _fell_silent(self, node: Node) -> None:
        node.silent = True
        logger.warning("%s is silent; its requests move to other nodes", node.id)
        self._end_requests(node, "PEER_SILENT", "is silent")

    def _end_requests(self, node: Node, code: str, why: str) -> None:
        error = NodeError(f"{node.id} {why}", code=code, blame=Blame(node.role))
        for on_lost in list(node.on_lost):
            on_lost(error)

    # ---- who is there ------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def connected(self) -> list[Node]:
        """Registered nodes, and leaving ones that still have requests of this router; the latter
        send no heartbeats."""
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
