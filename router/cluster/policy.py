"""A placement policy chooses one of the usable nodes for a request. Pure: it reads numbers.
`policies` has the built-in ones.

Your own policy is a subclass of `Policy`; the router makes one object for each role of nodes. If it
raises, or returns an unusable node, the least loaded node gets the request. `python -m
pdserve.router.kit module:Class` checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from math import exp
from typing import ClassVar, NamedTuple, Protocol


class Rates(NamedTuple):
    """Durations in seconds, measured by `common.engine.rates`; 0: not measured yet."""

    prefill: float = 0.0  # per prompt token
    step: float = 0.0  # fixed part of a step without prompt tokens
    sequence: float = 0.0  # per sequence of such a step
    transfer: float = 0.0  # per token: waiting for KV computed elsewhere


NOT_MEASURED = Rates()
SESSION_BLOCK = 16  # tokens; the usual block size of nodes, whose hashes are at hand then


class Blocks(Protocol):
    """Hashes of a prompt's full blocks, as KV events name them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __iter__(self) -> Iterator[int]: ...


class NodeState(Protocol):
    """The facts of a node that a policy may read."""

    @property
    def id(self) -> str: ...
    @property
    def replicas(self) -> int:
        """The node's replicas, which share the load below."""

    @property
    def num_requests(self) -> int:
        """Requests on it, of all routers."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens on it that are not computed yet, of all routers."""

    @property
    def prompts(self) -> Collection[int]:
        """The tokens of each prompt on it that is not computed yet, of this router."""

    @property
    def free_blocks(self) -> int:
        """The free KV blocks of the replica with the most, by its last report."""

    @property
    def rates(self) -> Rates:
        """The rates of a replica, by its last report."""


class NodeSet(Protocol):
    """The nodes that fit a request. Sets may have hundreds, so look at a few of them."""

    def by_load(self) -> Iterator[NodeState]:
        """Yields the nodes, the least loaded first."""

    def by_id(self, after: str) -> Iterator[NodeState]:
        """Yields the nodes in the order of their ids, beginning behind `after`, once around."""

    def __contains__(self, node: object) -> bool: ...


class PolicyRequest:
    """The facts of a request that a policy may read."""

    def __init__(
        self,
        role: str,
        num_tokens: int,
        now: float,
        match: Callable[[], Mapping[NodeState, int]] = dict,
        session: str = "",
        blocks: Callable[[], Blocks] = tuple,
    ) -> None:
        self.session = session  # of one client's; "": none is known
        self.blocks = blocks  # hashes of the full blocks of `SESSION_BLOCK` tokens of its prompt
        self.role = role  # "prefill", "decode" or "both": of the nodes to choose among
        self.num_tokens = num_tokens  # of its prompt
        self.now = now  # seconds, by a clock that only runs forward
        self._match = match
        self._cached: Mapping[NodeState, int] | None = None

    @property
    def cached(self) -> Mapping[NodeState, int]:
        """The number of the prompt's tokens that each node has cached; nodes with none, or that do
        not fit, may be left out. Empty for a policy without `uses_prefixes`."""
        if self._cached is None:
            self._cached = self._match()
        return self._cached

    def missing(self, node: NodeState) -> int:
        """Returns how many of its tokens the node does not have, at least one."""
        return max(1, self.num_tokens - self.cached.get(node, 0))


class Policy(ABC):
    """Chooses among nodes of one role. Its methods run on the router's event loop: they must
    return within microseconds."""

    uses_prefixes: ClassVar[bool] = False
    """Whether the policy reads `PolicyRequest.cached`; then the router follows KV events."""

    @abstractmethod
    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        """Returns one of the nodes, None if there is none."""

    def why(self, request: PolicyRequest, node: NodeState) -> str:
        """Returns in a few words why the last `choose` took the node, for people. Called before
        `placed`."""
        return type(self).__name__

    def placed(self, request: PolicyRequest, node: NodeState) -> None:  # noqa: B027
        """Called once the node has got the request. (A chosen node need not be taken.)"""


LOOKED_AT = 32  # nodes of each order; of more than this some are left out in turn


def some(request: PolicyRequest, nodes: NodeSet, last: str) -> list[NodeState]:
    """Returns a few nodes: those with most of the prompt cached, the least loaded, and the next
    ones by id, after the last one taken."""
    cached = request.cached
    have: Iterable[NodeState] = cached
    if len(cached) > LOOKED_AT:
        have = sorted(cached, key=cached.__getitem__, reverse=True)[:LOOKED_AT]
    least = islice(nodes.by_load(), LOOKED_AT)
    found = dict.fromkeys(node for node in have if node in nodes) | dict.fromkeys(least)
    if len(found) >= LOOKED_AT:
        found |= dict.fromkeys(islice(nodes.by_id(last), LOOKED_AT))
    return list(found)


class FadingSums:
    """Counts and sums that fade: a value counts for 1/e after `seconds`."""

    MOST = 4096  # nodes

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # By node: how many were added, their sum, and when it was that.
        self._sums: dict[str, tuple[float, float, float]] = {}

    def at(self, node: NodeState, now: float) -> tuple[float, float]:
        """Returns how many amounts were added, and their sum."""
        if (known := self._sums.get(node.id)) is None:
            return 0.0, 0.0
        count, total, since = known
        left = exp(min(0.0, since - now) / self._seconds)
        return count * left, total * left

    def add(self, node: NodeState, amount: float, now: float) -> None:
        count, total = self.at(node, now)
        self._sums.pop(node.id, None)
        self._sums[node.id] = count + 1, total + amount, now
        if len(self._sums) > self.MOST:
            del self._sums[next(iter(self._sums))]


def requests_on(node: NodeState) -> float:
    return node.num_requests / node.replicas


def load_of(node: NodeState) -> str:
    """Returns the node's load in words."""
    return f"{node.num_requests} requests and {node.num_prefill_tokens} uncomputed tokens there"
