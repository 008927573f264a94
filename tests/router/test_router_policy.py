"""NodeSelector, breaker, registry and admission, with a clock of our own."""

from contextlib import ExitStack

import pytest

from clock import Clock
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import (
    Blame,
    Gone,
    NodeError,
    TransferError,
    Unavailable,
)
from pdserve.common.core.request import PromptPath
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import MAX_PAIRINGS, ClusterView
from pdserve.router.cluster.health import (
    MAX_REFUSALS,
    OLDER,
    AwakeClock,
    BreakerState,
    CircuitBreaker,
)
from pdserve.router.cluster.in_flight import InFlightLoad
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.placement import NodeSelector, load_policies
from pdserve.router.cluster.policies import LeastLoad, RoundRobin
from pdserve.router.cluster.policy import PolicyRequest
from pdserve.router.cluster.registry import MAX_GONE, Registry
from pdserve.router.requests.generation import GenerationRequest
from pdserve.router.requests.request_state import RequestState


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def registry(clock):
    return Registry(RoutingConfig(heartbeat_timeout=5, breaker_failures=2), clock)


def add(
    registry, node_id, role=pb.ROLE_DECODE, fingerprint="f", connector="tcp", replicas=1, **load
):
    load = {"free_blocks": 10, "total_blocks": 10, "healthy": True, **load}
    info = pb.NodeInfo(
        node_id=node_id, role=role, address=f"{node_id}:1", fingerprint=fingerprint,
        kv_connectors=connector.split(","), data_parallel_size=replicas,
    )  # fmt: skip
    registry.register(info, pb.NodeLoad(**load))


def add_all(registry, words):
    """Adds `p0 d0 d1=g b0`: a node a word; its letter is the role, behind `=` is its version."""
    roles = {"p": pb.ROLE_PREFILL, "d": pb.ROLE_DECODE, "b": pb.ROLE_BOTH}
    for node_id, _, fingerprint in (word.partition("=") for word in words.split()):
        connector = "" if node_id[0] == "b" else "tcp"
        add(registry, node_id, roles[node_id[0]], fingerprint or "f", connector)
    return registry.nodes()


def a_run(num_tokens=8, **options) -> RequestState:
    sampling = SamplingParams(max_tokens=4)
    # No token is made into text.
    request = GenerationRequest("r", tuple(range(num_tokens)), sampling, skip_special_tokens=False)
    return RequestState(
        request, lambda update: None, None, RoutingConfig(queue_timeout=0, **options)
    )


def selector(registry, **options) -> NodeSelector:
    config = RoutingConfig(**options)
    return NodeSelector(config, ClusterView(registry), load_policies(config))


async def place(registry, run=None, **options) -> tuple[Node | None, Node]:
    """The pair that a request gets, as `Pipeline` asks for it."""
    placement, run = selector(registry, **options), run or a_run()
    decode, path = await placement.decode(run.placement)
    if path is not PromptPath.TRANSFERRED:
        return None, decode
    return await placement.prefill(run.placement, decode), decode


def ids(nodes):
    return [node.info.node_id for node in nodes]


def candidates(registry, role):
    return ClusterView(registry).candidates(role)


def usable(registry, role):
    view = ClusterView(registry)
    return [node for node in registry.nodes() if node.info.role == role and view.is_usable(node)]


def alter(registry, node, **fields):
    """Sets fields of a node as its owners do."""
    for name, value in fields.items():
        setattr(node, name, value)
    registry.kinds.changed(node)


def addresses(registry):
    return {node.info.address for node in registry.connected()}


async def test_a_silent_node_is_not_used_and_one_that_returns_is(registry, clock):
    add(registry, "d0")
    clock.time += 5.1
    assert usable(registry, pb.ROLE_DECODE) == []
    assert registry.heartbeat("d0", pb.NodeLoad(healthy=True))
    assert ids(usable(registry, pb.ROLE_DECODE)) == ["d0"]
    clock.time += 51
    registry.sweep()
    assert not registry.heartbeat("d0", pb.NodeLoad(healthy=True))


async def test_a_lost_node_is_not_forgotten_while_it_has_requests(registry, clock):
    add(registry, "d0")
    (node,) = registry.nodes()
    node.in_flight = 1
    clock.time += 51
    registry.sweep()
    assert registry.nodes() == [node] and not registry.is_alive(node)
    node.in_flight = 0
    registry.sweep()
    assert registry.nodes() == []


async def test_a_node_that_registers_again_has_the_adapters_that_it_says(registry):
    for digests in ({"a", "b"}, {"b"}, set()):
        info = pb.NodeInfo(node_id="d0", role=pb.ROLE_DECODE, instance="i", adapters=digests)
        registry.register(info, pb.NodeLoad(healthy=True))
        (node,) = registry.nodes()
        assert node.adapters == digests


async def test_a_silent_node_ends_its_requests_once(registry, clock):
    add(registry, "d")
    (node,) = registry.nodes()
    errors: list[Exception] = []
    node.on_lost.add(errors.append)
    clock.time += 4.9
    registry.sweep()
    assert errors == []
    clock.time += 0.2
    registry.sweep()
    registry.sweep()
    assert [error.code for error in errors] == ["PEER_SILENT"] and node.silent


async def test_a_router_that_slept_takes_no_node_for_silent(clock):
    registry = Registry(RoutingConfig(heartbeat_timeout=5), AwakeClock(2.5, clock))
    add(registry, "d")
    registry.sweep()
    clock.time += 60  # stopped: heartbeats wait in its sockets
    registry.sweep()
    assert ids(usable(registry, pb.ROLE_DECODE)) == ["d"]
    for _ in range(11):
        clock.time += 0.5
        registry.sweep()
    assert usable(registry, pb.ROLE_DECODE) == []


async def test_a_loop_that_something_blocks_again_and_again_takes_no_node_for_silent(clock):
    """A heartbeat is read in some turns of the loop, each of which is late."""
    awake = AwakeClock(real=clock)
    registry = Registry(RoutingConfig(heartbeat_timeout=5), awake)
    add(registry, "d")
    for _ in range(10):
        clock.time += 2.3
        registry.sweep()
    assert ids(usable(registry, pb.ROLE_DECODE)) == ["d"]


async def test_nodes_that_may_not_be_used_say_why(registry, clock):
    add(registry, "d0", healthy=False, reason="step 7 has been running for 20.0 s")
    add(registry, "p0", pb.ROLE_PREFILL, healthy=False)
    lost, broken, _ = add_all(registry, "d1 d2 d3")[2:]
    alter(registry, lost, lost=True)
    broken.breaker.failed()
    broken.breaker.failed()
    assert list(ClusterView(registry).unusable_reasons(pb.ROLE_DECODE)) == [
        "d0: step 7 has been running for 20.0 s",
        "d1: it does not answer",
        "d2: its circuit breaker is open",
    ]


async def test_only_nodes_that_fit_together_are_paired(registry):
    add_all(registry, "p0=a p1=b d0=b d1=c")
    add(registry, "d2", fingerprint="a", connector="shm")
    for policy in ("round-robin", "least-load"):
        for _ in range(2):
            pair = await place(registry, prefill_policy=policy, decode_policy=policy)
            assert ids(pair) == ["p1", "d0"]
    prefill, decode = await place(registry, local_prefill_threshold=9)
    assert prefill is None and decode.role == "decode"


async def test_without_a_prefill_node_only_a_request_that_has_begun_is_placed(registry):
    add(registry, "d0")
    with pytest.raises(Unavailable, match="no usable prefill node"):
        await place(registry)
    begun = a_run()
    begun.version = "f"
    assert (await place(registry, begun))[0] is None
    add(registry, "p0", pb.ROLE_PREFILL)
    begun.version = "g"
    with pytest.raises(Gone, match="version"):
        await place(registry, begun)


async def test_a_prefill_node_that_is_sick_is_stood_in_for(registry):
    add(registry, "p0", pb.ROLE_PREFILL, healthy=False, reason="no decode node reachable")
    add_all(registry, "d0 d1=g")
    prefill, decode = await place(registry)
    assert prefill is None and decode.info.node_id == "d0"
    ready, reason = ClusterView(registry).ready()
    assert ready and reason.startswith("decode nodes prefill: ")


@pytest.mark.parametrize("gone", ["lost", "unreachable", "forgotten"])
async def test_prefill_nodes_that_are_gone_are_stood_in_for_in_a_few_seconds(registry, clock, gone):
    prefill, *decodes = add_all(registry, "p0 d0 d1=g")  # d1 never had one
    alter(registry, prefill, **{gone if gone == "unreachable" else "lost": "no route"})
    with pytest.raises(Unavailable, match="no usable prefill node"):
        await place(registry)
    for _ in range(60 if gone == "forgotten" else 6):
        clock.time += 1
        if gone == "unreachable":  # its heartbeats arrive
            registry.heartbeat("p0", pb.NodeLoad(healthy=True))
        for node in decodes:
            registry.heartbeat(node.id, pb.NodeLoad(healthy=True))
        registry.sweep()
    assert (prefill in registry.nodes()) == (gone != "forgotten")
    found, decode = await place(registry)
    assert found is None and decode.id == "d0"
    ready, reason = ClusterView(registry).ready()
    assert ready and reason.startswith("decode nodes prefill: no usable prefill node")
    add(registry, "p1", pb.ROLE_PREFILL)
    assert ids(await place(registry)) == ["p1", "d0"]


async def test_a_prefill_node_that_falls_silent_is_stood_in_for_at_once(registry, clock):
    add_all(registry, "p0 d0")
    clock.time += 5.1
    assert registry.heartbeat("d0", pb.NodeLoad(healthy=True))
    found, decode = await place(registry)
    assert found is None and decode.id == "d0"


async def test_prefill_nodes_that_left_in_order_are_waited_for(registry, clock):
    add_all(registry, "p0 d0")
    registry.deregister("p0")
    clock.time += 4
    with pytest.raises(Unavailable, match="no usable prefill node"):
        await place(registry)


async def test_the_versions_of_forgotten_prefill_nodes_are_bounded(registry, clock):
    for number in range(MAX_GONE + 9):
        add(registry, f"p{number}", pb.ROLE_PREFILL, fingerprint=f"f{number}")
    clock.time += 51
    registry.sweep()
    assert registry.nodes() == [] and len(registry.gone_prefills) == MAX_GONE


async def test_a_node_whose_fingerprint_matches_no_other_s_is_shown_as_such(registry):
    add(registry, "p0", pb.ROLE_PREFILL)
    view = ClusterView(registry)
    assert view.counts() == {("prefill", "ready"): 1}, "the others may still come"
    for name, role, *kind in (
        ("d0", pb.ROLE_DECODE, "f"), ("d1", pb.ROLE_DECODE, "g"), ("p1", pb.ROLE_PREFILL, "h"),
        ("d2", pb.ROLE_DECODE, "f", "nccl"), ("b0", pb.ROLE_BOTH, "i"),
    ):  # fmt: skip
        add(registry, name, role, *kind)
    nodes = {node.id: node for node in registry.nodes()}
    nodes["p0"].info.fingerprint_parts["block_size"] = "8"
    nodes["d1"].info.fingerprint_parts["block_size"] = "16"
    shown = {node["node_id"]: (node["state"], node["reason"]) for node in described(view)}
    assert {name for name, (state, _) in shown.items() if state == "ready"} == {"p0", "d0", "b0"}
    assert shown["d1"] == ("unpaired", "it fits no prefill node (p0 and d1: block_size 8 ≠ 16)")
    assert shown["d2"][1].endswith("no common KV connector (tcp ≠ nccl))")
    assert shown["p1"][1].startswith("it fits no decode node (p1 and d0: ")
    assert view.counts()["decode", "unpaired"] == 2 and view.counts()["prefill", "unpaired"] == 1
    add(registry, "p2", pb.ROLE_PREFILL, "g")
    assert view.counts()["decode", "unpaired"] == 1
    nodes["d1"].load.healthy = False
    assert view.counts()["decode", "unhealthy"] == 1


def described(view):
    return view.describe()["nodes"]


async def test_a_node_of_both_roles_needs_no_other(registry):
    add(registry, "b0", pb.ROLE_BOTH, connector="")
    assert ClusterView(registry).ready() == (True, "ok")
    prefill, node = await place(registry)
    assert prefill is None and node.id == "b0"
    node.load.healthy, node.load.reason = False, "step 7 has been running for 20.0 s"
    reason = "no usable both node (b0: step 7 has been running for 20.0 s)"
    assert ClusterView(registry).ready() == (False, reason)
    with pytest.raises(Unavailable, match="no usable both node"):
        await place(registry)


def test_describing_a_large_cluster_does_not_block_the_router(registry):
    """It grows with the nodes, not with their pairs, and what a node says of itself is written once
    for all who ask."""
    for number in range(100):
        add(registry, f"p{number}", pb.ROLE_PREFILL)
        add(registry, f"d{number}")
    view = ClusterView(registry)
    shown = view.describe()
    assert (len(shown["nodes"]), len(shown["pairings"])) == (200, MAX_PAIRINGS)
    assert shown["pairings"][0] == {"prefill": "p0", "decode": "d0"}
    written = [node.described for node in registry.nodes()]
    add(registry, "d0", connector="shm,tcp")  # it registers once more
    (again,) = [node for node in view.describe()["nodes"] if node["node_id"] == "d0"]
    assert again["kv_connectors"] == ["shm", "tcp"]
    changed = [a is not b.described for a, b in zip(written, registry.nodes(), strict=True)]
    assert changed.count(True) == 1


async def test_nodes_of_both_roles_stand_in_for_pairs_and_pairs_for_them(registry):
    add_all(registry, "b0 p0")
    view = ClusterView(registry)
    assert view.ready() == (True, "nodes of both roles serve: no usable decode node")
    add(registry, "d0")
    assert view.ready() == (True, "ok") and [ids(pair) for pair in view.pairs()] == [["p0", "d0"]]
    both, prefill, decode = registry.nodes()
    alter(registry, prefill, lost=True)
    assert (await place(registry))[1] is both, "rather than a decode node that must prefill"
    alter(registry, both, lost=True)
    alter(registry, prefill, lost=False)
    assert await place(registry) == (prefill, decode)
    alter(registry, decode, lost=True)
    ready, reason = view.ready()
    assert not ready and reason.startswith("no usable decode node (d0: ")
    assert "; no usable both node (b0: it does not answer)" in reason


async def test_a_node_that_failed_a_request_is_its_last_resort_whatever_its_role(registry):
    add(registry, "p0", pb.ROLE_PREFILL)
    add(registry, "d0", most_free_blocks=9)
    add(registry, "b0", pb.ROLE_BOTH, connector="")
    run = a_run()
    assert (await place(registry, run))[1].id == "d0"
    run.retries.avoid.add("d0")
    assert (await place(registry, run))[1].id == "b0"
    run.retries.avoid.add("b0")
    assert (await place(registry, run))[1].id == "d0"
    run.version = "g"
    with pytest.raises(Gone, match="version"):
        await place(registry, run)


@pytest.mark.parametrize("policy", ["least-load", "round-robin"])
async def test_a_burst_is_shared_by_pairs_and_nodes_of_both_roles(registry, policy):
    add_all(registry, "p0 d0 b0 b1")
    placement = selector(registry, decode_policy=policy)
    with ExitStack() as burst:
        for _ in range(30):
            run = a_run(num_tokens=100)
            node, path = await placement.decode(run.placement)
            burst.enter_context(
                InFlightLoad(
                    registry, node, 0 if path is PromptPath.TRANSFERRED else run.num_tokens
                )
            )
        in_flight = {node.id: node.in_flight for node in registry.nodes() if node.id != "p0"}
        assert max(in_flight.values()) - min(in_flight.values()) <= 1, in_flight


def test_refusals_are_counted_and_only_the_last_reasons_are_kept(registry, clock):
    """The refusals before them are counted together."""
    for number in range(MAX_REFUSALS + 5):
        registry.refusals.note(f"reason {number}")
        clock.time += 1
    registry.refusals.note(f"reason {number}")
    (older, first, *_, last) = list(registry.refusals.items())
    assert (first[0], last) == ("reason 5", (f"reason {number}", "registry", 2, 0.0))
    assert older == (OLDER, "registry", 5, MAX_REFUSALS + 1.0)
    assert len(list(registry.refusals.items())) == MAX_REFUSALS + 1
    (_, shown, *_) = ClusterView(registry).describe()["refused"]
    assert (shown["reason"], shown["count"]) == ("reason 5", 1)
    assert shown["seconds_ago"] == MAX_REFUSALS


async def test_a_pair_that_stays_broken_is_tried_less_and_less(registry, clock):
    links, waits = registry.links, []
    for _ in range(8):
        links.failed("p0", "d0", "no route")
        links.failed("p0", "d0", "no route")  # of a request that was under way, too
        started = clock.time
        while not links.allows("p0", "d0"):
            clock.time += 0.25
        waits.append(clock.time - started)
        links.begun("p0", "d0")
        assert not links.allows("p0", "d0"), "one request tries"
        clock.time = max(clock.time, started + 40)
    assert waits[0] <= 1.5 and waits[2] > 2 and max(waits) <= 38
    links.succeeded("p0", "d0")
    assert links.allows("p0", "d0")


async def test_a_burst_is_spread_by_its_tokens(registry):
    """Load counts from the moment a node is chosen, not when it has begun."""
    add_all(registry, "p0 p1 p2 p3 d0 d1 d2 d3")
    placement = selector(registry)
    with ExitStack() as burst:
        for number in range(64):
            run = a_run(num_tokens=100 if number % 8 else 1000)
            decode, _ = await placement.decode(run.placement)
            burst.enter_context(InFlightLoad(registry, decode))
            prefill = await placement.prefill(run.placement, decode)
            burst.enter_context(InFlightLoad(registry, prefill, run.num_tokens))
        loads = {node.info.node_id: node.prefill_tokens for node in registry.nodes()}
        assert all(3000 <= loads[f"p{number}"] <= 4200 for number in range(4)), loads
        assert {node.in_flight for node in usable(registry, pb.ROLE_DECODE)} == {16}
    assert {(node.in_flight, node.prefill_tokens) for node in registry.nodes()} == {(0, 0)}


async def test_errors_that_blame_others_are_not_a_node_s_own(registry):
    (node,) = add_all(registry, "p0")
    for error in (
        NodeError("gone", code="PEER_LOST", blame=Blame.DECODE),
        TransferError("gone", code="PEER_LOST", blame=Blame.PREFILL),
        TransferError("late", code="LEASE_EXPIRED"),
    ):
        for _ in range(3):
            with pytest.raises(NodeError), InFlightLoad(registry, node):
                raise error
    assert usable(registry, pb.ROLE_PREFILL) == [node]


async def test_a_node_that_sends_heartbeats_and_does_not_answer_is_not_used(registry, clock):
    (node,) = add_all(registry, "d0")
    registry.unanswered(node, "late", refused=False)
    assert usable(registry, pb.ROLE_DECODE) == [node], "not before the time-out of heartbeats"
    told = []
    node.on_lost.add(told.append)
    clock.time += 5.1
    registry.heartbeat("d0", pb.NodeLoad(healthy=True))
    registry.unanswered(node, "no route", refused=False)
    registry.heartbeat("d0", pb.NodeLoad(healthy=True))
    assert usable(registry, pb.ROLE_DECODE) == []
    assert [error.code for error in told] == ["PEER_SILENT"]
    assert list(ClusterView(registry).unusable_reasons(pb.ROLE_DECODE)) == [
        "d0: it cannot be reached: no route"
    ]
    assert ClusterView(registry).describe()["nodes"][0]["reason"] == "no route"
    registry.answered(node)
    assert usable(registry, pb.ROLE_DECODE) == [node]
    registry.unanswered(node, "no such name", refused=True)
    assert usable(registry, pb.ROLE_DECODE) == []


WANTED = PolicyRequest("decode", 9, 0.0)


def least_load(nodes):
    return LeastLoad().choose(WANTED, nodes)


async def test_round_robin_takes_turns_and_least_load_the_least_loaded(registry):
    for i, tokens in enumerate((5, 0, 9)):
        add(registry, f"d{i}", waiting_tokens=tokens)
    nodes, policy = registry.nodes(), RoundRobin()

    def turn(able):
        node = policy.choose(WANTED, able)
        policy.placed(WANTED, node)
        return node

    able = candidates(registry, pb.ROLE_DECODE)
    assert ids(turn(able) for _ in range(4)) == ["d0", "d1", "d2", "d0"]
    assert least_load(able).id == "d1"
    alter(registry, nodes[1], in_flight=1)
    assert least_load(able).id == "d0"
    registry.deregister("d1")
    assert ids(turn(able) for _ in range(2)) == ["d2", "d0"], "it goes on behind the last one"


async def test_least_load_is_that_of_a_replica(registry):
    add(registry, "d0", waiting_tokens=6, free_blocks=20, most_free_blocks=11, replicas=2)
    add(registry, "d1", waiting_tokens=3, free_blocks=12, most_free_blocks=12)
    nodes, able = registry.nodes(), candidates(registry, pb.ROLE_DECODE)
    assert least_load(able).id == "d1", "a job finds 12 blocks there, and here 11"
    registry.heartbeat("d0", pb.NodeLoad(waiting_tokens=5, most_free_blocks=11, healthy=True))
    assert least_load(able).id == "d0"
    alter(registry, nodes[0], in_flight=3)
    alter(registry, nodes[1], in_flight=1)
    assert least_load(able).id == "d1"
    alter(registry, nodes[1], in_flight=2)
    assert least_load(able).id == "d0"


async def test_requests_of_other_routers_count_as_load(registry):
    """By the node's report: its requests and prompt tokens count as this router's own do."""
    for i, (others, tokens) in enumerate(((3, 0), (2, 0), (1, 50))):
        add(registry, f"d{i}", running=3, others=others, others_tokens=tokens, routers=2)
    nodes, able = registry.nodes(), candidates(registry, pb.ROLE_DECODE)
    assert least_load(able).id == "d1"
    alter(registry, nodes[1], in_flight=2)
    assert least_load(able).id == "d0"
    alter(registry, nodes[0], prefill_tokens=51)
    alter(registry, nodes[1], prefill_tokens=51)
    assert least_load(able).id == "d2"
    assert ClusterView(registry).placed_by_others() == (6, 2)


def test_the_breaker_opens_after_failures_in_a_row_and_allows_one_trial(clock):
    breaker = CircuitBreaker(max_failures=2, cooldown=3, now=clock)
    earlier = breaker.begun()
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows() and breaker.state is BreakerState.OPEN
    clock.time += 3
    assert breaker.allows()
    trial = breaker.begun()
    assert not breaker.allows() and breaker.state is BreakerState.HALF_OPEN
    breaker.undecided(earlier)
    assert not breaker.allows(), "the trial is still under way"
    breaker.undecided(trial)
    assert breaker.allows()
    breaker.begun()
    breaker.failed()
    assert not breaker.allows()
    clock.time += 3
    breaker.begun()
    breaker.succeeded()
    assert breaker.allows() and breaker.state is BreakerState.CLOSED


async def test_channels_to_nodes_that_left_are_dropped_once_they_have_no_request(registry, clock):
    channels = Channels()
    assert channels, "there are none yet, and may be used"
    for round in range(20):  # nodes come and go; one of them still answers a request
        names = [f"{round}-{i}" for i in range(5)]
        for name in names:
            add(registry, name)
            channels.get(f"{name}:1")
        if round == 0:
            using = InFlightLoad(registry, usable(registry, pb.ROLE_DECODE)[0])
            using.__enter__()
        for name in names[:4]:
            registry.deregister(name)
        await channels.keep(addresses(registry))
        assert len(channels.addresses) == round + 2  # those that stay, and the one at work
    using.__exit__(None, None, None)
    await channels.keep(addresses(registry))
    assert len(channels.addresses) == 20
    clock.time += 10**6  # silent for long: forgotten
    registry.sweep()
    await channels.keep(addresses(registry))
    assert len(channels.addresses) == 0
