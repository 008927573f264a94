"""Which pair of nodes serves a request. Policy only: plain numbers in, a choice out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from router.registry import Node

Policy = Callable[[Sequence[Node]], Node]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request's halves run; without a prefill node the decode node computes it all."""

    prefill: Node | None
    decode: Node


class RoundRobin:
    """Every node in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._turn = count()

    def __call__(self, nodes: Sequence[Node]) -> Node:
        ordered = sorted(nodes, key=lambda node: node.info.node_id)
        return ordered[next(self._turn) % len(ordered)]


def least_load(nodes: Sequence[Node]) -> Node:
    """The node with the fewest requests of this router for each of its replicas; among equals
    the one that reports the fewest waiting tokens for each, then the most free blocks on one."""
    return min(
        nodes,
        key=lambda node: (
            node.in_flight / node.replicas,
            node.load.waiting_tokens / node.replicas,
            -node.load.most_free_blocks,
            node.info.node_id,
        ),
    )


def make_policy(name: str) -> Policy:
    return RoundRobin() if name == "round-robin" else least_load


def can_pair(prefill: Node, decode: Node) -> bool:
    """Whether KV of one is KV of the other, and a connector both speak can carry it."""
    same_kv = prefill.info.fingerprint == decode.info.fingerprint
    return same_kv and not set(prefill.info.kv_connectors).isdisjoint(decode.info.kv_connectors)


def why_not(prefill: Node, decode: Node) -> str:
    """In which respects two nodes differ that do not pair."""
    ours, theirs = prefill.info.fingerprint_parts, decode.info.fingerprint_parts
    differences = [
        f"{part} {ours.get(part)} ≠ {theirs.get(part)}"
        for part in sorted({*ours, *theirs})
        if ours.get(part) != theirs.get(part)
    ]
    speak, hear = prefill.info.kv_connectors, decode.info.kv_connectors
    if set(speak).isdisjoint(hear):
        differences.append(f"no common KV connector ({', '.join(speak)} ≠ {', '.join(hear)})")
    return f"{prefill.info.node_id} and {decode.info.node_id}: {', '.join(differences)}"


def place(
    prefills: Sequence[Node],
    decodes: Sequence[Node],
    prefill_policy: Policy,
    decode_policy: Policy,
    local_prefill: bool = False,
) -> Placement | None:
    """A pair that fits together, or None when there is none now."""
    if local_prefill:
        return Placement(None, decode_policy(decodes)) if decodes else None
    paired = [node for node in decodes if any(can_pair(prefill, node) for prefill in prefills)]
    if not paired:
        return None
    decode = decode_policy(paired)
    prefill = prefill_policy([node for node in prefills if can_pair(node, decode)])
    return Placement(prefill, decode)
