"""Nodes are killed, frozen and restarted under many requests at a time: every one of them gets the
answer that it gets from a cluster left alone."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import grpc
import pytest

import reference
from benchmarks.access import HOSTILE as HOSTILE_CLIENT
from benchmarks.access import LOAD
from benchmarks.chaos import NODE_OPTIONS, Soak, run
from benchmarks.soak.asks import POISON
from benchmarks.soak.client import Answer, difference
from benchmarks.soak.faults import NODE_KINDS, ROLES, make_plan
from benchmarks.soak.load import Tally, clients
from benchmarks.soak.poisoned import poisoned
from benchmarks.soak.report import Report, make_report
from cluster import MODELS
from pdserve.common.config.router import RoutingConfig
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from pdserve.router.grpc.door import INFERENCE, max_streams
from thinned import thinned
from warm import WarmCluster, slowness

SOAK = Soak(
    seconds=2.5,
    requests=40,
    distinct=21,  # each way with each style
    max_tokens=(6, 24),
    kinds=tuple(NODE_KINDS),
    period=0.5,
    longest=2.0,  # some freezes are noticed
)
SEEDS = (2290, 1784)  # every kind of fault and every target comes in their plans
ALL = {*NODE_KINDS}, {*ROLES, "both"}  # kinds and targets of faults
VOCAB_SIZE = 512
FEW_BLOCKS = 192  # of a node: sequences wait, some restart


def paced(soak: Soak) -> Soak:
    """Has as many requests at a time as a slow machine answers before one counts as hung."""
    return replace(soak, requests=round(soak.requests / slowness()))


class Soaked:
    """A cluster with two nodes of each role, and of both; the answers that it gives when it is left
    alone; and what became of it."""

    def __init__(self, cluster: WarmCluster) -> None:
        self.cluster = cluster
        self.expected = asyncio.run(self._learn())
        self.reports: list[Report] = []

    async def _learn(self) -> list[list[Answer]]:
        async with clients(self.cluster, SOAK.asks(VOCAB_SIZE)) as load:
            await load.learn()
            return load.expected

    async def _run(self, soak: Soak) -> Report:
        async with clients(self.cluster, SOAK.asks(VOCAB_SIZE)) as load:
            load.expected = self.expected
            return await run(self.cluster, soak, load)

    def run(self, seed: int) -> None:
        soak = paced(replace(SOAK, seed=seed))
        report = asyncio.run(self._run(soak))
        assert not any(report.failures.values()), f"{report}\n{self.cluster.log()[-6000:]}"
        assert report.completed > soak.requests / 2  # the others were hung up
        self.reports.append(report)

    def struck(self) -> tuple[set[str], set[str]]:
        """Kinds and targets of the faults that came."""
        names = [name.split() for report in self.reports for name in report.faults]
        return {kind for kind, _ in names}, {target for _, target in names}

    def moved(self) -> bool:
        return any(report.migrations for report in self.reports)


@pytest.fixture(scope="module")
def soaked() -> Iterator[Soaked]:
    options = {**NODE_OPTIONS, "hasty": True, "num_gpu_blocks_override": FEW_BLOCKS}
    router = {"breaker_cooldown": 0.5}  # the load goes on until all are used again
    with WarmCluster("llama-gqa", 2, 2, router=router, **options) as cluster:
        for _ in range(2):
            cluster.start_node("both")
        cluster.wait_nodes()
        yield Soaked(cluster)


def test_a_cluster_left_alone_says_what_transformers_says(soaked: Soaked) -> None:
    asks = SOAK.asks(VOCAB_SIZE)
    known = [each for each in zip(asks, soaked.expected, strict=True) if each[0].greedy]
    for ask, (answer,) in known[:8]:
        tokens = reference.greedy(soaked.cluster.model, ask.prompt, ask.options["max_tokens"])
        assert answer.choices[0].text == reference.decode(soaked.cluster.model, tokens)


@pytest.mark.parametrize("seed", thinned(SEEDS, 2))
def test_nothing_is_lost_wrong_or_leaked(soaked: Soaked, seed: int) -> None:
    soaked.run(seed)


def test_every_fault_came_and_requests_were_moved(soaked: Soaked) -> None:
    """A starved machine has few in flight: what was to be struck may have been idle, or not there.
    Then there is more of it."""
    for seed in (*SEEDS, *SEEDS):
        if soaked.struck() == ALL and soaked.moved():
            break
        soaked.run(seed)
    assert soaked.struck() == ALL and soaked.moved(), soaked.reports
    assert json.loads(json.dumps(soaked.reports[0].as_json()))["num_lost"] == 0


# ---- clients and strangers that mean no good, beside a load that must not notice ----

HOSTILE = Soak(
    seconds=2.0,
    requests=16,
    distinct=21,
    max_tokens=(6, 24),
    kinds=(
        "router-stop",
        "silent",
        "hang-up",
        "poison",
        "stranger",
        "bomb",
        "odd",
        "foreign",
        "hog",
        "refused",
        "liar",
    ),
    period=0.07,
    longest=1.0,
    seed=3,  # each kind comes twice, at least
)


async def attacked(cluster: WarmCluster) -> Report:
    async with clients(cluster, HOSTILE.asks(VOCAB_SIZE, never=POISON)) as load:
        await load.learn()
        return await run(cluster, paced(HOSTILE), load)


async def crowded(cluster: WarmCluster) -> None:
    """A client of many connections has the calls of one; the others are refused in words. Another
    client's call is answered beside them."""
    most, apart = max_streams(RoutingConfig()), [("grpc.use_local_subchannel_pool", 1)]
    hostile, load = (tuple(cluster.api_key(each).items()) for each in (HOSTILE_CLIENT, LOAD))
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(cluster.grpc, apart))
            for _ in range(61)
        ]
        ask = [channel.stream_stream(f"{INFERENCE}GetModel") for channel in channels]
        calls = [one(metadata=hostile) for one in ask[1:] for _ in range(ceil(1.2 * most / 60))]
        told = [asyncio.create_task(call.read()) for call in calls]
        errors: list[Any] = []
        for each in islice(asyncio.as_completed(told), len(calls) - most):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await each
            errors.append(caught.value)
        assert {error.code() for error in errors} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all("pdserve-retry-after" in dict(error.trailing_metadata()) for error in errors)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.SamplingParams(max_tokens=2)
        )
        stub = pb_grpc.InferenceStub(channels[0])
        assert [each async for each in stub.Generate(request, metadata=load)]
        for call in calls:
            call.cancel()
        await asyncio.gather(*told, return_exceptions=True)


@pytest.mark.slow
def test_hostile_clients_are_not_noticed(tmp_path: Path) -> None:
    model, key = poisoned(MODELS / "llama-gqa", tmp_path / "llama-gqa"), {"cluster_key": "k" * 32}
    router = {**key, "api_key": "the-load,the-hostile,the-probe", "admin_api_key": "an-operator"}
    with WarmCluster(model, 2, 2, router=router, **NODE_OPTIONS, **key) as cluster:
        report = asyncio.run(attacked(cluster))
        assert not any(report.failures.values()), f"{report}\n{cluster.log()[-6000:]}"
        asyncio.run(crowded(cluster))
    assert {name.split()[0] for name in report.faults} == {*HOSTILE.kinds}, report
    assert report.answers.keys() == {*HOSTILE.kinds} - {"router-stop"}, report
    assert report.completed > paced(HOSTILE).requests


# ---- the judge is awake ----


async def bad_luck(cluster: WarmCluster) -> Report:
    """A decode node dies, and its requests do not move to another."""
    soak = Soak(seconds=0.0)
    async with clients(cluster, soak.asks(VOCAB_SIZE)[:21]) as load:
        await load.learn()
        for expected in load.expected[:7]:
            expected[0].completion_tokens += 1

        tally = Tally()

        async def die() -> None:
            async with asyncio.timeout(60):
                while not tally.wrong:
                    await asyncio.sleep(0.01)
                cluster.send("decode-2", signal.SIGKILL)
                while not tally.lost:
                    await asyncio.sleep(0.01)

        await load.during(die(), 30, tally=tally)
    return make_report(tally, 2.0, Counter(), cluster.held(), cluster.crashed())


@pytest.mark.slow
def test_failures_are_counted() -> None:
    # Nothing fails because a node is late.
    routing = {"migration_limit": 0, "queue_timeout": 0.5, "heartbeat_timeout": 30}
    options = NODE_OPTIONS | {"kv_lease": 30}
    with WarmCluster("llama-gqa", router=routing, **options) as cluster:
        report = asyncio.run(bad_luck(cluster))
    assert report.failures["lost"] > 0, report
    assert report.failures["wrong"] > 0 and "usage" in report.wrong[0], report
    assert report.crashed == ["decode-2"]


def answered(text: str = "a", tokens: tuple[int, ...] = (1, 2), logprob: float = -0.5) -> Answer:
    answer = Answer(completion_tokens=len(tokens))
    choice = answer.choices[0]
    choice.text, choice.tokens, choice.logprobs = text, [*tokens], [logprob]
    choice.finish = ("length", None)
    return answer


@pytest.mark.parametrize(
    ("other", "clue"),
    [
        (answered(text="b"), "text of choice 0"),
        (answered(tokens=(1, 2, 2)), "tokens of choice 0"),  # one of them twice
        (answered(logprob=-0.6), "logprobs of choice 0"),
        (Answer(), "choices [] ≠ [0]"),
    ],
)
def test_differences_are_seen(other: Answer, clue: str) -> None:
    assert clue in difference(answered(), other)
    assert difference(answered(), answered(logprob=-0.5001)) == ""


def test_a_plan_is_what_its_seed_makes_it() -> None:
    kinds = {name: NODE_KINDS[name] for name in ("kill", "stop")}
    plan = make_plan(kinds, 100.0, 1.0, 3.0, seed=1)
    assert plan == make_plan(kinds, 100.0, 1.0, 3.0, seed=1)
    assert plan != make_plan(kinds, 100.0, 1.0, 3.0, seed=2)
    assert {(fault.kind, fault.target) for fault in plan} == {
        (kind, role) for kind in kinds for role in ROLES
    }
    assert 70 < len(plan) < 130 and all(fault.at < 100 and fault.seconds <= 3 for fault in plan)
