"""Prefill nodes under a virtual clock, among which a policy places the prompts of a trace.

A node computes one prompt after the other, at a fixed rate, and only the tokens that it has not
cached. Its cache drops what was used longest ago. What it caches is told to the production
`PrefixIndex` at once; the policy is the production object. There are no decode nodes, no transfers
and no chunks: the figures compare policies, they do not predict a cluster.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean

from pdserve.router.cluster.policy import LeastLoad, NodeState, Policy, PolicyRequest
from pdserve.router.cluster.prefix_index import PrefixIndex


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt and when it comes."""

    time: float  # seconds
    num_tokens: int
    blocks: Sequence[int]  # hashes of its full blocks, as KV events name them


@dataclass(eq=False, slots=True)
class SimulatedNode:
    """A prefill node, as a policy sees it (`NodeState`), and its cache."""

    id: str
    num_blocks: int
    replicas: int = 1
    num_requests: int = 0
    num_prefill_tokens: int = 0
    free_at: float = 0.0  # when it has computed all that it was given
    computed: int = 0  # tokens
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - len(self.cache)

    def cached(self, blocks: Sequence[int]) -> int:
        """Returns how many of the first blocks it has."""
        return next((i for i, each in enumerate(blocks) if each not in self.cache), len(blocks))

    def keep(self, blocks: Sequence[int], index: PrefixIndex) -> None:
        """Caches a prompt that it has computed."""
        index.store(self, [each for each in blocks if each not in self.cache])
        for block in reversed(blocks):  # the last ones are dropped first
            self.cache[block] = None
            self.cache.move_to_end(block)
        excess = max(0, len(self.cache) - self.num_blocks)
        index.remove(self, [self.cache.popitem(last=False)[0] for _ in range(excess)])


class SimulatedNodes:
    """Nodes that all fit (`NodeSet`)."""

    def __init__(self, nodes: Iterable[SimulatedNode]) -> None:
        self.nodes = sorted(nodes, key=lambda node: node.id)

    def by_load(self) -> Iterator[SimulatedNode]:
        key = SimulatedNodes._load
        return iter(sorted(self.nodes, key=key))

    def by_id(self, after: str) -> Iterator[SimulatedNode]:
        return iter(sorted(self.nodes, key=lambda node: (node.id <= after, node.id)))

    def __contains__(self, node: object) -> bool:
        return any(node is each for each in self.nodes)

    @staticmethod
    def _load(node: SimulatedNode) -> tuple[int, int, int, str]:
        return node.num_prefill_tokens, node.num_requests, -node.free_blocks, node.id


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trace."""

    hit_ratio: float  # of all prompt tokens those that were cached where they were computed
    imbalance: float  # tokens computed by the busiest node, over the mean
    ttft: tuple[float, ...]  # seconds until each prompt was computed, ascending

    @property
    def mean(self) -> float:
        return fmean(self.ttft)

    def percentile(self, share: float) -> float:
        return self.ttft[min(len(self.ttft) - 1, int(share * len(self.ttft)))]


class BadChoice(Exception):
    """The policy chose what is not among the nodes."""


def simulate(
    policy: Policy,
    arrivals: Iterable[Arrival],
    *,
    nodes: int = 4,
    num_blocks: int = 10_000,
    block_size: int = 512,
    tokens_per_s: float = 10_000.0,
) -> Outcome:
    """Places all arrivals. Raises BadChoice, and what the policy raises."""
    pool = SimulatedNodes(SimulatedNode(f"prefill-{i:03}", num_blocks) for i in range(nodes))
    index, hits, total = PrefixIndex(), 0, 0
    ttft: list[float] = []
    # (end, number, node, arrival, tokens)
    running: list[tuple[float, int, SimulatedNode, Arrival, int]] = []
    for number, each in zip(count(), arrivals):
        while running and running[0][0] <= each.time:
            _finish(heapq.heappop(running), index)
        match = _matcher(each, index, block_size)
        request = PolicyRequest("prefill", each.num_tokens, each.time, match)
        node = policy.choose(request, pool)
        if not isinstance(node, SimulatedNode) or node not in pool:
            raise BadChoice(f"it chose {node!r}")
        policy.placed(request, node)
        cached = min(node.cached(each.blocks) * block_size, each.num_tokens - 1)
        missing = each.num_tokens - cached
        node.free_at = max(node.free_at, each.time) + missing / tokens_per_s
        node.computed += missing
        node.num_requests += 1
        node.num_prefill_tokens += missing
        heapq.heappush(running, (node.free_at, number, node, each, missing))
        hits, total = hits + cached, total + each.num_tokens
        ttft.append(node.free_at - each.time)
    work = [node.computed for node in pool.nodes]
    return Outcome(hits / total, max(work) / fmean(work), tuple(sorted(ttft)))


def ideal(arrivals: Iterable[Arrival], nodes: int = 4, num_blocks: int = 10_000) -> Outcome:
    """One node that has the memory of all and computes in no time."""
    size = nodes * num_blocks
    return simulate(LeastLoad(), arrivals, nodes=1, num_blocks=size, tokens_per_s=1e12)


def _matcher(
    arrival: Arrival, index: PrefixIndex, block_size: int
) -> Callable[[], Mapping[NodeState, int]]:
    def match() -> Mapping[NodeState, int]:
        most = arrival.num_tokens - 1
        found = index.match(arrival.blocks).items()
        return {node: min(most, count * block_size) for node, count in found}  # type: ignore[misc]

    return match


def _finish(job: tuple[float, int, SimulatedNode, Arrival, int], index: PrefixIndex) -> None:
    _, _, node, arrival, missing = job
    node.num_requests -= 1
    node.num_prefill_tokens -= missing
    node.keep(arrival.blocks, index)
