"""The promises of a placement policy. One function checks each; its docstring is the promise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from time import thread_time
from typing import Any

from pdserve.router.cluster.policy import Policy, PolicyRequest, RoundRobin
from pdserve.router.kit.simulator import Outcome, SimulatedNode, SimulatedNodes, simulate
from pdserve.router.kit.workloads import burst, conversations, shared_prompt

MakePolicy = Callable[[], Policy]
TOLERANCE = 1.1
NODES = 200
MOST_SECONDS = 300e-6  # of a choice


class Broken(Exception):
    """A promise is not kept; its text says how."""


def _worlds() -> Iterator[tuple[PolicyRequest, SimulatedNodes]]:
    """Requests and nodes of all sorts, also none."""
    rng = random.Random(0)
    for number in range(600):
        nodes = [SimulatedNode(f"node-{i}", 100) for i in range(rng.choice((0, 1, 2, 5, 40)))]
        for node in nodes:
            node.replicas = rng.choice((1, 1, 4))
            node.num_requests = rng.choice((0, 0, rng.randrange(100)))
            node.num_prefill_tokens = rng.choice((0, rng.randrange(10**6)))
        gone = SimulatedNode("gone", 100)
        holders = [gone, *nodes[: rng.randrange(len(nodes) + 1)]]
        tokens = rng.choice((1, 100, 10**6))
        cached = {node: rng.randrange(tokens) for node in holders}
        role = rng.choice(("prefill", "decode", "both"))
        yield _request(role, tokens, number / 7, cached), SimulatedNodes(nodes)


def _request(role: str, num_tokens: int, now: float, cached: Mapping[Any, int]) -> PolicyRequest:
    return PolicyRequest(role, num_tokens, now, lambda: cached)


def chooses_one_of_the_nodes(make: MakePolicy) -> None:
    """It chooses one of the nodes that fit, and None only if there is none."""
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
    nodes = [SimulatedNode(f"node-{i}", 100) for i in range(3)]
    while len(nodes) > 1:
        for turn in range(30):
            request = _request("prefill", 100, float(turn), {nodes[0]: 90})
            pool = SimulatedNodes(nodes)
            if (node := policy.choose(request, pool)) not in pool or node is None:
                raise Broken(f"it chose {getattr(node, 'id', node)!r}, which is gone")
            policy.placed(request, node)
        nodes.pop(0)


def does_not_herd_under_one_prompt(make: MakePolicy) -> None:
    """With one system prompt shared by all, at 40 and 80 % of what the nodes can compute, the time
    to the first token is no worse than round-robin's."""
    for per_s in (13.0, 26.0):
        arrivals = shared_prompt(1500, per_s)
        _no_worse(simulate(make(), arrivals), simulate(RoundRobin(), arrivals), f"{per_s:.0f}/s")


def does_not_herd_in_a_burst(make: MakePolicy) -> None:
    """A burst of prompts whose beginning one node has cached is answered no later than by
    round-robin."""
    arrivals = burst(200)
    _no_worse(simulate(make(), arrivals), simulate(RoundRobin(), arrivals), "200 at once")


def is_no_worse_with_conversations(make: MakePolicy) -> None:
    """With conversations the time to the first token is no worse than round-robin's."""
    arrivals = conversations(1500, 10.0)
    _no_worse(simulate(make(), arrivals), simulate(RoundRobin(), arrivals), "conversations")


def is_quick(make: MakePolicy) -> None:
    """Among 200 nodes a choice takes less than 0.3 ms."""
    policy = make()
    nodes = SimulatedNodes(SimulatedNode(f"node-{i:03}", 100) for i in range(NODES))
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


class _Sorted(SimulatedNodes):
    """Nodes that are sorted already, as the router keeps them."""

    def __init__(self, nodes: SimulatedNodes) -> None:
        self.nodes = nodes.nodes
        self._known = set(nodes.nodes)

    def by_load(self) -> Iterator[SimulatedNode]:
        return iter(self.nodes)

    def by_id(self, after: str) -> Iterator[SimulatedNode]:
        return iter(self.nodes)

    def __contains__(self, node: object) -> bool:
        return node in self._known


def _no_worse(found: Outcome, base: Outcome, where: str) -> None:
    for name, ours, theirs in (
        ("mean", found.mean, base.mean),
        ("p99", found.percentile(0.99), base.percentile(0.99)),
    ):
        if ours > TOLERANCE * theirs:
            raise Broken(
                f"{where}: TTFT {name} is {ours:.2f} s, round-robin's {theirs:.2f} s "
                f"(imbalance {found.imbalance:.2f})"
            )


CHECKS = (
    chooses_one_of_the_nodes,
    does_not_remember_dead_nodes,
    does_not_herd_under_one_prompt,
    does_not_herd_in_a_burst,
    is_no_worse_with_conversations,
    is_quick,
)


def check_policy(make: MakePolicy) -> dict[str, str]:
    """Returns, for each check by its name, what is broken; empty: nothing. What a policy raises
    breaks the check in which it does."""
    found = {}
    for check in CHECKS:
        try:
            check(make)
            found[check.__name__] = ""
        except Exception as error:
            known = isinstance(error, Broken)
            found[check.__name__] = str(error) if known else f"it raised {error!r}"
    return found
