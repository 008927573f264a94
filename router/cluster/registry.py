"""Which nodes there are, and which of them are alive: membership and liveness.

A node is judged by what this router sees on its own calls to it. What one node says of another
concerns the link between the two (`LinkBreakers`): neither is worse for it.
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
from pdserve.router.cluster.flows import Flows
from pdserve.router.cluster.health import AwakeClock, CircuitBreaker, LinkBreakers

logger = logging.getLogger(__name__)

# Registered at a time, lost ones included until they are forgotten; and new ones, which is enough
# for a big cluster that comes back at once and stops a node that dies and returns for ever.
MAX_NODES = 1024
NEW_NODES_BURST, NEW_NODES_PER_S = 256, 32.0
MAX_SKEW = 10.0  # seconds; at WINDOW_S of `rpc.auth` calls are refused at first
MAX_GONE = 64  # versions of prefill nodes of which it is known that there were some
# What becomes of calls while the router that made them stands still.
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
    """One registered node, as this router sees it."""

    info: pb.NodeInfo
    load: pb.NodeLoad
    last_seen: float
    breaker: CircuitBreaker
    # ---- this router's requests on it: kept by `InFlightLoad`
    in_flight: int = 0
    # Tokens that it still has to prefill for each of them, in order of arrival.
    prefilling: dict[object, int] = field(default_factory=dict)
    prefill_tokens: int = 0  # their sum
    prompt_tokens: int = 0  # tokens of prompts that it has prefilled
    cached_tokens: int = 0  # of them those that were in its prefix cache
    adapters: frozenset[str] = frozenset()  # digests of the LoRA adapters that it has
    last_chance: str = ""  # id of the request that has its last chance here
    # What to call when the node is lost: a stalled host breaks no connection.
    on_lost: set[Callable[[PdserveError], None]] = field(default_factory=set)
    clock: AwakeClock = field(default_factory=AwakeClock)  # the registry's
    # ---- liveness: kept by `Registry`
    lost: bool = False  # a call found nobody there since the last heartbeat
    silent: bool = False  # its heartbeats, or its answers, have stopped
    skew: float = 0.0  # seconds by which its clock is ahead of this host's, if by too many
    unreachable: str = ""  # why it does not answer us, though its heartbeats may come
    last_answer: float = 0.0  # when it did last
    # ---- `info` as JSON, once it was asked for: kept by `ClusterView`
    described: tuple[pb.NodeInfo, dict[str, Any]] | None = None

    @property
    def id(self) -> str:
        return self.info.node_id

    @property
    def role(self) -> str:
        return ROLE_NAMES[self.info.role]

    @property
    def replicas(self) -> int:
        """The replicas that share its load."""
        return max(1, self.info.data_parallel_size)

    @property
    def last_heard(self) -> float:
        """When it was last seen to serve: its heartbeats may come though it does not answer."""
        return min(self.last_seen, self.last_answer) if self.unreachable else self.last_seen

    @property
    def clock_off(self) -> str:
        """How, and what to do; empty: it is not."""
        if not self.skew:
            return ""
        way = "ahead of" if self.skew > 0 else "behind"
        return f"its clock is {abs(self.skew):.0f} s {way} the router's: set the clocks (NTP)"

    def excused(self, error: PdserveError) -> PdserveError:
        """What the failure of a call to it is: nothing that it did, where this router has just
        stood still."""
        between_nodes = isinstance(error, TransferError) and error.code != "LEASE_EXPIRED"
        if error.code not in BY_STANDSTILL or between_nodes or not self.clock.stood_still():
            return error
        return NodeError(
            f"this router had stood still: {error.message}",
            code="ROUTER_STOOD_STILL",
            blame=Blame.NETWORK,
        )

    def prefilled(self, num_tokens: int, num_cached: int) -> None:
        """A prompt of so many tokens, so many of which it had, if that can be."""
        self.prompt_tokens += num_tokens
        self.cached_tokens += min(num_tokens, num_cached)


class Registry:
    """Nodes by id. A node whose heartbeats stop is not used, and forgotten after ten
    time-outs; when it comes back it registers again."""

    def __init__(self, config: RoutingConfig, now: Callable[[], float] | None = None) -> None:
        """`sweep` is to be called four times in each `--heartbeat-timeout`."""
        self._config = config
        self.clock = AwakeClock()
        self.now = now = now or self.clock
        self._nodes: dict[str, Node] = {}
        self._leaving: list[Node] = []  # deregistered; what they have goes on
        self._changed = asyncio.Event()
        self._room_for_new = float(NEW_NODES_BURST)  # a token bucket, as of `_filled_at`
        self._filled_at = now()
        self.links = LinkBreakers(now)
        # By fingerprint: when the last one was heard of that was lost and is forgotten.
        self.gone_prefills: dict[str, float] = {}
        self.flows = Flows()

    # ---- what nodes say of themselves -------------------------------------------------------

    def register(self, info: pb.NodeInfo, load: pb.NodeLoad) -> None:
        """
        Raises:
            Unavailable: NODE_ID_TAKEN, another process has this id, and lives elsewhere.
            Overloaded: too many nodes, or too many new ones at once.
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
        self.notify()

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
        """By another process with its id: at the same address the older one cannot be there any
        more; elsewhere it must have fallen silent."""
        if self.is_alive(known) and known.info.address != info.address:
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
        revived = not self.is_alive(node) or (load.healthy and not node.load.healthy)
        node.load, node.last_seen, node.lost = load, self.now(), False
        node.silent = node.silent and bool(node.unreachable)
        if revived:
            self.notify()
        return True

    def clock_shown(self, node_id: str, time_s: float) -> None:
        """The node's clock showed this Unix time when it sent what has just come. It matters to
        nothing: who is refused for its time learns the other's (`rpc.auth`)."""
        node, skew = self._nodes.get(node_id), time_s - time.time()
        if node is None or not time_s or not isfinite(skew) or self.clock.stood_still():
            return
        was, node.skew = node.skew, skew if abs(skew) > MAX_SKEW else 0.0
        if node.skew and not was:
            logger.warning("%s: %s", node.id, node.clock_off)
        elif was and not node.skew:
            logger.info("%s: its clock agrees with the router's again", node.id)

    def deregister(self, node_id: str, instance: str = "") -> None:
        """The node drains: what it has goes on, and it gets no new requests."""
        node = self._nodes.get(node_id)
        if node is not None and node.info.instance == instance:
            del self._nodes[node_id]
            self._leaving.append(node)
            if node.info.role == pb.ROLE_PREFILL:
                self.gone_prefills.pop(node.info.fingerprint, None)
            logger.info("%s deregistered", node_id)

    # ---- what this router sees of them ------------------------------------------------------

    def answered(self, node: Node) -> None:
        """It answers calls of this router."""
        node.last_answer = self.now()
        if node.unreachable:
            logger.info("%s can be reached again", node.id)
            node.unreachable, node.silent = "", False
            self.notify()

    def unanswered(self, node: Node, reason: str, refused: bool) -> None:
        """It did not; `refused`: there is no connection at all, so that there is no point in
        waiting as long as for a heartbeat."""
        late = self.now() - node.last_answer > self._config.heartbeat_timeout
        refused = refused and not self.clock.stood_still()
        if not node.unreachable and (refused or late):
            logger.warning("%s cannot be reached: %s", node.id, reason)
            node.unreachable = reason
        if late and not node.silent:
            self._fell_silent(node)

    def lacks_adapter(self, node: Node, digest: str) -> None:
        """Another router had it drop that one: it is to be told again."""
        node.adapters -= {digest}
        self.notify()

    def sweep(self) -> None:
        """Ends what is in flight on nodes that have fallen silent; drops those that have been
        silent for long."""
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
        if node.info.role == pb.ROLE_PREFILL:
            gone = self.gone_prefills
            gone.pop(node.info.fingerprint, None)
            gone[node.info.fingerprint] = node.last_seen
            if len(gone) > MAX_GONE:
                del gone[next(iter(gone))]

    def _fell_silent(self, node: Node) -> None:
        node.silent = True
        logger.warning("%s is silent; its requests go elsewhere", node.id)
        self._end_requests(node, "PEER_SILENT", "is silent")

    def _end_requests(self, node: Node, code: str, why: str) -> None:
        error = NodeError(f"{node.id} {why}", code=code, blame=Blame(node.role))
        for on_lost in list(node.on_lost):
            on_lost(error)

    # ---- who is there -----------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def connected(self) -> list[Node]:
        """Those that are registered, or leave and still have requests of this router: the latter
        send no heartbeats any more."""
        self._leaving = [node for node in self._leaving if node.in_flight]
        return self.nodes() + self._leaving

    def is_alive(self, node: Node) -> bool:
        fresh = self.now() - node.last_seen <= self._config.heartbeat_timeout
        return fresh and not node.lost and not node.unreachable

    async def wait_for_change(self) -> None:
        """Returns when a node came or came back."""
        await self._changed.wait()

    def notify(self) -> None:
        """Whoever waits for a node looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
