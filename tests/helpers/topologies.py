"""Chooses the topologies that are compared with transformers.

`make test` runs `few()`, a pairwise cover: a fault of two factors together shows in any topology
that combines their values. `Topology.pairs` yields the pairs to cover. `in_turn()`, all layouts of
all families with sizes of 4, is for `make test-all`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

DENSE = ("llama-gqa", "qwen2", "qwen3", "mistral")
SPARSE = ("mixtral", "qwen2-moe", "qwen3-moe")
MODELS = DENSE + SPARSE
SIZES = (1, 2, 4)  # of tp, pp and ep
REPLICAS = (1, 2)
CONNECTORS = ("shm", "tcp")
EXCHANGES = ("alltoallv", "allgather_reducescatter", "replicated")
BLOCK_SIZES = (16, 8)
MOST_RANKS = 4  # per node
START = 5  # cost of a cluster besides its ranks, in ranks


class Layout(NamedTuple):
    """The ranks of one node: `tp` ranks in each of `pp` stages, experts spread over `ep` of them,
    and `dp` replicas."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def possible(self) -> bool:
        return self.tp * self.pp * self.dp <= MOST_RANKS and self.ep <= self.tp

    def flags(self, exchange: str) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "expert_parallel_size": self.ep,
            "data_parallel_size": self.dp,
            "all2all_backend": exchange,
        }

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}ep{self.ep}" + ("dp2" if self.dp > 1 else "")


LAYOUTS = tuple(
    layout
    for layout in itertools.starmap(Layout, itertools.product(SIZES, SIZES, SIZES, REPLICAS))
    if layout.possible
)
Pair = frozenset[tuple[str, object]]  # or a family alone


@dataclass(frozen=True)
class Topology:
    model: str
    prefill: Layout
    decode: Layout
    connector: str
    exchange: str = EXCHANGES[0]
    block_size: int = BLOCK_SIZES[0]

    def __str__(self) -> str:
        exchange = f"-{self.exchange}" if self.sparse else ""
        return (
            f"{self.model}-{self.prefill}-{self.decode}-{self.connector}{exchange}"
            f"-{self.block_size}"
        )

    @property
    def sparse(self) -> bool:
        return self.model in SPARSE

    @property
    def possible(self) -> bool:
        """Whether the topology is valid: dense models have no experts to spread or exchange."""
        spread = max(self.prefill.ep, self.decode.ep) > 1
        if not self.sparse:
            return not spread and self.exchange == EXCHANGES[0]
        return spread or self.exchange == EXCHANGES[0]

    @property
    def cost(self) -> int:
        return START + sum(each.tp * each.pp * each.dp for each in (self.prefill, self.decode))

    def pairs(self) -> Iterator[Pair]:
        """Yields the pairs of factor values in this topology."""
        kind, block = ("sparse", self.sparse), ("block size", self.block_size)
        connector = ("connector", self.connector)
        cut = [
            [(f"{role} {size}", getattr(layout, size)) for size in ("tp", "pp")]
            for role, layout in (("prefill", self.prefill), ("decode", self.decode))
        ]
        yield from _met(kind, block, connector)
        yield from map(frozenset, itertools.product(*cut))
        yield from map(frozenset, itertools.product([connector], itertools.chain(*cut)))
        yield frozenset({("model", self.model)})
        for layout in (self.prefill, self.decode):
            sizes = layout._asdict().items()
            yield from _met(*sizes)
            yield from map(frozenset, itertools.product([kind, block], sizes))
            if layout.ep > 1:
                yield frozenset({("exchange", self.exchange), ("tp", layout.tp)})


# More ranks than some models have KV heads, whose KV goes to fewer.
WIDE = Topology("qwen3-moe", Layout(4, 1, 2), Layout(2), "tcp")


def _met(*factors: tuple[str, object]) -> Iterator[Pair]:
    yield from map(frozenset, itertools.combinations(factors, 2))


@cache
def few() -> list[Topology]:
    """Returns topologies that cover every pair of the candidates' values, chosen greedily by new
    pairs per cost."""
    bits: defaultdict[Pair, int] = defaultdict(lambda: 1 << len(bits))
    shown = {each: sum({bits[pair] for pair in each.pairs()}) for each in candidates()}
    costs = {each: each.cost for each in shown}
    missing = (1 << len(bits)) - 1
    missing &= ~sum({bits[pair] for pair in WIDE.pairs() if pair in bits})
    found = [WIDE]
    while missing:
        best = max(shown, key=lambda each: (shown[each] & missing).bit_count() / costs[each])
        missing &= ~shown[best]
        found.append(best)
    return found


def candidates() -> Iterator[Topology]:
    """Yields topologies with up to two ranks per stage, two stages, and experts in two places;
    `in_turn` has larger ones."""
    small = [each for each in LAYOUTS if max(each) <= 2]
    factors = (MODELS, small, small, CONNECTORS, EXCHANGES, BLOCK_SIZES)
    every = itertools.starmap(Topology, itertools.product(*factors))
    return (topology for topology in every if topology.possible)


def in_turn() -> Iterator[Topology]:
    """Yields each family with every layout on the prefill node and the next one on the decode node:
    every layout serves in both roles, and KV is split and joined between unequal layouts."""
    for number, model in enumerate(MODELS):
        layouts = [e for e in LAYOUTS if e.dp == 1 and (e.ep == 1 or model in SPARSE)]
        for index, prefill in enumerate(layouts):
            turn = index + number
            decode = layouts[(turn + 1) % len(layouts)]
            exchange = EXCHANGES[turn % 3 if model in SPARSE else 0]
            yield Topology(model, prefill, decode, CONNECTORS[turn % 2], exchange)
