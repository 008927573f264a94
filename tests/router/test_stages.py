"""A request's stages tile it, and what delays one of them shows in that one alone."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_nodes import FakeCluster, FakeNode, Fault, fails, fake_cluster
from pdserve.common.core.errors import Blame, NodeError, Unavailable
from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import Timeline, TimelineStage
from pdserve.common.obs.logging import request_id_var
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.text.stream import TextStream
from pdserve.router.requests.admission import Ask
from pdserve.router.requests.generation import GenerationStats, TextDelta
from pdserve.router.requests.stages import Phase, RequestArrival, Stages, arrival_var
from pdserve.router.requests.timelines import MAX_FOUND

# Seconds; on a machine so busy that other stages take as long, a longer one stands out.
DELAYS = (0.2,) * 8 + (1.0,) * 4 + (5.0,) * 4
Delayed = Callable[[FakeCluster, float], None]  # the delay in seconds


def check_tiling(line: Timeline) -> Counter[str]:
    """Seconds by stage."""
    seconds: Counter[str] = Counter()
    at = 0.0
    for stage in line.stages:
        assert stage.start == pytest.approx(at, abs=1e-6) and stage.seconds > 0
        at = stage.start + stage.seconds
        seconds[stage.name] += stage.seconds  # type: ignore[assignment]
    assert sum(seconds.values()) == pytest.approx(line.total_seconds, abs=1e-3)
    return seconds


def pause(delay: float) -> Fault:
    return lambda context: asyncio.sleep(delay)


def tells(node: FakeNode, field: str, **values: float) -> None:
    """Changes what the node says of its time in events of this kind."""

    def change(event: Any) -> Iterable[Any]:
        if not isinstance(event, pb.TokenEvent) and event.HasField(field):
            for name, value in values.items():
                setattr(getattr(event, field), name, value)
        return (event,)

    node.tells = change


def slow_slot(cluster: FakeCluster, delay: float) -> None:
    cluster["d0"].on_run = pause(delay)
    tells(cluster["d0"], "reserved", wait_s=delay)


def slow_prefill(*, compute: bool, step: bool) -> Delayed:
    def change(cluster: FakeCluster, delay: float) -> None:
        said = {"queue_s": 0.0, "compute_s": compute * delay, "step_s": step * delay}
        for node in (cluster["p0"], cluster["p1"]):
            node.on_run = pause(delay)
            tells(node, "first_token", **said)

    return change


def slow_transfer(cluster: FakeCluster, delay: float) -> None:
    cluster["d0"].on_landed = pause(delay)
    tells(cluster["d0"], "landed", data_s=1.0 + delay, commit_s=1.0)


def slow_verification(cluster: FakeCluster, delay: float) -> None:
    cluster["d0"].on_landed = pause(delay)
    tells(cluster["d0"], "landed", data_s=1.0, commit_s=1.0, verify_s=delay)


def slow_decode(*shares: float) -> Delayed:
    def change(cluster: FakeCluster, delay: float) -> None:
        cluster["d0"].on_token[3] = pause(delay)
        cluster["d0"].times = (shares[0] * delay, shares[1] * delay, shares[2] * delay)

    return change


def lost_prefill(cluster: FakeCluster, delay: float) -> None:
    async def late(context: Any) -> None:
        cluster["p0"].on_run = cluster["p1"].on_run = None
        await asyncio.sleep(delay)
        raise NodeError("gone", code="RANK_DIED", blame=Blame.PREFILL)

    cluster["p0"].on_run = cluster["p1"].on_run = late


SLOW: dict[str, Delayed] = {
    "decode_slot": slow_slot,
    "prefill_queue": slow_prefill(compute=True, step=False),
    "prefill_compute": slow_prefill(compute=True, step=True),
    "first_token": slow_prefill(compute=False, step=False),
    "kv_transfer": slow_transfer,
    "verification": slow_verification,
    "decode_compute": slow_decode(1.0, 0.0, 1.0),
    "preempted": slow_decode(0.0, 1.0, 1.0),
    "decode_queue": slow_decode(0.0, 0.0, 1.0),
    "detokenize_stream": slow_decode(0.0, 0.0, 0.0),  # on its way
    "migration": lost_prefill,
}


@pytest.mark.parametrize("stage", SLOW)
async def test_a_delay_shows_in_its_stage_alone(tmp_path: Path, stage: str) -> None:
    async def ask(delay: float) -> Counter[str]:
        async with fake_cluster(tmp_path, ("p0", "p1", "d0")) as cluster:
            arrival_var.set(RequestArrival(wants_timeline=True))
            for node in ("p0", "p1"):
                tells(cluster[node], "first_token", queue_s=0.0, compute_s=0.0)
            SLOW[stage](cluster, delay)
            return check_tiling((await cluster.ask()).receipt())

    await alone(stage, ask)


async def alone(stage: str, ask: Callable[[float], Awaitable[Counter[str]]]) -> None:
    """Any other may be long where the machine stands still for a moment, and this one short, but
    not each time."""
    often: Counter[str] | None = None  # which others were long in every answer
    for delay in DELAYS:
        seconds = await ask(delay)
        if seconds.pop(stage, 0.0) < 0.95 * delay:
            continue  # the router heard of what goes before it late
        long = Counter(name for name, took in seconds.items() if took >= delay / 2)
        often = long if often is None else often & long
        if not often:
            return
    raise AssertionError(f"not only {stage}: {often}")


async def test_waiting_for_a_place_is_queue(tmp_path: Path) -> None:
    async def ask(delay: float) -> Counter[str]:
        async with fake_cluster(tmp_path, ("p0", "d0"), max_concurrent_requests=1) as cluster:
            tells(cluster["p0"], "first_token", queue_s=0.0, compute_s=0.0)

            async def hold() -> None:
                async with cluster.pipeline.admission.slot(Ask()):
                    await asyncio.sleep(delay)

            holding = asyncio.create_task(hold())
            await asyncio.sleep(0)
            answer = await cluster.ask()
            await holding
            return check_tiling(answer.receipt())

    await alone("queue", ask)


async def test_a_slow_detokenizer_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push, left = TextStream.push, list[float]()

    def slow(self: TextStream, *args: Any, **options: Any) -> Any:
        time.sleep(left.pop() if left else 0.0)
        return push(self, *args, **options)

    monkeypatch.setattr(TextStream, "push", slow)

    async def ask(delay: float) -> Counter[str]:
        async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
            arrival_var.set(RequestArrival(wants_timeline=True))
            tells(cluster["p0"], "first_token", queue_s=0.0, compute_s=0.0)
            left[:] = [delay]
            return check_tiling((await cluster.ask()).receipt())

    await alone("detokenize_stream", ask)


async def test_before_it_is_a_request_it_is_read_and_tokenized() -> None:
    arrival = RequestArrival()
    arrival.received -= 5.0
    arrival.read = arrival.received + 3.0
    stages = Stages(arrival)
    line = stages.stages(stages.start + 6.0)
    assert [(each.name, round(each.seconds)) for each in line] == [
        ("receive", 3.0),
        ("tokenize", 2.0),
        ("queue", 1.0),
    ]


def test_reported_stages_never_exceed_their_phase() -> None:
    stages = Stages()
    stages.enter(Phase.PREFILL, "p")
    stages.told(Phase.PREFILL, prefill_queue=-1.0, prefill_compute=float(10**9))
    (end,) = (stages.spans[-1].start + 2.0,)
    assert TimelineStage("prefill_compute", "p", pytest.approx(0, abs=0.1), pytest.approx(2.0)) in (
        stages.stages(end)
    )


async def test_decoding_is_one_stage_unless_the_client_asks_for_its_times(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        line = (await cluster.ask()).receipt()
    assert [each.name for each in line.stages if each.node == "d0"][-1] == "decode"


async def test_the_receipt_travels_over_grpc(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        line = (await cluster.ask()).receipt()
        sent = convert.timeline_to_pb(line)
    assert [each.name for each in sent.stages] == [each.name for each in line.stages]
    assert sent.total_seconds == line.total_seconds


async def test_the_last_ones_are_kept_and_how_they_ended(tmp_path: Path) -> None:
    options = {"kept_timelines": 3, "queue_timeout": 2.0}
    async with fake_cluster(tmp_path, ("p0", "d0"), **options) as cluster:
        timelines = cluster.pipeline.timelines
        for _ in range(4):
            await cluster.ask()
        assert timelines.find("r1") == [] and timelines.find("r") == []
        (kept,) = timelines.find("r2")
        assert (kept["status"], kept["completion_tokens"]) == ("finished", 8)
        cluster["d0"].on_run = fails(NodeError("no", blame=Blame.DECODE))
        with pytest.raises(Unavailable):
            await cluster.ask()
        (failed,) = timelines.find("r5")
        assert (failed["status"], failed["error"]["code"]) == ("failed", "NO_NODE")
        assert timelines.find("r2") == []
        newest, *older = timelines.recent(2)
        assert (newest["id"], newest["status"], newest["nodes"]) == ("r5", "failed", ["d0"])
        assert [each["id"] for each in older] == ["r4"]
        assert older[0]["nodes"] == ["d0", "p0"] and older[0]["completion_tokens"] == 8
        assert 0 < older[0]["first_token"] <= older[0]["seconds"]
        assert abs(time.time() - older[0]["created"]) < 60


async def test_of_an_id_that_is_used_again_the_newest_are_found(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        token = request_id_var.set("mine")
        for _ in range(MAX_FOUND + 2):
            await cluster.ask(max_tokens=1)
        request_id_var.reset(token)
        found = cluster.pipeline.timelines.find("mine")
    assert [each["id"] for each in found] == [f"r{3 + each}" for each in range(MAX_FOUND)]


async def test_cached_tokens_of_a_local_prefill_are_reported(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("d0",), local_prefill_threshold=100) as cluster:
        stats = await cluster.ask(max_tokens=1)
        assert (stats.cached_tokens, stats.timeline.prefill_seconds) == (3, 0.5)
        assert cluster["d0"].local_prefills == 1


async def silent(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The node works, and says nothing of it."""
    async for _ in events:
        pass
    await asyncio.Event().wait()
    yield


async def test_all_of_the_prompt_comes_with_its_kv_if_the_prefill_node_says_nothing(
    tmp_path: Path,
) -> None:
    """It has handed the KV over and froze: the answer is whole, and waits for no more."""
    async with fake_cluster(tmp_path, ("p0", "d0"), request_timeout=60.0) as cluster:
        cluster["p0"]._told = silent  # type: ignore[method-assign]
        async with asyncio.timeout(30):
            stats = await cluster.ask(max_tokens=2)
        assert (stats.cached_tokens, stats.timeline.prefill_seconds) == (3, 0.5)
        assert stats.timeline.migrations == 0


async def test_a_prompts_logprobs_come_with_its_kv_if_the_prefill_node_says_nothing(
    tmp_path: Path,
) -> None:
    """They are the first that the client gets, and the tokens wait for no other node."""
    async with fake_cluster(tmp_path, ("p0", "d0"), request_timeout=60.0) as cluster:
        cluster["p0"]._told = silent  # type: ignore[method-assign]
        numbers = array("f", [-1.0] * 4).tobytes(), array("I", [1] * 4).tobytes()
        cluster["p0"].prompt_logprobs = pb.PromptLogprobs(logprobs=numbers[0], ranks=numbers[1])
        request = cluster.request(num_prompt=5, max_tokens=3)
        sampling = replace(request.sampling, prompt_logprobs=0)
        async with asyncio.timeout(30):
            generation = cluster.updates(replace(request, sampling=sampling))
            first, *updates = [update async for update in generation]
        assert isinstance(first, PromptLogprobs) and first.logprobs == numbers[0]
        *deltas, stats = updates
        assert len(deltas) == 3 and all(isinstance(each, TextDelta) for each in deltas)
        assert isinstance(stats, GenerationStats) and stats.timeline.migrations == 0


async def test_repeated_stages_of_a_prefill_node_count_once(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        line = (await cluster.ask()).timeline
        assert (line.prefill_queue_seconds, line.prefill_seconds) == (0.25, 0.5)
        (node,) = (each for each in cluster.registry.nodes() if each.id == "p0")
        assert (node.prompt_tokens, node.cached_tokens) == (5, 3)
