"""Placement policies: what they choose, what the kit says of them, and that none, however bad,
leaves a request without a node."""

from __future__ import annotations

import logging
import random
import re
from functools import partial
from typing import Any

import pytest

from clock import Clock
from paths import ROOT
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.block_hash import hash_blocks, short_hash
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.cost import Cost, Sessions
from pdserve.router.cluster.placement import NodeSelector, load_policies
from pdserve.router.cluster.policies import (
    BUILT_IN,
    LeastLoad,
    PowerOfTwo,
    PrefixAware,
    load_policy,
)
from pdserve.router.cluster.policy import NOT_MEASURED, Policy, PolicyRequest, Rates
from pdserve.router.cluster.registry import Registry
from pdserve.router.kit import checks
from pdserve.router.kit.__main__ import main as kit_main
from pdserve.router.kit.checks import check_policy
from pdserve.router.kit.nodes import PlainNode, PlainNodes
from pdserve.router.requests.generation import GenerationRequest
from pdserve.router.requests.request_state import RequestState
from thinned import only


def nodes(*loads: int) -> list[PlainNode]:
    """Nodes with so many tokens to prefill."""
    made = [PlainNode(f"n{i}") for i in range(len(loads))]
    for node, load in zip(made, loads, strict=True):
        node.num_prefill_tokens = load
    return made


def wants(tokens, cached=None, role="prefill", now=0.0) -> PolicyRequest:
    return PolicyRequest(role, tokens, now, lambda: cached or {})


def choose(policy, request, among) -> str:
    node = policy.choose(request, PlainNodes(among))
    policy.placed(request, node)
    return node.id


# ---- prefix-aware ----


def test_a_prompt_goes_where_the_least_is_left_to_do() -> None:
    some = nodes(0, 0, 0)
    assert choose(PrefixAware(), wants(1000, {some[1]: 600}), some) == "n1"
    assert choose(PrefixAware(), wants(1000, {some[1]: 600, some[2]: 700}), some) == "n2"
    # A queue is worth a tenth of its tokens.
    some = nodes(0, 5900, 0)
    assert choose(PrefixAware(), wants(1000, {some[1]: 600}), some) == "n1"
    some = nodes(0, 6100, 0)
    assert choose(PrefixAware(), wants(1000, {some[1]: 600}), some) == "n0"
    some[1].replicas = 2
    assert choose(PrefixAware(), wants(1000, {some[1]: 600}), some) == "n1"


def test_replicas_share_a_queue_and_not_the_prompt() -> None:
    """One of them computes it."""
    some = nodes(0, 0)
    some[0].replicas = 8
    assert choose(PrefixAware(), wants(1000, {some[1]: 600}), some) == "n1"


def test_new_prompts_spread_over_nodes_without_queues() -> None:
    some, policy = nodes(0, 0, 0, 0), PrefixAware()
    chosen = [choose(policy, wants(1000, now=turn / 100), some) for turn in range(40)]
    assert [chosen.count(node.id) for node in some] == [10] * 4


def test_a_hot_prefix_is_taken_to_a_second_node_and_what_was_given_fades() -> None:
    some, policy = nodes(0, 0), PrefixAware()
    cached = {some[0]: 900}
    chosen = [choose(policy, wants(1000, cached, now=turn / 100), some) for turn in range(300)]
    assert set(chosen[:100]) == {"n0"} and "n1" in chosen
    assert choose(policy, wants(1000, cached, now=1000.0), some) == "n0"


@pytest.mark.parametrize("role", ["decode", "both"])
def test_where_tokens_are_generated_requests_count_first(role: str) -> None:
    some = nodes(0, 0, 0)
    for node, count in zip(some, (8, 11, 12), strict=True):
        node.num_requests = count
    assert choose(PrefixAware(), wants(1000, {some[1]: 900}, role), some) == "n1"
    assert choose(PrefixAware(), wants(1000, {some[2]: 900}, role), some) == "n0"
    assert choose(PrefixAware(), wants(1000, {some[2]: 900}), some) == "n2", "a prefill node"


def test_of_hundreds_of_nodes_some_are_looked_at_and_all_in_turn() -> None:
    some, policy = nodes(*[0] * 300), PrefixAware()
    chosen = [choose(policy, wants(1000, now=turn / 100), some) for turn in range(900)]
    assert len(set(chosen)) > 250
    assert choose(policy, wants(10**6, {some[250]: 900_000}), some) == "n250"


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    some, policy = nodes(5, 0, 9), PowerOfTwo(random.Random(0))
    chosen = [choose(policy, wants(9), some) for _ in range(300)]
    assert chosen.count("n1") == pytest.approx(200, abs=40) and "n2" not in chosen
    assert choose(policy, wants(9), some[:1]) == "n0"
    assert policy.choose(wants(9), PlainNodes([])) is None


# ---- cost ----

RATES = Rates(prefill=1e-3, step=0.02, sequence=1e-3, transfer=1e-5)


def measured(*loads: int, rates: Rates = RATES) -> list[PlainNode]:
    found = nodes(*loads)
    for node in found:
        node.rates = rates
    return found


def in_hand(node: PlainNode, *prompts: int) -> None:
    """The node has yet to compute these, of the same router."""
    node.prompts, node.num_prefill_tokens = prompts, sum(prompts)


def test_a_prompt_costs_what_is_queued_and_what_is_not_cached() -> None:
    some = measured(0, 0, 0)
    cached = {some[1]: 600}
    in_hand(some[1], 150)
    assert choose(Cost(), wants(1000, cached), some) == "n1"
    in_hand(some[1], 300)
    assert choose(Cost(), wants(1000, cached), some) in ("n0", "n2")
    some[1].replicas = 2
    assert choose(Cost(), wants(1000, cached), some) == "n1"


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("rates", [NOT_MEASURED, RATES])
def test_where_nothing_is_cached_load_decides_also_before_anything_is_measured(
    role: str, rates: Rates
) -> None:
    chance = random.Random(0)
    for _ in range(50):
        some = measured(0, 0, 0, 0, 0, rates=rates)
        for node in some:
            node.num_requests = chance.randrange(4)
            in_hand(node, *[500] * node.num_requests)
        least = choose(LeastLoad(), wants(500, role=role), some)
        assert choose(Cost(), wants(500, role=role), some) == least


def test_a_short_prompt_passes_a_long_one_and_waits_for_many() -> None:
    some = measured(0, 0)
    in_hand(some[0], 100_000)
    in_hand(some[1], 200, 200)
    assert choose(Cost(), wants(100), some) == "n0"
    in_hand(some[1], 5000)
    assert choose(Cost(), wants(10_000), some) == "n1", "as long as both"


def test_prompts_of_other_routers_count_as_those_of_this_one() -> None:
    some, policy = measured(0, 0), Cost()
    for node in some:
        policy.placed(wants(1000), node)
    in_hand(some[0], 1000, 1000)
    some[1].num_prefill_tokens = 3000
    assert choose(policy, wants(1000), some) == "n0"
    in_hand(some[0], 1000, 1000, 1000, 1000)
    assert choose(policy, wants(1000), some) == "n1"


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
@pytest.mark.parametrize("rate", [5e-324, 1e-12, 3599.0])
def test_no_node_gets_or_loses_all_by_its_word(role: str, rate: float) -> None:
    some, policy = measured(0, 0, 0), Cost()
    some[1].rates = Rates(rate, rate, rate, rate)
    for turn in range(600):
        node = some[int(choose(policy, wants(1000, role=role, now=turn / 10), some)[1:])]
        in_hand(node, *node.prompts, 1000)
        node.num_requests += 1
    counts = [each.num_requests for each in some]
    assert min(counts) > 0 and max(counts) < 590, counts


def test_a_node_that_was_slow_is_tried_again() -> None:
    some, policy = measured(0, 0), Cost()
    some[0].rates = RATES._replace(prefill=30e-3)
    chosen = [choose(policy, wants(1000, now=10.0 * turn), some) for turn in range(2100)]
    assert 1 <= chosen.count("n0") <= 3


def test_cost_bears_a_clock_that_jumps() -> None:
    some, policy = measured(0, 0), Cost()
    for now in (0.0, 1e12, -1e12, 5.0):
        assert choose(policy, wants(10**7, now=now), some) in ("n0", "n1")


def test_a_node_that_computes_faster_may_queue_more() -> None:
    some = measured(1500, 900)
    some[0].rates = RATES._replace(prefill=5e-4)
    assert choose(Cost(), wants(1000), some) == "n0"
    some[0].rates = RATES._replace(prefill=7e-4)
    assert choose(Cost(), wants(1000), some) == "n1", "no more than the noise of a measurement"
    some[0].rates = Rates()  # one that has not measured yet is like the others
    assert choose(Cost(), wants(1000), some) == "n1"


def test_work_done_twice_costs_more_on_busy_nodes() -> None:
    some, policy = measured(700, 0), Cost()
    ask = partial(wants, 1000, {some[0]: 600})
    assert choose(policy, ask(), some) == "n1", "idle ones: the wait is longer than what is saved"
    for turn in range(60):
        for node in some:
            policy.placed(wants(800, now=float(turn)), node)
    assert choose(policy, ask(now=60.0), some) == "n0"


def test_cost_deals_out_new_prompts_and_takes_a_hot_one_to_all_nodes() -> None:
    some, policy = measured(0, 0, 0, 0), Cost()
    chosen = [choose(policy, wants(1000, now=turn / 100), some) for turn in range(40)]
    assert [chosen.count(node.id) for node in some] == [10] * 4
    some, policy = measured(0, 0), Cost()
    cached = {some[0]: 900}
    chosen = []
    for turn in range(30):  # at once: what is placed queues
        chosen.append(choose(policy, wants(1000, cached, now=turn / 1000), some))
        some[int(chosen[-1][1:])].num_prefill_tokens += 100 if chosen[-1] == "n0" else 1000
    assert 1 <= chosen.count("n1") <= 5


def test_an_answer_slows_down_those_that_run() -> None:
    some = measured(0, 0)
    some[0].num_requests, some[1].num_requests = 3, 8
    assert choose(Cost(), wants(1000, role="decode"), some) == "n0"
    assert choose(Cost(), wants(10**6, {some[1]: 999_999}, "decode"), some) == "n1", "a transfer"
    some[1].rates = RATES._replace(step=0.002, sequence=1e-4)
    assert choose(Cost(), wants(1000, role="decode"), some) == "n1"
    some[1].num_prefill_tokens = 10_000
    assert choose(Cost(), wants(1000, role="both"), some) == "n0"


def test_a_session_stays_until_the_queue_is_longer_than_what_is_saved() -> None:
    some, policy = measured(0, 0), Cost()
    first = PolicyRequest("prefill", 1000, 0.0, session="s")
    home = choose(policy, first, some)
    again = PolicyRequest("prefill", 1100, 1.0, session="s")
    assert choose(policy, again, some) == home
    assert choose(policy, PolicyRequest("prefill", 1000, 1.0, session="t"), some) != home
    some[int(home[1:])].num_prefill_tokens = 9000
    assert choose(policy, PolicyRequest("prefill", 1200, 2.0, session="s"), some) != home


def test_a_session_holds_only_while_prompts_go_on_from_the_last_one() -> None:
    (node,), sessions = measured(0), Sessions()
    sessions.placed(PolicyRequest("prefill", 90, 0.0, session="s", blocks=lambda: (1, 2)), node)
    for blocks, missing in (((1, 2, 3), 10), ((1, 2), 10), ((1, 5, 3), 100), ((1,), 100)):
        asked = PolicyRequest("prefill", 100, 0.0, session="s", blocks=lambda found=blocks: found)
        assert sessions.missing(asked, [node]) == [missing]


def test_sessions_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sessions, "MOST", 2)
    sessions, (node,) = Sessions(), nodes(0)
    for name in "abc":
        sessions.placed(PolicyRequest("prefill", 100, 0.0, session=name), node)
    asks = [PolicyRequest("prefill", 100, 0.0, session=name) for name in "abc"]
    assert [sessions.missing(each, [node]) for each in asks] == [[100], [1], [1]]


# ---- the kit ----


class Raises(Policy):
    def choose(self, request, nodes):
        raise ValueError("oh")


class Remembers(Policy):
    """Goes on with the first node that it saw."""

    def __init__(self) -> None:
        self.first = None

    def choose(self, request, nodes):
        self.first = self.first or next(nodes.by_load(), None)
        return self.first


class Herds(Policy):
    """Takes the node that has most of the prompt cached."""

    uses_prefixes = True

    def choose(self, request, nodes):
        return max(nodes.by_id(""), key=lambda node: request.cached.get(node, 0), default=None)


class Idle(Policy):
    def choose(self, request, nodes):
        return None


class Dawdles(Policy):
    def choose(self, request, nodes):
        return min(nodes.by_load(), key=lambda node: sum(range(1000)), default=None)


@pytest.mark.parametrize("name", only(BUILT_IN, ["cost"]))
def test_the_kit_passes_what_is_built_in(name: str) -> None:
    make = BUILT_IN[name]
    if make is PowerOfTwo:
        make = partial(PowerOfTwo, random.Random(1))
    assert set(check_policy(make).values()) == {""}


@pytest.mark.parametrize(
    ("policy", "check", "fault"),
    [
        (Raises, "chooses_one_of_the_nodes", "it raised ValueError('oh')"),
        (Idle, "chooses_one_of_the_nodes", "it chose None"),
        (Remembers, "does_not_remember_dead_nodes", "it chose 'node-0', which is gone"),
        (Herds, "does_not_herd_under_one_prompt", "ttft_mean_s is"),
        (Herds, "does_not_herd_in_a_burst", "ttft_mean_s is"),
        (Dawdles, "is_quick", "µs"),
    ],
)
def test_the_kit_catches_what_is_broken(policy, check: str, fault: str) -> None:
    assert fault in check_policy(policy, [getattr(checks, check)])[check]


@pytest.mark.slow
def test_the_kit_passes_the_example_of_the_page() -> None:
    page = (ROOT / "docs" / "placement.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    assert set(check_policy(names["Roomiest"]).values()) == {""}


def test_the_kit_has_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert kit_main(["bad_policies:Absent"]) == 1
    said = capsys.readouterr().out
    assert "ok     bad_policies:Absent: is quick" in said
    assert "FAILED bad_policies:Absent: chooses one of the nodes: it chose" in said
    assert kit_main(["nonsense"]) == 2
    assert "unknown name 'nonsense'; choose one of:" in capsys.readouterr().err


# ---- what the router makes of a policy ----


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nonsense", "choose one of: cost, least-load, power-of-two, prefix-aware, round-robin"),
        ("least-laod", "did you mean least-load?"),
        ("json:loads", "not a subclass of"),
        ("json:Loads", "has no attribute"),
        ("no.such:Thing", "cannot import"),
        ("bad_policies:NeedsMore", "cannot be made: TypeError"),
    ],
)
def test_a_policy_that_is_none_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_policies(RoutingConfig(prefill_policy=name))
    assert refused.value.message.startswith("--prefill-policy") and said in refused.value.message


def test_options_name_what_there_is() -> None:
    assert all(isinstance(load_policy(name, "--flag"), kind) for name, kind in BUILT_IN.items())
    assert {type(each) for each in load_policies(RoutingConfig()).values()} == {Cost}


TOKENS = tuple(range(50))


class World:
    """Nodes p0, p1 and d0, and what they have cached."""

    def __init__(self, policy: str) -> None:
        self.registry = Registry(RoutingConfig(), Clock(100.0))
        self.metrics = RouterMetrics()
        for name, role in (
            ("p0", pb.ROLE_PREFILL),
            ("p1", pb.ROLE_PREFILL),
            ("d0", pb.ROLE_DECODE),
        ):
            info = pb.NodeInfo(
                node_id=name, role=role, address=f"{name}:1", fingerprint="f", block_size=4,
                kv_connectors=["tcp"],
            )  # fmt: skip
            self.registry.register(info, pb.NodeLoad(healthy=True))
        self.cached: dict[str, int] = {}
        config = RoutingConfig(prefill_policy=policy, decode_policy="least-load")
        view = ClusterView(self.registry)
        policies = load_policies(config)
        self.selector = NodeSelector(config, view, policies, self.match, self.metrics)

    def match(self, blocks):
        size = next(iter(self.registry.nodes())).info.block_size
        assert [blocks(size)[i] for i in range(12)] == [
            short_hash(each) for each in hash_blocks(TOKENS, size)
        ]
        return {n: self.cached[n.id] for n in self.registry.nodes() if n.id in self.cached}

    def run(self) -> RequestState:
        sampling = SamplingParams(max_tokens=4)
        request = GenerationRequest("r", TOKENS, sampling, skip_special_tokens=False)
        return RequestState(request, lambda update: None, None, RoutingConfig(queue_timeout=0))

    async def place(self) -> tuple[str, int]:
        """The prefill node, and the tokens that it counts as loaded with."""
        run = self.run()
        decode, _ = await self.selector.decode(run.placement)
        node = await self.selector.prefill(run.placement, decode)
        assert node is not None
        return node.id, self.selector.missing(run.placement, node)

    def count(self, name: str, role: str = "prefill") -> float:
        value = self.metrics.registry.get_sample_value(f"pdserve_{name}_total", {"role": role})
        return value or 0.0


async def test_a_prefix_is_found_and_only_the_rest_counts_as_load() -> None:
    world = World("prefix-aware")
    assert (await world.place())[1] == 50
    world.cached = {"p1": 7, "d0": 12}
    assert await world.place() == ("p1", 50 - 28)
    world.cached = {"p0": 12}
    assert await world.place() == ("p0", 2)
    assert world.count("prefix_index_queries") == 150
    assert world.count("prefix_index_hits") == 28 + 48
    assert world.count("prefix_index_queries", "decode") == 0


async def test_a_policy_without_prefixes_does_not_look_them_up() -> None:
    world = World("least-load")
    world.cached = {"p1": 7}
    world.match = None  # type: ignore[assignment]
    assert await world.place() == ("p0", 50)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("Raises", "it raised RuntimeError"),
        ("Exits", "it raised SystemExit(3)"),
        ("Unspeakable", "it raised Nameless"),
        ("Forgets", "it raised AttributeError"),
        ("Absent", "it chose absent, which does not fit"),
        ("Dead", "it chose p0, which does not fit"),
        ("Wordy", "it chose p0, which does not fit"),
    ],
)
async def test_whatever_a_policy_does_load_decides(
    policy: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(f"bad_policies:{policy}")
    caplog.set_level(logging.WARNING)
    if policy == "Dead":
        assert (await world.place())[0] == "p0"
        next(node for node in world.registry.nodes() if node.id == "p0").lost = True
        world.registry.heartbeat("p1", pb.NodeLoad(healthy=True))
        world.registry.kinds.changed(world.registry.nodes()[0])
        assert (await world.place())[0] == "p1"
    else:
        assert (await world.place())[0] == "p0"
    assert f"load decides: {why}" in caplog.text
    assert world.count("placement_policy_failures") >= 1


async def test_a_policy_that_holds_the_event_loop_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World("bad_policies:Sleeps")
    assert (await world.place())[0] == "p0"
    took = re.search(r"the policy for prefill nodes took (\d+) ms", caplog.text)
    assert took is not None and int(took[1]) >= 100
    assert world.count("placement_policy_failures") == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e300, float("inf"), float("nan")])
async def test_a_rate_that_cannot_be_counts_as_not_measured(rate: float) -> None:
    world = World("cost")
    told = pb.NodeLoad(healthy=True, rates=pb.Rates(prefill=rate, step=0.02, transfer=1e-6))
    world.registry.heartbeat("p0", told)
    node = next(each for each in world.registry.nodes() if each.id == "p0")
    assert node.rates == (Rates(step=0.02, transfer=1e-6) if rate == 0 else NOT_MEASURED)
    assert {(await world.place())[0] for _ in range(8)} == {"p0", "p1"}
    assert world.count("placement_policy_failures") == 0
