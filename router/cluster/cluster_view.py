"""Decides which nodes and pairs may get a request now, and why the others may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from itertools import islice, product, starmap
from typing import Any

from google.protobuf.json_format import MessageToDict

from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.health import BreakerState
from pdserve.router.cluster.registry import ROLE_NAMES, Node, Registry

MAX_REASONS = 4  # in one sentence
MAX_PAIRINGS = 4096  # in `/v1/cluster`: 512 nodes of each role have 262,144
STAND_IN_AFTER = 3.0  # seconds without a prefill node; one may be about to come back


class ClusterView:
    """The registry's view for placement, `/ready`, `/v1/cluster` and the metrics."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    # ---- usable nodes and pairs --------------------------------------------------------------

    def usable(self, role: int) -> list[Node]:
        """Nodes of a role that may get a request now."""
        return [node for node in self._nodes(role) if self._why_unusable(node) is None]

    def can_hand_over(self, prefill: Node, decode: Node) -> bool:
        """Whether these two fit, and their link is not broken."""
        return can_pair(prefill, decode) and self.registry.links.allows(prefill.id, decode.id)

    def pairs(self) -> list[tuple[Node, Node]]:
        """Pairs that may get a request now."""
        return list(self._pairs())

    def _pairs(self) -> Iterator[tuple[Node, Node]]:
        return (pair for pair in self._usable_pairs() if self.can_hand_over(*pair))

    def _usable_pairs(self) -> Iterator[tuple[Node, Node]]:
        return product(self.usable(pb.ROLE_PREFILL), self.usable(pb.ROLE_DECODE))

    def must_prefill(self, decode: Node) -> bool:
        """Whether a decode node must prefill, because no prefill node can serve it now: at once
        while one is alive (its link is broken, or it is unhealthy), else when the last one has been
        silent for `STAND_IN_AFTER`. A decode node waits for prefill nodes that have all
        deregistered, or have not registered yet."""
        if any(self.can_hand_over(node, decode) for node in self.usable(pb.ROLE_PREFILL)):
            return False
        fitting = [node for node in self._nodes(pb.ROLE_PREFILL) if can_pair(node, decode)]
        if any(self.registry.is_alive(node) for node in fitting):
            return True
        heard = [node.last_heard for node in fitting]
        if (gone := self.registry.gone_prefills.get(decode.info.fingerprint)) is not None:
            heard.append(gone)
        return bool(heard) and self.registry.now() - max(heard) >= STAND_IN_AFTER

    def ready(self) -> tuple[bool, str]:
        """Whether a new request could be served now, and the reason if not, or a remark."""
        if any(starmap(self.can_hand_over, self._usable_pairs())):
            return True, "ok"
        both, apart = self._nodes(pb.ROLE_BOTH), self._nodes(pb.ROLE_PREFILL, pb.ROLE_DECODE)
        if self.usable(pb.ROLE_BOTH):
            return True, f"nodes of both roles serve: {self._why_no_pair()}" if apart else "ok"
        if any(self.must_prefill(decode) for decode in self.usable(pb.ROLE_DECODE)):
            return True, f"decode nodes prefill: {self._why_no_pair()}"
        reasons = [self._why_no_pair()] if apart or not both else []
        reasons += [self._why_missing(pb.ROLE_BOTH)] if both else []
        return False, "; ".join(reasons)

    def placed_by_others(self) -> tuple[int, int]:
        """The choices that other routers have on this cluster's nodes, and how many routers there
        are, by the nodes' reports."""
        nodes = self._nodes(pb.ROLE_DECODE, pb.ROLE_BOTH)  # a choice has one of these
        loads = [node.load for node in nodes if self.registry.is_alive(node)]
        routers = max((load.routers for load in loads), default=1)
        return sum(load.others for load in loads), max(1, routers)

    # ---- reasons -----------------------------------------------------------------------------

    def unusable_reasons(self, role: int) -> list[str]:
        """The reasons why registered nodes of a role may not get a request now."""
        reasons = [(node.id, self._why_unusable(node)) for node in self._nodes(role)]
        return [f"{node_id}: {reason}" for node_id, reason in reasons if reason is not None]

    def _why_unusable(self, node: Node) -> str | None:
        if node.unreachable:
            return f"it cannot be reached: {node.unreachable}"
        if not self.registry.is_alive(node):
            return "it does not answer"
        if not node.load.healthy:
            return node.load.reason
        return None if node.breaker.allows() else "its circuit breaker is open"

    def _why_apart(self, prefill: Node, decode: Node) -> str:
        if can_pair(prefill, decode):
            return f"{prefill.id} does not reach {decode.id}"
        return mismatch(prefill, decode)

    def _why_no_pair(self) -> str:
        prefills, decodes = self.usable(pb.ROLE_PREFILL), self.usable(pb.ROLE_DECODE)
        if not (prefills and decodes):
            return self._why_missing(pb.ROLE_PREFILL, pb.ROLE_DECODE)
        reasons = starmap(self._why_apart, islice(product(prefills, decodes), MAX_REASONS))
        return f"no prefill node pairs with a decode node ({'; '.join(reasons)})"

    def _why_missing(self, *roles: int) -> str:
        """The reasons why some of these roles have no usable node."""
        missing = [role for role in roles if not self.usable(role)]
        what = " and ".join(f"no usable {ROLE_NAMES[role]} node" for role in missing)
        why = [text for role in missing for text in self.unusable_reasons(role)]
        return f"{what} ({'; '.join(why[:MAX_REASONS])})" if why else what

    def _nodes(self, *roles: int) -> list[Node]:
        return [node for node in self.registry.nodes() if node.info.role in roles]

    # ---- /v1/cluster and the metrics ---------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """All nodes and up to MAX_PAIRINGS usable pairs, for `/v1/cluster`."""
        unpaired = self._unpaired()
        return {
            "nodes": [self._describe(node, unpaired) for node in self.registry.nodes()],
            "pairings": [
                {"prefill": prefill.id, "decode": decode.id}
                for prefill, decode in islice(self._pairs(), MAX_PAIRINGS)
            ],
            "flows": self._flows(),
            "broken_links": self._broken_links(),
            "refused": [
                {"reason": reason, "port": port, "count": count, "seconds_ago": round(ago, 3)}
                for reason, port, count, ago in self.registry.refusals.items()
            ],
        }

    def _broken_links(self) -> list[dict[str, str]]:
        """The links between registered nodes whose last transfer failed, and why."""
        present = {node.id for node in self.registry.nodes()}
        return [
            {"prefill": pair[0], "decode": pair[1], "reason": reason}
            for pair, reason in islice(self.registry.links.reasons().items(), MAX_PAIRINGS)
            if present.issuperset(pair)
        ]

    def _flows(self) -> list[dict[str, Any]]:
        """The transfers between registered nodes."""
        present = {node.id for node in self.registry.nodes()}
        return [
            {"prefill": pair[0], "decode": pair[1], **asdict(flow)}
            for pair, flow in self.registry.flows.items()
            if present.issuperset(pair)
        ]

    def counts(self) -> Counter[tuple[str, str]]:
        """Nodes by (role, state), for the metrics."""
        unpaired = self._unpaired()
        return Counter((node.role, self._state(node, unpaired)) for node in self.registry.nodes())

    def _unpaired(self) -> dict[str, str]:
        """The reasons, by id, why prefill and decode nodes fit no registered node of the other
        role."""
        prefills, decodes = self._kinds(pb.ROLE_PREFILL), self._kinds(pb.ROLE_DECODE)
        if not (prefills and decodes):
            return {}
        pairs = [pair for pair in product(prefills, decodes) if can_pair(pair[0][0], pair[1][0])]
        fit = {id(kind) for pair in pairs for kind in pair}
        why: dict[str, str] = {}
        for kinds, others, role in ((prefills, decodes, "decode"), (decodes, prefills, "prefill")):
            for kind in (kind for kind in kinds if id(kind) not in fit):
                one, other = kind[0], others[0][0]
                how = mismatch(one, other) if role == "decode" else mismatch(other, one)
                why |= {node.id: f"it fits no {role} node ({how})" for node in kind}
        return why

    def _kinds(self, role: int) -> list[list[Node]]:
        """The nodes of a role, grouped by the nodes that they pair with."""
        kinds: dict[tuple[str, ...], list[Node]] = {}
        for node in self._nodes(role):
            kinds.setdefault((node.info.fingerprint, *node.info.kv_connectors), []).append(node)
        return list(kinds.values())

    def _state(self, node: Node, unpaired: Collection[str]) -> str:
        if not self.registry.is_alive(node):
            return "lost"
        if not node.load.healthy:
            return "unhealthy"
        if node.breaker.state is not BreakerState.CLOSED:
            return "broken"
        return "unpaired" if node.id in unpaired else "ready"

    def _reason(self, node: Node, unpaired: Mapping[str, str]) -> str:
        """The reason for the node's state, or what is wrong though it is usable."""
        why = node.unreachable or self._why_unusable(node) or unpaired.get(node.id)
        why = why or node.load.reason
        if not node.skew:
            return why
        return node.clock_off if why in ("", "ok") else f"{why}; {node.clock_off}"

    def _describe(self, node: Node, unpaired: Mapping[str, str]) -> dict[str, Any]:
        load = node.load
        info = _described(node)
        adapters = {"adapters": sorted(node.adapters)} if node.info.takes_adapters else {}
        return {
            **info,
            **adapters,
            "state": self._state(node, unpaired),
            "reason": self._reason(node, unpaired),
            "breaker": node.breaker.state.value,
            "in_flight": node.in_flight,
            "prefill_tokens": node.prefill_tokens,
            "prompt_tokens": node.prompt_tokens,
            "cached_tokens": node.cached_tokens,
            "others": load.others,
            "running": load.running,
            "waiting": load.waiting,
            "free_blocks": load.free_blocks,
            "most_free_blocks": load.most_free_blocks,
            "total_blocks": load.total_blocks,
            "kv_cache_usage": 1 - load.free_blocks / max(1, load.total_blocks),
            "seconds_since_heartbeat": round(self.registry.now() - node.last_seen, 3),
        }


def _described(node: Node) -> dict[str, Any]:
    """The node's own description as JSON. It is kept, because making it takes 0.1 ms."""
    if node.described is None or node.described[0] is not node.info:
        info = MessageToDict(node.info, preserving_proto_field_name=True)
        info["role"] = node.role
        info.pop("instance", None)  # only the node and this router may know it
        node.described = node.info, info
    return node.described[1]


def can_pair(prefill: Node, decode: Node) -> bool:
    """Whether both nodes have the same KV layout and a connector in common."""
    same_kv = prefill.info.fingerprint == decode.info.fingerprint
    return same_kv and not set(prefill.info.kv_connectors).isdisjoint(decode.info.kv_connectors)


def mismatch(prefill: Node, decode: Node) -> str:
    """The differences between two nodes that do not pair."""
    ours, theirs = prefill.info.fingerprint_parts, decode.info.fingerprint_parts
    differences = [
        f"{part} {ours.get(part)} ≠ {theirs.get(part)}"
        for part in sorted({*ours, *theirs})
        if ours.get(part) != theirs.get(part)
    ]
    sends, takes = prefill.info.kv_connectors, decode.info.kv_connectors
    if set(sends).isdisjoint(takes):
        differences.append(f"no common KV connector ({', '.join(sends)} ≠ {', '.join(takes)})")
    return f"{prefill.id} and {decode.id}: {', '.join(differences)}"
