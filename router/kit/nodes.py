"""Nodes reduced to the part that a policy sees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from pdserve.router.cluster.policy import NOT_MEASURED, Rates


@dataclass(eq=False, slots=True)
class PlainNode:
    """A node as a policy sees it (`NodeState`)."""

    id: str
    free_blocks: int = 100
    replicas: int = 1
    num_requests: int = 0
    num_prefill_tokens: int = 0
    prompts: Collection[int] = ()
    rates: Rates = NOT_MEASURED


class PlainNodes:
    """Nodes that all fit (`NodeSet`)."""

    def __init__(self, nodes: Iterable[PlainNode]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.id)

    def by_load(self) -> Iterator[PlainNode]:
        return iter(sorted(self.nodes, key=PlainNodes._load))

    def by_id(self, after: str) -> Iterator[PlainNode]:
        return iter(sorted(self.nodes, key=lambda node: (node.id <= after, node.id)))

    def __contains__(self, node: object) -> bool:
        return any(node is each for each in self.nodes)

    @staticmethod
    def _load(node: PlainNode) -> tuple[int, int, int, str]:
        return node.num_prefill_tokens, node.num_requests, -node.free_blocks, node.id
