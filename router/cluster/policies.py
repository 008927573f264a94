"""The built-in placement policies, and plugins by name.

policy         chooses                                                    uses the prefix index
round-robin    the next node, in the order of ids                         no
least-load     the node with the fewest tokens to prefill, then requests  no
power-of-two   the less loaded of two random nodes                        no
prefix-aware   the node with the least work left                          yes
cost           the node where the request adds the fewest seconds         yes
module:Class   as the class says                                          as the class says
"""

from __future__ import annotations

import random

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.plugins import resolve
from pdserve.router.cluster.cost import Cost
from pdserve.router.cluster.policy import (
    FadingSums,
    NodeSet,
    NodeState,
    Policy,
    PolicyRequest,
    load_of,
    requests_on,
    some,
)

GROUP = "pdserve.placement_policies"  # of entry points


class RoundRobin(Policy):
    """Takes the nodes in turn, in the order of their ids: the one behind the last that it took."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        return next(nodes.by_id(self._last), None)

    def why(self, request: PolicyRequest, node: NodeState) -> str:
        return "next in turn"

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        self._last = node.id


class LeastLoad(Policy):
    """Takes the first one in the order of load (`kinds.rank`)."""

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        return next(nodes.by_load(), None)

    def why(self, request: PolicyRequest, node: NodeState) -> str:
        return f"least load: {load_of(node)}"


class PowerOfTwo(Policy):
    """Draws two nodes and takes the less loaded one (Mitzenmacher, IEEE TPDS 2001). Several routers
    with outdated loads do not all take the same node."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        ordered = list(nodes.by_load())
        if len(ordered) < 2:
            return ordered[0] if ordered else None
        return ordered[min(self._rng.sample(range(len(ordered)), 2))]

    def why(self, request: PolicyRequest, node: NodeState) -> str:
        return f"less load of two: {load_of(node)}"


class PrefixAware(Policy):
    """Takes the node with the smallest sum of tokens:

        uncached tokens of the prompt
      + QUEUED × tokens that the node still has to prefill for others
      + RECENT × tokens that the node was given lately, in the last minute or so

    The queue counts for less than the prompt's own tokens: recomputation costs the whole cluster, a
    wait costs only this request. It is still a bound: a node gets no more prompts once its queue
    exceeds another's by ten times the cached prefix. The last term spreads uncached prompts, also
    where no node ever queues, and brings a hot prefix to a second node before the first one is
    full. The weights are from benchmarks/bench_placement.py.

    For decode nodes and nodes of both roles the number of requests decides first: only nodes with
    at most SPREAD × the fewest requests + 1 are considered.
    """

    uses_prefixes = True

    QUEUED, RECENT = 0.1, 0.05
    FADING = 60.0  # seconds in which given tokens fade to 1/e
    SPREAD = 1.25

    def __init__(self) -> None:
        self._given = FadingSums(self.FADING)
        self._last = ""

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        found = some(request, nodes, self._last)
        if request.role != "prefill" and found:
            fewest = min(requests_on(node) for node in found)
            found = [node for node in found if requests_on(node) <= self.SPREAD * fewest + 1]

        def cost(node: NodeState) -> tuple[float, float, str]:
            _, given = self._given.at(node, request.now)
            others = self.QUEUED * node.num_prefill_tokens + self.RECENT * given
            return request.missing(node) + others / node.replicas, requests_on(node), node.id

        return min(found, key=cost, default=None)

    def why(self, request: PolicyRequest, node: NodeState) -> str:
        cached = request.cached.get(node, 0)
        return f"least work: {cached} of {request.num_tokens} tokens cached; {load_of(node)}"

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        self._given.add(node, request.missing(node), request.now)
        self._last = node.id


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
    kind = found or resolve(name, dict.fromkeys(BUILT_IN, ""), GROUP, flag)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise ConfigError(
            f"{flag} {name} is not a subclass of pdserve.router.cluster.policy:Policy"
        )
    try:
        return kind()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{flag} {name} cannot be made: {error!r}") from error
