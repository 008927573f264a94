"""The promises of a placement policy. One function checks each; its docstring is the promise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import thread_time
from typing import Any

from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.router import RoutingConfig
from pdserve.router.cluster.policies import RoundRobin
from pdserve.router.cluster.policy import (
    NOT_MEASURED,
    NodeSet,
    NodeState,
    Policy,
    PolicyRequest,
    Rates,
)
from pdserve.router.kit.nodes import PlainNode, PlainNodes
from pdserve.simulate.calibration import linear
from pdserve.simulate.cluster import ROLES, Setup, simulate
from pdserve.simulate.outcome import Outcome
from pdserve.simulate.workloads import Arrival, burst, conversations, shared_prompt

MakePolicy = Callable[[], Policy]
Check = Callable[[MakePolicy], None]
TOLERANCE = 1.1
UNLIMITED = RoutingConfig(
    max_concurrent_requests=10**6, max_queued_requests=10**6, max_client_share=1.0
)
BATCHES = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
NODES = 200
MOST_SECONDS = 300e-6  # of a choice


class Broken(Exception):
    """A promise is not kept; its text says how."""


def _worlds() -> Iterator[tuple[PolicyRequest, PlainNodes]]:
    """Requests and nodes of all sorts, also none."""
    rng = random.Random(0)
    for number in range(600):
        nodes = [PlainNode(f"node-{i}") for i in range(rng.choice((0, 1, 2, 5, 40)))]
        for node in nodes:
            node.replicas = rng.choice((1, 1, 4))
            node.num_requests = rng.choice((0, 0, rng.randrange(100)))
            node.num_prefill_tokens = rng.choice((0, rng.randrange(10**6)))
            node.rates = rng.choice((NOT_MEASURED, Rates(1e-4, 0.02, 1e-3, 1e-6), Rates(step=1e9)))
        gone = PlainNode("gone")
        holders = [gone, *nodes[: rng.randrange(len(nodes) + 1)]]
        tokens = rng.choice((1, 100, 10**6))
        cached = {node: rng.randrange(tokens) for node in holders}
        role = rng.choice(("prefill", "decode", "both"))
        yield _request(role, tokens, number / 7, cached), PlainNodes(nodes)


def _request(role: str, num_tokens: int, now: float, cached: Mapping[Any, int]) -> PolicyRequest:
    return PolicyRequest(role, num_tokens, now, lambda: cached)


def chooses_one_of_the_nodes(make: MakePolicy) -> None:
    """The policy chooses one of the nodes that fit, and None only if there is none."""
    policy = make()
    for request, nodes in _worlds():
        node = policy.choose(request, nodes)
        if node is None and nodes.nodes:
            raise Broken(f"it chose None among {len(nodes.nodes)} nodes")
        if node is not None and node not in nodes:
            raise Broken(f"it chose {getattr(node, 'id', node)!r}, which is not among the nodes")
        if node is not None:
            policy.placed(request, node)


def does_not_remember_dead_nodes(make: MakePolicy) -> None:
    """Once a node is gone it is not chosen any more, whatever it had cached."""
    policy = make()
    nodes = [PlainNode(f"node-{i}") for i in range(3)]
    while len(nodes) > 1:
        for turn in range(30):
            request = _request("prefill", 100, float(turn), {nodes[0]: 90})
            pool = PlainNodes(nodes)
            if (node := policy.choose(request, pool)) not in pool or node is None:
                raise Broken(f"it chose {getattr(node, 'id', node)!r}, which is gone")
            policy.placed(request, node)
        nodes.pop(0)


def does_not_herd_under_one_prompt(make: MakePolicy) -> None:
    """With one system prompt shared by all, at 40 and 80 % of the nodes' capacity, TTFT is no worse
    than round-robin's."""
    for per_s in (13.0, 26.0):
        arrivals = shared_prompt(600, per_s)
        _no_worse(make, arrivals, f"{per_s:.0f}/s")


def does_not_herd_in_a_burst(make: MakePolicy) -> None:
    """A burst of prompts with a prefix cached on one node is answered no later than by round-
    robin."""
    arrivals = burst(200)
    _no_worse(make, arrivals, "200 at once")


def is_no_worse_with_conversations(make: MakePolicy) -> None:
    """With conversations the time to the first token is no worse than round-robin's."""
    arrivals = conversations(600, 10.0)
    _no_worse(make, arrivals, "conversations")


def is_quick(make: MakePolicy) -> None:
    """Among 200 nodes a choice takes less than 0.3 ms."""
    policy = make()
    nodes = PlainNodes(PlainNode(f"node-{i:03}") for i in range(NODES))
    cached = dict.fromkeys(nodes.nodes[:20], 50)
    best = 1.0
    ordered = _Sorted(nodes)
    for turn in range(50):
        request = _request("prefill", 100, float(turn), cached)
        began = thread_time()
        node = policy.choose(request, ordered)
        if node is not None:
            policy.placed(request, node)
        best = min(best, thread_time() - began)
    if best > MOST_SECONDS:
        raise Broken(f"a choice takes {1e6 * best:.0f} µs")


class _Sorted(PlainNodes):
    """Nodes that are sorted already, as the router keeps them."""

    def __init__(self, nodes: PlainNodes) -> None:
        self.nodes = nodes.nodes
        self._known = set(nodes.nodes)

    def by_load(self) -> Iterator[PlainNode]:
        return iter(self.nodes)

    def by_id(self, after: str) -> Iterator[PlainNode]:
        return iter(self.nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._known


def _no_worse(make: MakePolicy, arrivals: Sequence[Arrival], where: str) -> None:
    found = _simulated(make, arrivals).row()
    if where not in _by_turns:
        _by_turns[where] = _simulated(RoundRobin, arrivals).row()
    base = _by_turns[where]
    for name in ("ttft_mean_s", "ttft_p99_s"):
        if found[name] > TOLERANCE * base[name]:
            raise Broken(
                f"{where}: {name} is {found[name]:.2f}, round-robin's {base[name]:.2f} "
                f"(imbalance {found['imbalance']:.2f})"
            )


_by_turns: dict[str, dict[str, Any]] = {}  # round-robin's figures, by workload


class _Watched(Policy):
    """Remembers a policy's exceptions, which cost it only the choice."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.uses_prefixes = policy.uses_prefixes  # type: ignore[misc]
        self.error: Exception | None = None

    def choose(self, request: PolicyRequest, nodes: NodeSet) -> NodeState | None:
        try:
            return self._policy.choose(request, nodes)
        except Exception as error:
            self.error = error
            raise

    def placed(self, request: PolicyRequest, node: NodeState) -> None:
        try:
            self._policy.placed(request, node)
        except Exception as error:
            self.error = error
            raise


def _simulated(make: MakePolicy, arrivals: Sequence[Arrival]) -> Outcome:
    """Places the requests on four prefill nodes of 10,000 tokens a second. Raises the policy's
    exceptions."""
    policies = {role: _Watched(make()) for role in ROLES.values()}
    setup = Setup("4P1D", linear(10_000), policies, UNLIMITED, BATCHES)
    found = simulate(setup, arrivals)
    for each in policies.values():
        if each.error is not None:
            raise each.error
    return found


CHECKS = (
    chooses_one_of_the_nodes,
    does_not_remember_dead_nodes,
    does_not_herd_under_one_prompt,
    does_not_herd_in_a_burst,
    is_no_worse_with_conversations,
    is_quick,
)


def check_policy(make: MakePolicy, checks: Sequence[Check] = CHECKS) -> dict[str, str]:
    """Returns the faults by the name of the check; empty: none. An exception of the policy breaks
    the check in which it occurs."""
    found = {}
    for check in checks:
        try:
            check(make)
            found[check.__name__] = ""
        except Exception as error:
            known = isinstance(error, Broken)
            found[check.__name__] = str(error) if known else f"it raised {error!r}"
    return found
