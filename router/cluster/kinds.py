"""Nodes sorted by load and by id, so that placement looks at a few of them instead of all.

Nodes of one *kind* have the same role, KV layout and connectors, so they pair with the same
others. Within a kind the nodes that are up are kept sorted by load and by id. Code that changes
a node's load, or whether it is up, must call `Kinds.changed`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.node import Node

Rank = tuple[float, float, float, int, str]


def rank(node: Node) -> Rank:
    """Returns the node's place in the order of load: the fewest tokens to prefill come first, then
    the fewest requests, per replica; among equals the fewest waiting tokens per replica by its
    report, then the most free blocks on one. What other routers have placed there is known by the
    node's reports."""
    replicas, load = node.replicas, node.load
    return (
        node.num_prefill_tokens / replicas,
        node.num_requests / replicas,
        load.waiting_tokens / replicas,
        -load.most_free_blocks,
        node.id,
    )


KindKey = tuple[int, str, tuple[str, ...]]  # role, fingerprint, connectors


def kind_key(info: pb.NodeInfo) -> KindKey:
    return info.role, info.fingerprint, tuple(sorted(info.kv_connectors))


class Kind:
    """The nodes of one role, KV layout (`fingerprint`) and list of connectors."""

    def __init__(self, info: pb.NodeInfo) -> None:
        self.key = kind_key(info)
        self.role, self.fingerprint, connectors = self.key
        self._connectors = frozenset(connectors)
        self._ranks: dict[Node, Rank | None] = {}  # of all its nodes; None: it is not up
        self._by_load: list[tuple[Rank, Node]] = []
        self._by_id: list[tuple[str, Node]] = []

    @property
    def nodes(self) -> Collection[Node]:
        """Returns all nodes, also those that are down, in order of arrival."""
        return self._ranks.keys()

    def by_load(self) -> Iterator[Node]:
        """Yields the nodes that are up, the least loaded first."""
        return (node for _, node in self._by_load)

    def by_id(self, after: str) -> Iterator[Node]:
        """Yields the nodes that are up once, in the order of their ids, beginning behind `after`
        and going on from the front."""
        start = bisect_right(self._by_id, after, key=lambda entry: entry[0])
        entries = chain(islice(self._by_id, start, None), islice(self._by_id, start))
        return (node for _, node in entries)

    def __contains__(self, node: Node) -> bool:
        """Returns whether the node is of this kind and up."""
        return self._ranks.get(node) is not None

    def fits(self, other: Kind) -> bool:
        """Returns whether nodes of the two kinds can pair: they have the same KV layout and a
        connector in common."""
        same_kv = self.fingerprint == other.fingerprint
        return same_kv and not self._connectors.isdisjoint(other._connectors)

    def put(self, node: Node) -> None:
        """Adds the node, or puts it where it belongs by now."""
        was, now = self._ranks.get(node), rank(node) if node.is_up else None
        if was == now and node in self._ranks:
            return
        self._unlist(node, was, now is None)
        self._ranks[node] = now
        if now is not None:
            insort(self._by_load, (now, node))
            if was is None:
                insort(self._by_id, (node.id, node))

    def remove(self, node: Node) -> None:
        self._unlist(node, self._ranks.pop(node), True)

    def _unlist(self, node: Node, was: Rank | None, down: bool) -> None:
        if was is None:
            return
        del self._by_load[bisect_left(self._by_load, was, key=lambda entry: entry[0])]
        if down:
            del self._by_id[bisect_left(self._by_id, node.id, key=lambda entry: entry[0])]


class Kinds:
    """The kinds of the registered nodes."""

    def __init__(self) -> None:
        self._kinds: dict[KindKey, Kind] = {}
        self._by_fingerprint: dict[tuple[int, str], list[Kind]] = {}
        self._of: dict[Node, Kind] = {}

    def add(self, node: Node) -> None:
        self._of[node] = kind = self._made(node.info)
        kind.put(node)

    def remove(self, node: Node) -> None:
        kind = self._of.pop(node)
        kind.remove(node)
        self._drop_if_empty(kind)

    def changed(self, node: Node) -> None:
        """Notes that the load or the state of a node has changed. One that is not registered (any
        more) stays out."""
        if (kind := self._of.get(node)) is not None:
            kind.put(node)

    def described_anew(self, node: Node) -> None:
        """Notes that the node has described itself anew, and so may have changed its kind."""
        self.remove(node)
        self.add(node)

    def of_role(self, role: int) -> list[Kind]:
        return [kind for kind in self._kinds.values() if kind.role == role]

    def of(self, node: Node) -> Kind:
        """Returns the node's kind; that of a node which is not registered any more is one of its
        own."""
        return self._of.get(node) or Kind(node.info)

    def sources(self, decode: Kind) -> list[Kind]:
        """Returns the kinds of prefill nodes that pair with a kind of decode nodes."""
        same_kv = self._by_fingerprint.get((pb.ROLE_PREFILL, decode.fingerprint), ())
        return [kind for kind in same_kv if kind.fits(decode)]

    def _made(self, info: pb.NodeInfo) -> Kind:
        key = kind_key(info)
        if (kind := self._kinds.get(key)) is None:
            kind = self._kinds[key] = Kind(info)
            self._by_fingerprint.setdefault(key[:2], []).append(kind)
        return kind

    def _drop_if_empty(self, kind: Kind) -> None:
        if kind.nodes:
            return
        del self._kinds[kind.key]
        alike = self._by_fingerprint[kind.role, kind.fingerprint]
        alike.remove(kind)
        if not alike:
            del self._by_fingerprint[kind.role, kind.fingerprint]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The usable nodes of some kinds, found lazily as far as a caller iterates."""

    kinds: Collection[Kind]
    fits: Callable[[Node], bool]

    def __bool__(self) -> bool:
        return any(map(self.fits, chain.from_iterable(kind.by_load() for kind in self.kinds)))

    def __contains__(self, node: object) -> bool:
        return (
            isinstance(node, Node) and any(node in kind for kind in self.kinds) and self.fits(node)
        )

    def by_load(self) -> Iterator[Node]:
        """Yields them, the least loaded first."""
        return _merged([filter(self.fits, kind.by_load()) for kind in self.kinds], rank)

    def by_id(self, after: str) -> Iterator[Node]:
        """Yields them in the order of their ids, beginning behind `after` and going on from the
        front."""
        turns = [filter(self.fits, kind.by_id(after)) for kind in self.kinds]
        return _merged(turns, lambda node: (node.id <= after, node.id))

    def where(self, fits: Callable[[Node], bool]) -> Candidates:
        """Returns the nodes for which the condition holds."""
        return Candidates(self.kinds, lambda node: self.fits(node) and fits(node))

    def of_kinds(self, kinds: Iterable[Kind]) -> Candidates:
        """Returns the nodes of these kinds, which are among its own."""
        return Candidates(list(kinds), self.fits)


def _merged(parts: Sequence[Iterator[Node]], key: Callable[[Node], Any]) -> Iterator[Node]:
    return parts[0] if len(parts) == 1 else heapq.merge(*parts, key=key)
