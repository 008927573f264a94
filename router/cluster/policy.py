"""Placement policies: which of the nodes that fit takes a request. Pure: they read numbers.

    policy         chooses                                                  asks the prefix index
    round-robin    the next one, in the order of ids                        no
    least-load     the one with the fewest tokens to prefill, then requests no
    power-of-two   the less loaded of two drawn at random                   no
    prefix-aware   the one where the least is left to do                    yes
    cost           the one where it costs all requests the fewest seconds   yes
    module:Class   as yours says                                            as yours says

A policy of your own is a subclass of `Policy`, made once for each role of nodes. What it raises, or
a node that does not fit, costs it this choice: the least loaded node gets the request.
`python -m pdserve.router.kit module:Class` checks it.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from math import exp
from statistics import median_low
from typing import ClassVar, NamedTuple, Protocol

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import resolve

DEFAULT = "least-load"
GROUP = "pdserve.placement_policies"  # of entry points


class Rates(NamedTuple):
    """Seconds that things take, as `common.engine.rates` measures them; 0: not measured yet."""

    prefill: float = 0.0  # a prompt token
    step: float = 0.0  # a step that only decodes, besides what each sequence adds
    sequence: float = 0.0  # what a sequence adds to it
    transfer: float = 0.0  # that a token's KV was waited for after it was computed elsewhere


NOT_MEASURED = Rates()


class NodeState(Protocol):
    """The facts of a node that a policy may read."""

    @property
    def id(self) -> str: ...
    @property
    def replicas(self) -> int:
        """The replicas that share the rest."""

    @property
    def num_requests(self) -> int:
        """Requests on it, of all routers."""

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens on it that are not computed yet, of all routers."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that no sequence holds on the replica that has most, by its last report."""

    @property
    def rates(self) -> Rates:
        """How fast a replica is, by its last report."""


class NodeSet(Protocol):
    """The nodes that fit a request. Sets may have hundreds, so look at a few of them."""

    def by_load(self) -> Iterator[NodeState]:
        """Yields them, the least loaded first."""

    def by_id(self, after: str) -> Iterator[NodeState]:
        """Yields them in the order of their ids, beginning behind `after`, once around."""

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
    ) -> None:
        self.session = session  # of one client's; "": none is known
        self.role = role  # "prefill", "decode" or "both": of the nodes to choose among
        self.num_tokens = num_tokens  # of its prompt
        self.now = now  # seconds, by a clock that only runs forward
        self._match = match
        self._cached: Mapping[NodeState, int] | None = None

    @property
    def cached(self) -> Mapping[NodeState, int]:
        """How many of its tokens a node has cached; nodes with none, or that do not fit, may be
        left out. Empty for a policy without `uses_prefixes`."""
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
    """Whether it reads `PolicyRequest.cached`. Then the router follows the nodes' KV events."""

    @abstractmethod
    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        """Returns one of the nodes, None if there is none."""

    def placed(self, request: PolicyRequest, node: NodeState) -> None:  # noqa: B027
        """Called once the node has got the request. (What was chosen need not be taken.)"""


class RoundRobin(Policy):
    """Takes the nodes in turn, in the order of their ids: the one behind the last that it took."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        return next(nodes.by_id(self._last), None)

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        self._last = node.id


class LeastLoad(Policy):
    """Takes the first one in the order of load (`kinds.rank`)."""

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        return next(nodes.by_load(), None)


class PowerOfTwo(Policy):
    """Draws two nodes and takes the less loaded one (Mitzenmacher, IEEE TPDS 2001). Several routers
    whose knowledge is old do not all take the same."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        ordered = list(nodes.by_load())
        if len(ordered) < 2:
            return ordered[0] if ordered else None
        return ordered[min(self._rng.sample(range(len(ordered)), 2))]


class PrefixAware(Policy):
    """Takes the node where the least is left to do, in tokens:

        those of the prompt that it has not cached
      + QUEUED × those that it still has to prefill for others
      + RECENT × those that it has been given lately, of the last minute or so

    The queue counts for less than the prompt's own tokens: what is computed twice costs the whole
    cluster, a wait only this request. It is still a bound. A node whose queue is longer than
    another's by ten times what it has cached gets no more. The last term deals out prompts that
    no node has, also where no node ever queues, and takes a hot prefix to a second node before the
    first one is full. The weights are from benchmarks/bench_placement.py.

    Where no prompts are computed (decode nodes), or tokens too (both), requests count first: only
    nodes within SPREAD and one of the fewest requests are looked at.
    """

    uses_prefixes = True

    QUEUED, RECENT = 0.1, 0.05
    FADING = 60.0  # seconds in which what was given fades to a third
    SPREAD = 1.25

    def __init__(self) -> None:
        self._given = FadingSums(self.FADING)
        self._last = ""

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        found = some(request, nodes, self._last)
        if request.role != "prefill" and found:
            fewest = min(_requests(node) for node in found)
            found = [node for node in found if _requests(node) <= self.SPREAD * fewest + 1]

        def cost(node: NodeState) -> tuple[float, float, str]:
            given = self._given.at(node, request.now)
            others = self.QUEUED * node.num_prefill_tokens + self.RECENT * given
            return request.missing(node) + others / node.replicas, _requests(node), node.id

        return min(found, key=cost, default=None)

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        self._given.add(node, request.missing(node), request.now)
        self._last = node.id


class Cost(Policy):
    """Takes the node where the request costs all requests together the fewest seconds:

        queued + own + own × rate × (queued + own) / (1 - busy)    where prompts are computed
      + transfer + ANSWER × (step + others × what it adds to each)  where answers are

    `own` are the seconds for the tokens that the node has not cached, `queued` those for what it
    has yet to prefill. The third term is the delay of prompts that come before the node is idle
    again: that many are expected (an M/G/1 queue) when `rate` come a second and it is `busy` for
    this share of time. It makes work that is done twice cost more the busier nodes are, deals out
    new prompts evenly where no node ever queues, and takes a hot prefix to a second node while
    the first one has room. There are no weights: seconds are measured, by nodes (`Rates`), and
    `rate` and `busy` by what was placed.

    A session's prompts are expected to find what its last one had, also before the node has said
    so; that too is weighed against queues.
    """

    uses_prefixes = True

    FADING = 60.0  # seconds in which what was given fades to a third
    MOST_BUSY = 0.95
    ALIKE = 1.5  # rates that differ by less than this factor are of equal nodes
    ANSWER = 128  # tokens of an answer, where it has to be compared with a transfer
    UNKNOWN = Rates(1e-4, 0.02, 1e-4, 1e-6)  # until some node has measured

    def __init__(self) -> None:
        self._given = FadingSums(self.FADING)  # seconds of prefill
        self._count = FadingSums(self.FADING)  # prompts
        self._sessions = Sessions()
        self._last = ""

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        found = some(request, nodes, self._last)
        usual = _usual([node.rates for node in found], self.UNKNOWN)

        def cost(node: NodeState) -> tuple[float, float, str]:
            rates = Rates(*map(self._rate, node.rates, usual))
            missing = self._sessions.missing(request, node)
            seconds = 0.0
            if request.role != "decode":
                seconds += self._prefill(request, node, missing * rates.prefill, rates.prefill)
            if request.role != "prefill":
                seconds += self._decode(node, rates)
            if request.role == "decode":
                seconds += missing * rates.transfer
            return seconds, _requests(node), node.id

        return min(found, key=cost, default=None)

    def _rate(self, own: float, usual: float) -> float:
        """Returns a node's rate, the usual one unless the node is of another speed."""
        return own if own and not usual / self.ALIKE < own < usual * self.ALIKE else usual

    def _prefill(
        self, request: PolicyRequest, node: NodeState, own: float, per_token: float
    ) -> float:
        queued = node.num_prefill_tokens * per_token / node.replicas
        rate = self._count.at(node, request.now) / self.FADING / node.replicas
        given = self._given.at(node, request.now) / self.FADING / node.replicas
        idle = 1 - min(self.MOST_BUSY, given)
        return queued + own + own * rate * (queued + own) / idle

    def _decode(self, node: NodeState, rates: Rates) -> float:
        others = _requests(node)
        added = max(rates.sequence, rates.step / 64)
        return self.ANSWER * (rates.step + added * (2 * others + 1))

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        missing = self._sessions.missing(request, node)
        per_token = node.rates.prefill or self.UNKNOWN.prefill
        self._given.add(node, missing * per_token, request.now)
        self._count.add(node, 1, request.now)
        self._sessions.placed(request, node)
        self._last = node.id


def _usual(measured: list[Rates], unknown: Rates) -> Rates:
    """Returns the (lower) median of each rate over the nodes that have measured it."""
    columns = [[each for each in column if each] for column in zip(*measured, strict=True)]
    medians = [median_low(each) if each else 0.0 for each in columns] or [0.0] * len(unknown)
    return Rates(*(rate or default for rate, default in zip(medians, unknown, strict=True)))


class Sessions:
    """Which node had a session's last prompt."""

    MOST = 65_536  # those that asked last

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}  # by session: node, tokens

    def missing(self, request: PolicyRequest, node: NodeState) -> int:
        """Returns how many of its tokens the node does not have, or get from the session."""
        missing = request.missing(node)
        if not request.session:
            return missing
        where, tokens = self._last.get(request.session, ("", 0))
        return missing if where != node.id else max(1, min(missing, request.num_tokens - tokens))

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        if not request.session:
            return
        self._last.pop(request.session, None)
        self._last[request.session] = node.id, request.num_tokens
        if len(self._last) > self.MOST:
            del self._last[next(iter(self._last))]


LOOKED_AT = 32  # nodes of each order; of more than this some are left out in turn


def some(request: PolicyRequest, nodes: NodeSet, last: str) -> list[NodeState]:
    """Returns those that have most of the prompt, the least loaded, and the next ones by id, behind
    the one that was taken last."""
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
    """Sums that fade: what was added counts for 1/e after so many seconds."""

    MOST = 4096  # nodes

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sums: dict[str, tuple[float, float]] = {}  # by node: sum, and when it was that

    def at(self, node: NodeState, now: float) -> float:
        total, since = self._sums.get(node.id, (0.0, now))
        return total * exp((since - now) / self._seconds)

    def add(self, node: NodeState, amount: float, now: float) -> None:
        total = self.at(node, now) + amount
        self._sums.pop(node.id, None)
        self._sums[node.id] = total, now
        if len(self._sums) > self.MOST:
            del self._sums[next(iter(self._sums))]


def _requests(node: NodeState) -> float:
    return node.num_requests / node.replicas


BUILT_IN: dict[str, type[Policy]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "prefix-aware": PrefixAware,
    "cost": Cost,
}


def load_policy(name: str, flag: str) -> Policy:
    """Makes the policy that the option says.

    Raises:
        ConfigError: there is none, or it is not a `Policy` that can be made without arguments.
    """
    found = BUILT_IN.get(name)
    try:
        kind = found or resolve(name, dict.fromkeys(BUILT_IN, ""), GROUP)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}") from error
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigError(
            f"{flag} {name} is not a subclass of pdserve.router.cluster.policy:Policy"
        )
    try:
        return kind()
    except Exception as error:
        raise ConfigError(f"{flag} {name} cannot be made: {error!r}") from error
