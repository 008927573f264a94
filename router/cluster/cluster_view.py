"""Decides which nodes and pairs may get a request now, and why the others may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from itertools import chain, islice, product, starmap
from typing import Any

from google.protobuf.json_format import MessageToDict

from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster import reports
from pdserve.router.cluster.health import BreakerState
from pdserve.router.cluster.kinds import Candidates, Kind
from pdserve.router.cluster.node import ROLE_NAMES, Node, mismatch
from pdserve.router.cluster.registry import Registry

MAX_REASONS = 4  # in one sentence
MAX_PAIRINGS = 4096  # in `/v1/cluster`: 512 nodes of each role have 262,144
_GLANCE = (  # of what `_describe` says
    *("state", "reason", "running", "waiting", "free_blocks", "total_blocks"),
    "seconds_since_heartbeat",
)
STAND_IN_AFTER = 3.0  # seconds without a prefill node; one may be about to come back


class ClusterView:
    """The registry's view for placement, `/ready`, `/v1/cluster` and the metrics."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._kinds = registry.kinds

    # ---- usable nodes and pairs --------------------------------------------------------------

    def candidates(self, role: int) -> Candidates:
        """Returns the nodes of a role that may get a request now."""
        return Candidates(self._kinds.of_role(role), self.is_usable)

    def is_usable(self, node: Node) -> bool:
        """Returns whether a node may get a request now."""
        return self.registry.is_alive(node) and node.load.healthy and node.breaker.allows()

    def pairs(self) -> Iterator[tuple[Node, Node]]:
        """Yields the pairs that may get a request now."""
        prefills = self.candidates(pb.ROLE_PREFILL)
        for decode in self._usable(pb.ROLE_DECODE):
            yield from ((prefill, decode) for prefill in self.sources(decode, prefills).by_load())

    def sources(self, decode: Node, prefills: Candidates) -> Candidates:
        """Returns the prefill nodes that can hand KV over to this decode node now."""
        links, fitting = self.registry.links, self._sources(self._kinds.of(decode), prefills)
        if links.allows_all(decode.id):
            return fitting
        return fitting.where(lambda prefill: links.allows(prefill.id, decode.id))

    def supplied(self, decodes: Candidates, prefills: Candidates) -> Candidates:
        """Returns the decode nodes to which at least one of these prefill nodes can hand KV over
        now. Without broken links one decision holds for all nodes of a kind."""
        links = self.registry.links
        kinds = [kind for kind in decodes.kinds if self._sources(kind, prefills)]
        return decodes.of_kinds(kinds).where(
            lambda decode: links.allows_all(decode.id) or bool(self.sources(decode, prefills))
        )

    def standing_in(self, decodes: Candidates, prefills: Candidates) -> Candidates:
        """Returns the decode nodes that must prefill, because none of these prefill nodes can serve
        them now: at once while any is alive (its link is broken, or it is unhealthy), else when the
        last one has been silent for `STAND_IN_AFTER`. A decode node waits for prefill nodes that
        have all deregistered, or have not registered yet."""
        kinds = filter(self._may_stand_in, decodes.kinds)
        return decodes.of_kinds(kinds).where(lambda decode: not self.sources(decode, prefills))

    def _sources(self, decodes: Kind, prefills: Candidates) -> Candidates:
        return prefills.of_kinds(self._kinds.sources(decodes))

    def _may_stand_in(self, decodes: Kind) -> bool:
        fitting = [node for kind in self._kinds.sources(decodes) for node in kind.nodes]
        if any(map(self.registry.is_alive, fitting)):
            return True
        heard = [node.last_heard for node in fitting]
        if (gone := self.registry.gone_prefills.get(decodes.fingerprint)) is not None:
            heard.append(gone)
        return bool(heard) and self.registry.now() - max(heard) >= STAND_IN_AFTER

    def ready(self) -> tuple[bool, str]:
        """Returns whether a new request could be served now, and a reason or a remark."""
        decodes = self.candidates(pb.ROLE_DECODE)
        prefills = self.candidates(pb.ROLE_PREFILL)
        if self.supplied(decodes, prefills):
            return True, "ok"
        both = bool(self._kinds.of_role(pb.ROLE_BOTH))
        apart = any(map(self._kinds.of_role, (pb.ROLE_PREFILL, pb.ROLE_DECODE)))
        if self.candidates(pb.ROLE_BOTH):
            return True, f"nodes of both roles serve: {self._why_no_pair()}" if apart else "ok"
        if self.standing_in(decodes, prefills):
            return True, f"decode nodes prefill: {self._why_no_pair()}"
        reasons = [self._why_no_pair()] if apart or not both else []
        reasons += [self._why_missing(pb.ROLE_BOTH)] if both else []
        return False, "; ".join(reasons)

    def placed_by_others(self) -> tuple[int, int]:
        """Returns the choices that other routers have on this cluster's nodes, and how many routers
        there are, by the nodes' reports."""
        alive = [node for node in self.answering() if self.registry.is_alive(node)]
        return reports.choices(alive), reports.routers(alive)

    def replicas(self) -> tuple[int, int, int]:
        """Returns the numbers of replicas that may compute prompts and answers now, and the prompt
        tokens that the first ones still have to compute for other routers."""
        boths = list(self._usable(pb.ROLE_BOTH))
        decodes = [*self._usable(pb.ROLE_DECODE), *boths]
        prefills = [*self._usable(pb.ROLE_PREFILL), *boths] or decodes
        return (
            sum(node.replicas for node in prefills),
            sum(node.replicas for node in decodes),
            reports.tokens(prefills),
        )

    # ---- reasons -----------------------------------------------------------------------------

    def unusable_reasons(self, role: int) -> Iterator[str]:
        """Yields the reasons why registered nodes of a role may not get a request now."""
        reasons = ((node.id, self._why_unusable(node)) for node in self._nodes(role))
        return (f"{node_id}: {reason}" for node_id, reason in reasons if reason is not None)

    def _why_unusable(self, node: Node) -> str | None:
        if node.unreachable:
            return f"it cannot be reached: {node.unreachable}"
        if not self.registry.is_alive(node):
            return "it does not answer"
        if not node.load.healthy:
            return node.load.reason
        return None if node.breaker.allows() else "its circuit breaker is open"

    def _why_apart(self, prefill: Node, decode: Node) -> str:
        if self._kinds.of(prefill).fits(self._kinds.of(decode)):
            return f"{prefill.id} does not reach {decode.id}"
        return mismatch(prefill, decode)

    def _why_no_pair(self) -> str:
        roles = pb.ROLE_PREFILL, pb.ROLE_DECODE
        prefills, decodes = (list(islice(self._usable(role), MAX_REASONS)) for role in roles)
        if not (prefills and decodes):
            return self._why_missing(pb.ROLE_PREFILL, pb.ROLE_DECODE)
        reasons = starmap(self._why_apart, islice(product(prefills, decodes), MAX_REASONS))
        return f"no prefill node pairs with a decode node ({'; '.join(reasons)})"

    def _why_missing(self, *roles: int) -> str:
        """Returns the reasons why some of these roles have no usable node."""
        missing = [role for role in roles if not self.candidates(role)]
        what = " and ".join(f"no usable {ROLE_NAMES[role]} node" for role in missing)
        reasons = chain.from_iterable(map(self.unusable_reasons, missing))
        why = list(islice(reasons, MAX_REASONS))
        return f"{what} ({'; '.join(why)})" if why else what

    def _usable(self, role: int) -> Iterator[Node]:
        """Yields the nodes of a role that may get a request now, in order of arrival."""
        return filter(self.is_usable, self._nodes(role))

    def answering(self) -> list[Node]:
        """Returns the registered nodes that decode: a choice has one of these."""
        return self._nodes(pb.ROLE_DECODE, pb.ROLE_BOTH)

    def _nodes(self, *roles: int) -> list[Node]:
        return [node for node in self.registry.nodes() if node.info.role in roles]

    # ---- /v1/cluster and the metrics ---------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Returns all nodes and up to MAX_PAIRINGS usable pairs, for `/v1/cluster`."""
        unpaired = self._unpaired()
        return {
            "nodes": [self._describe(node, unpaired) for node in self.registry.nodes()],
            "pairings": [
                {"prefill": prefill.id, "decode": decode.id}
                for prefill, decode in islice(self.pairs(), MAX_PAIRINGS)
            ],
            "flows": self._flows(),
            "broken_links": self.broken_links(),
            "refused": [
                {"reason": reason, "port": port, "count": count, "seconds_ago": round(ago, 3)}
                for reason, port, count, ago in self.registry.refusals.items()
            ],
        }

    def glance(self, node_id: str) -> dict[str, Any]:
        """Returns the node's last reported state and load in short; only its id if it is not
        registered."""
        node = next((node for node in self.registry.nodes() if node.id == node_id), None)
        if node is None:
            return {"node_id": node_id, "state": "gone"}
        described = self._describe(node, {})
        return {"node_id": node_id, **{name: described[name] for name in _GLANCE}}

    def states(self) -> dict[str, str]:
        """Returns the state of each registered node, by id."""
        unpaired = self._unpaired()
        return {node.id: self._state(node, unpaired) for node in self.registry.nodes()}

    def reason(self, node_id: str) -> str:
        """Returns the reason for a node's state; empty if it is not registered."""
        nodes = (node for node in self.registry.nodes() if node.id == node_id)
        return next((self._reason(node, self._unpaired()) for node in nodes), "")

    def broken_links(self) -> list[dict[str, str]]:
        """Returns the links between registered nodes with a failed last transfer, and the
        reason."""
        present = {node.id for node in self.registry.nodes()}
        return [
            {"prefill": pair[0], "decode": pair[1], "reason": reason}
            for pair, reason in islice(self.registry.links.reasons().items(), MAX_PAIRINGS)
            if present.issuperset(pair)
        ]

    def _flows(self) -> list[dict[str, Any]]:
        """Returns the transfers between registered nodes."""
        present = {node.id for node in self.registry.nodes()}
        return [
            {"prefill": pair[0], "decode": pair[1], **asdict(flow)}
            for pair, flow in self.registry.flows.items()
            if present.issuperset(pair)
        ]

    def counts(self) -> Counter[tuple[str, str]]:
        """Counts nodes by (role, state), for the metrics."""
        unpaired = self._unpaired()
        return Counter((node.role, self._state(node, unpaired)) for node in self.registry.nodes())

    def _unpaired(self) -> dict[str, str]:
        """Returns the reasons, by id, why prefill and decode nodes fit no registered node of the
        other role."""
        prefills, decodes = map(self._kinds.of_role, (pb.ROLE_PREFILL, pb.ROLE_DECODE))
        if not (prefills and decodes):
            return {}
        pairs = [(source, kind) for kind in decodes for source in self._kinds.sources(kind)]
        fit = set(chain.from_iterable(pairs))
        why: dict[str, str] = {}
        for kinds, others, role in ((prefills, decodes, "decode"), (decodes, prefills, "prefill")):
            for kind in (kind for kind in kinds if kind not in fit):
                one, other = next(iter(kind.nodes)), next(iter(others[0].nodes))
                how = mismatch(one, other) if role == "decode" else mismatch(other, one)
                why |= {node.id: f"it fits no {role} node ({how})" for node in kind.nodes}
        return why

    def _state(self, node: Node, unpaired: Collection[str]) -> str:
        if not self.registry.is_alive(node):
            return "lost"
        if not node.load.healthy:
            return "unhealthy"
        if node.breaker.state is not BreakerState.CLOSED:
            return "broken"
        return "unpaired" if node.id in unpaired else "ready"

    def _reason(self, node: Node, unpaired: Mapping[str, str]) -> str:
        """Returns the reason for the node's state, or its fault if it is usable."""
        why = node.unreachable or self._why_unusable(node) or unpaired.get(node.id)
        why = why or node.load.reason
        remarks = [each for each in (node.clock_off, node.short, node.impossible) if each]
        return "; ".join([*([] if why in ("", "ok") else [why]), *remarks]) if remarks else why

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
            "generation_tokens": load.generation_tokens,
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
    """Returns the node's own description as JSON. It is kept, because making it takes 0.1 ms."""
    if node.described is None or node.described[0] is not node.info:
        info = MessageToDict(node.info, preserving_proto_field_name=True)
        info["role"] = node.role
        info.pop("instance", None)  # only the node and this router may know it
        node.described = node.info, info
    return node.described[1]
