"""One request through the router, whatever its nodes say or fail to say: it ends, its place and
its nodes are free, and who failed is who is blamed."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest

from fake_nodes import (
    FakeCluster,
    dies,
    fails,
    fake_cluster,
    hangs,
    once,
    says,
    stand_still,
    token_at,
)
from pdserve.common.core.errors import (
    Blame,
    Cancelled,
    DeadlineExceeded,
    Gone,
    InvalidRequest,
    NodeError,
    PdserveError,
    TransferError,
    Unavailable,
)
from pdserve.common.core.request import Timeline
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2
from pdserve.common.rpc.status import REQUEST_ID_KEY
from pdserve.router.cluster import probes
from pdserve.router.cluster.adapters import Adapter
from pdserve.router.cluster.health import LINK_COOLDOWN, STANDSTILL, BreakerState
from pdserve.router.requests import generation
from pdserve.router.requests.attempt import Attempt
from pdserve.router.requests.generation import (
    MAX_BEGUN,
    MAX_BURST,
    GenerationRequest,
    GenerationStats,
    Past,
    Put,
    TextDelta,
    generate,
)
from waiting import eventually

PARTED = NodeError("no route", code="PEER_LOST", blame=Blame.DECODE)


def lost(role: Blame) -> NodeError:
    return NodeError("gone", code="RANK_DIED", blame=role)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        yield cluster


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(tmp_path, ("p0", "p1", "d0", "d1")) as cluster:
        yield cluster


async def ends(cluster: FakeCluster, kind: type[PdserveError] = PdserveError) -> PdserveError:
    """The error of a request that must end soon."""
    with pytest.raises(kind) as caught:
        async with asyncio.timeout(60):
            await cluster.ask()
    await cluster.settled()
    return caught.value


async def finish(cluster: FakeCluster, request: GenerationRequest) -> None:
    async for _ in cluster.updates(request):
        pass


async def finish_all(cluster: FakeCluster, requests: Sequence[GenerationRequest]) -> None:
    async for _ in cluster.updates(*requests):
        pass


def breakers(cluster: FakeCluster) -> set[BreakerState]:
    return {node.breaker.state for node in cluster.registry.nodes()}


# ---- a router that stood still blames no node ----


async def stood_still_and_lost(context: Any) -> None:
    """So it is after a SIGSTOP, or a step of the loop that took long: connections are gone."""
    stand_still(STANDSTILL + 0.2)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "ping timeout")


@pytest.mark.parametrize("where", ["p0", "d0", "retarget"])
async def test_a_loop_that_stood_still_blames_no_node(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However many calls end with it, no breaker opens and no request is near its end."""
    options: dict[str, Any] = {"breaker_failures": 1, "migration_limit": 0}
    async with fake_cluster(tmp_path, ("p0", "d0"), **options) as cluster:
        cluster.count_standstills()
        await asyncio.sleep(0)  # its clock runs
        if where == "retarget":
            cluster["p0"].on_run = once(fails(PARTED))
            cluster["d0"].on_retarget = once(stood_still_and_lost)
        else:
            cluster[where].on_token[1] = once(stood_still_and_lost)
        async with asyncio.timeout(60):
            stats = await cluster.ask()
        assert stats.timeline.migrations > 0 and "ROUTER_STOOD_STILL" in caplog.text
        assert breakers(cluster) == {BreakerState.CLOSED}
        assert not any(node.breaker.trips or node.lost for node in cluster.registry.nodes())


async def test_a_node_that_does_not_answer_a_router_that_stood_still_is_asked_again(
    tmp_path: Path,
) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        cluster.count_standstills()
        await asyncio.sleep(0)
        stand_still(STANDSTILL + 0.2)
        for node in cluster.registry.nodes():
            cluster.registry.unanswered(node, "ping timeout", refused=True)
        assert not any(node.unreachable for node in cluster.registry.nodes())
        await cluster.ask()


# ---- every path ends ----


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_an_error_of_a_grammar_names_the_client_s_field(tmp_path: Path, name: str) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        cluster[name].on_run = fails(InvalidRequest("its grammar has failed: too complex"))
        with pytest.raises(InvalidRequest, match="too complex") as caught:
            await finish(cluster, replace(cluster.request(), constraint="guided_json"))
        assert caught.value.param == "guided_json"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_without_the_adapter_is_sound(four: FakeCluster, role: str) -> None:
    """It was told by another router to drop it, and gets no such request until it is told again."""
    for node in four.registry.nodes():
        node.adapters = frozenset({"d", "e"})
    error = NodeError("it is not loaded", code="ADAPTER_NOT_LOADED", blame=Blame(role))
    names = [f"{role[0]}0", f"{role[0]}1"]
    for name in names:
        four[name].on_run = fails(error)
    request = replace(four.request(), adapter=Adapter("a", "/a", "d"))
    asking = asyncio.create_task(finish(four, request))
    while any("d" in node.adapters for node in four.registry.nodes() if node.id in names):
        await asyncio.sleep(0.001)
    assert breakers(four) == {BreakerState.CLOSED} and not asking.done()
    four[names[0]].on_run = None
    (told,) = (node for node in four.registry.nodes() if node.id == names[0])
    assert told.adapters == {"e"}
    told.adapters = frozenset({"d"})
    four.registry.notify()
    await asking
    assert len(four[names[0]].jobs) == 2 and len(four[names[1]].jobs) == 1


async def test_a_request_is_served(four: FakeCluster) -> None:
    stats = await four.ask()
    assert stats.timeline.migrations == 0 and stats.completion_tokens == 8
    one_token = await four.ask(max_tokens=1)
    assert one_token.completion_tokens == 1 and one_token.timeline.migrations == 0


async def test_long_prompts_of_one_body_do_not_hold_the_event_loop_together(
    four: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 prompts of 32,000 tokens, all ready in one turn, held it for 0.4 s."""
    turns = [0]  # jobs written in each turn of the loop
    write = convert.job_to_pb

    def counted(job: Any) -> pb.Job:
        turns[-1] += 1
        return write(job)

    monkeypatch.setattr(convert, "job_to_pb", counted)
    long = [replace(four.request(max_tokens=1), prompt_token_ids=(5,) * 5000) for _ in range(16)]
    asking = asyncio.create_task(finish_all(four, long))
    while not asking.done():
        turns.append(0)
        await asyncio.sleep(0)
    await asking
    assert sum(turns) == 16 and max(turns) == 1


async def test_the_timeline_has_what_nodes_report(pair: FakeCluster) -> None:
    line = (await pair.ask()).timeline
    assert (line.cached_tokens, line.decode_cached_tokens, line.transfer_bytes) == (3, 2, 1)
    assert (line.prefill_queue_seconds, line.prefill_seconds) == (0.25, 0.5)
    assert line.queued <= line.reserved <= line.first_token <= line.transferred <= line.finished
    sent = convert.timeline_to_pb(line)
    assert (sent.prefill_seconds, sent.decode_cached_tokens) == (0.5, 2)


async def test_a_first_token_overtaken_by_its_kv_comes_with_it(pair: FakeCluster) -> None:
    held: list[Any] = []

    def late(event: pb.PrefillEvent) -> Iterable[Any]:
        held.append(event)
        return held if event.HasField("handed_off") else ()

    pair["p0"].tells = late
    for _ in range(10):
        held.clear()
        line = (await pair.ask()).timeline
        assert line.first_token <= line.transferred


@pytest.mark.parametrize("role", ["p0", "d0"])
async def test_a_reply_that_does_not_parse_is_its_nodes_fault(
    four: FakeCluster, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = four[role]

    async def garbage(request: Any, context: Any) -> AsyncIterator[bytes]:
        if role == "p0":  # of the others it is known
            node.jobs.append(request)
        yield b"\xff\xff\xff"

    await node.server.stop(0)
    node.server = grpc.aio.server()
    monkeypatch.setattr(node, "_prefill", garbage)
    monkeypatch.setattr(node, "_decode", garbage)
    await node.start()
    for _ in range(4):
        await four.ask()
    assert 0 < len(node.jobs) <= 3
    assert breakers(four) == {BreakerState.CLOSED, BreakerState.OPEN}


@pytest.mark.parametrize("role", ["p0", "d0"])
@pytest.mark.parametrize(
    "words",
    [
        {"error_code": "NEW_IN_V9", "blame": "martian"},
        {"error_code": "NEW_IN_V9"},
        {"error_code": "BAD_CONFIG", "blame": "operator"},
        {"error_code": "NEW_IN_V9", "blame": "decode", "retry_after": "soon", "retryable": "?"},
        {},
    ],
)
@pytest.mark.parametrize("status", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED])
async def test_errors_of_a_node_of_another_version_end_no_request(
    four: FakeCluster, role: str, words: dict[str, str], status: grpc.StatusCode
) -> None:
    four[role].on_run = says(status, **words)
    async with asyncio.timeout(60):
        for _ in range(3):
            await four.ask()
    assert 0 < len(four[role].jobs) <= 3


async def test_a_defect_of_the_router_ends_that_request_and_is_logged(
    pair: FakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(message: pb.TokenEvent) -> None:
        raise KeyError(7)

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(convert, "event_from_pb", broken)
        error = await ends(pair)
    assert error.code == "INTERNAL" and "r1" in error.message and "KeyError" not in error.message
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "r1" in record.getMessage() and record.exc_info is not None
    await pair.ask()


@pytest.mark.parametrize("role", ["p0", "d0"])
async def test_a_node_that_says_nothing_is_waited_for_until_the_deadline(
    tmp_path: Path, role: str
) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), request_timeout=2.0) as pair:
        pair[role].on_run = hangs
        started = monotonic()
        error = await ends(pair, DeadlineExceeded)
        assert error.http_status == 504 and "2 s" in error.message
        assert 2 <= monotonic() - started < 30
        pair[role].on_run = None
        await pair.ask()


async def test_progress_moves_the_deadline(tmp_path: Path) -> None:
    async def slow(context: Any) -> None:
        await asyncio.sleep(0.3)

    async with fake_cluster(tmp_path, ("p0", "d0"), request_timeout=1.8) as cluster:
        cluster["d0"].on_token = dict.fromkeys(range(8), slow)
        for _ in range(3):  # a machine that stands still makes no progress
            with suppress(DeadlineExceeded):
                await cluster.ask()
                return
        pytest.fail("it ended at its deadline")


async def test_a_client_that_leaves_frees_all(pair: FakeCluster) -> None:
    pair["d0"].on_token = {2: hangs}
    async with aclosing(pair.updates(pair.request())) as updates:
        for _ in range(2):
            await anext(updates)
        assert pair.pipeline.admission.running == 1
    await pair.settled()
    pair["d0"].on_token, pair["p0"].on_run = {}, hangs
    task = asyncio.create_task(pair.ask())
    while not pair["p0"].open:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await pair.settled()


async def test_an_answer_to_retarget_that_does_not_parse_is_the_decode_nodes_fault(
    four: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def garbage(request: Any, context: Any) -> bytes:
        return b"\xff\xff\xff"

    node = four["d0"]
    await node.server.stop(0)
    node.server = grpc.aio.server()
    monkeypatch.setattr(node, "_retarget", garbage)
    await node.start()
    failure = NodeError("gone", code="NODE_FAILED", blame=Blame.PREFILL)
    four["p0"].on_run = four["p1"].on_run = fails(failure, 1)
    for _ in range(4):
        await four.ask()
    assert len(node.jobs) > 0 and breakers(four) == {BreakerState.CLOSED}


async def test_a_call_that_fails_after_the_last_token_does_not_count(
    pair: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's tasks are only waited for then: a call that breaks just now, say."""

    hand_off = Attempt._hand_off

    async def breaks(self: Attempt, ticket: pb.Ticket | None) -> None:
        try:
            await hand_off(self, ticket)
            await asyncio.Event().wait()
        finally:
            raise lost(Blame.DECODE)

    monkeypatch.setattr(Attempt, "_hand_off", breaks)
    async with asyncio.timeout(30):
        stats = await pair.ask()
    assert stats.completion_tokens == 8 and stats.timeline.migrations == 0


DONE = GenerationStats(1, 1, 0, Timeline())
DELTA = TextDelta(0, "", ())


def prompts(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(str(i), (i,), SamplingParams(max_tokens=1)) for i in range(count)]


async def test_a_generation_that_cancels_itself_ends_its_answer() -> None:
    async def serve(request: GenerationRequest, put: Put) -> GenerationStats:
        put(DELTA)
        raise asyncio.CancelledError

    async with asyncio.timeout(30):
        updates = generate(prompts(1), serve)
        assert await anext(updates) == [(0, DELTA)]
        with pytest.raises(PdserveError, match="cancelled"):
            await anext(updates)


async def test_the_first_error_of_a_prompt_is_the_answers() -> None:
    """Events that came before it are read first; later ones are not."""
    read = asyncio.Event()

    async def serve(request: GenerationRequest, put: Put) -> GenerationStats:
        put(DELTA)
        if request.request_id == "0":
            await asyncio.Event().wait()
        await read.wait()
        raise Unavailable(request.request_id)

    updates = generate(prompts(3), serve)
    assert await anext(updates) == [(i, DELTA) for i in range(3)]
    read.set()
    with pytest.raises(Unavailable, match="1"):
        await anext(updates)


async def test_an_answer_that_lacks_an_update_is_never_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that finds the queue full may be a prompt's last token, after which all is well."""
    monkeypatch.setattr(generation, "MAX_BEHIND", 2)

    async def serve(request: GenerationRequest, put: Put) -> GenerationStats:
        put(DELTA)
        put(DELTA)
        with suppress(Cancelled):
            put(DELTA)
        return DONE

    updates = generate(prompts(1), serve)
    assert await anext(updates) == [(0, DELTA)] * 2
    with pytest.raises(Cancelled, match="behind"):
        await anext(updates)


async def test_the_prompts_of_a_body_begin_and_end_a_few_at_a_time() -> None:
    """However many they are, the event loop is everybody's between them."""
    turn, begun, ended = 0, Counter[int](), Counter[int]()
    loop = asyncio.get_running_loop()

    def count() -> None:
        nonlocal turn, counting
        turn, counting = turn + 1, loop.call_soon(count)

    async def serve(request: GenerationRequest, put: Put) -> GenerationStats:
        begun[turn] += 1
        try:
            put(DELTA)
            await asyncio.Event().wait()
        finally:
            ended[turn] += 1
        return DONE

    num_prompts = 10 * MAX_BURST
    counting = loop.call_soon(count)
    async with aclosing(generate(prompts(num_prompts), serve)) as updates:
        while begun.total() < num_prompts:
            await anext(updates)
    counting.cancel()
    assert ended.total() == num_prompts
    assert max(*begun.values(), *ended.values()) <= MAX_BURST


async def test_a_body_of_many_prompts_begins_some_of_them_at_a_time() -> None:
    """A request that has begun is a hundred objects, all of which the garbage collector looks
    through while the event loop stands still: 1,024 prompts of one body must not be felt by
    others."""
    begun = ended = most = 0
    release = asyncio.Event()

    async def serve(request: GenerationRequest, put: Put) -> GenerationStats:
        nonlocal begun, ended, most
        begun += 1
        most = max(most, begun - ended)
        put(DELTA)
        await release.wait()
        ended += 1
        return DONE

    found: list[int] = []
    async for updates in generate(prompts(2 * MAX_BEGUN + 1), serve):
        found += [index for index, update in updates if update is DELTA]
        if len(found) == MAX_BEGUN:
            for _ in range(3):
                await asyncio.sleep(0)
            assert begun == MAX_BEGUN
            release.set()
    assert sorted(found) == list(range(2 * MAX_BEGUN + 1))
    assert most == MAX_BEGUN


async def test_the_prompts_of_a_body_that_fails_do_not_begin() -> None:
    begun: list[str] = []

    async def serve(request: GenerationRequest, put: Put) -> GenerationStats:
        begun.append(request.request_id)
        raise Unavailable("full")

    with pytest.raises(Unavailable):
        [each async for each in generate(prompts(10 * MAX_BURST), serve)]
    assert len(begun) == MAX_BURST


async def test_a_client_that_does_not_read_ends_its_generations(
    pair: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its prompts have one bound, and no node is blamed for it."""
    monkeypatch.setattr(generation, "MAX_BEHIND", 20)
    requests = [pair.request(max_tokens=50) for _ in range(3)]
    async with asyncio.timeout(60):
        updates = pair.pipeline.generate(requests)
        read = [len(await anext(updates))]
        while pair.pipeline.admission.running:
            await asyncio.sleep(0.01)
        read.append(len(await anext(updates)))
        with pytest.raises(Cancelled, match="20 events behind"):
            await anext(updates)
    await pair.settled()
    assert read[1] == 20 and pair.jobs("d") == 3 and breakers(pair) == {BreakerState.CLOSED}


async def test_a_priority_is_told_to_every_node_that_goes_on(four: FakeCluster) -> None:
    four["d0"].on_token = four["d1"].on_token = {3: fails(lost(Blame.DECODE), times=1)}
    request = replace(four.request(), priority=-3)
    assert [each async for each in four.updates(request)]
    told = [job for node in four.nodes.values() for job in node.jobs]
    assert len(told) >= 4 and {convert.job_from_pb(job).priority for job in told} == {-3}


@pytest.mark.parametrize("count", [1, 4, 6])
async def test_every_choice_goes_on_where_it_was(four: FakeCluster, count: int) -> None:
    """Its decode node dies: the others' texts have neither gap nor repeat either."""
    died = once(dies)
    four["d0"].on_token = four["d1"].on_token = {count: died}
    request = replace(four.request(max_tokens=8), n=3)
    said = dict[int, list[int]]()
    async for update in four.updates(request):
        if isinstance(update, TextDelta):
            said.setdefault(update.choice, []).extend(each.token_id for each in update.tokens)
    assert said == {choice: [token_at(5 + each) for each in range(8)] for choice in range(3)}
    assert four.jobs("d") == 2


async def test_the_node_hears_of_a_choice_that_a_stop_string_ends(pair: FakeCluster) -> None:
    """The first choice is a token ahead, and ends before the others do."""

    async def told(context: Any) -> None:
        await eventually(lambda: pair["d0"].finished)

    pair["d0"].on_token[10] = told  # where the others stop
    request, reasons = pair.request(max_tokens=40), Counter[str | int | None]()
    async for update in pair.updates(replace(request, n=3, stop=(chr(token_at(15) + 33),))):
        if isinstance(update, TextDelta) and update.finish_reason:
            reasons[update.stop_reason] += 1
    assert list(reasons.values()) == [3] and isinstance(next(iter(reasons)), str)
    assert pair["d0"].finished[0] == 0


async def test_a_channel_that_is_closed_under_a_call_ends_the_attempt(four: FakeCluster) -> None:
    async def close(context: Any) -> None:
        (node,) = (each for each in four.nodes.values() if each.open)
        asyncio.get_running_loop().create_task(four.channels.drop([node.address]))
        await hangs(context)

    four["d0"].on_run = four["d1"].on_run = once(close)
    async with asyncio.timeout(60):
        assert (await four.ask()).timeline.migrations == 1
    assert four.jobs("d") == 2


async def test_events_of_a_later_version_are_passed_over(four: FakeCluster) -> None:
    for node in four.nodes.values():
        node.tells = lambda event: (
            (event,) if isinstance(event, pb.TokenEvent) else (type(event)(), event)
        )
    assert (await four.ask()).timeline.migrations == 0


# ---- going on elsewhere, for as long as the deadline allows ----


async def test_pauses_grow_and_the_budget_is_time(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), queue_timeout=2.0) as cluster:
        cluster["d0"].on_run = fails(NodeError("full", code="BUSY"))
        cluster.registry.nodes()[1].breaker._max_failures = 1000
        started = monotonic()
        error = await ends(cluster, NodeError)
        assert error.code == "BUSY" and 1.8 < monotonic() - started < 30
        assert 2 <= cluster.jobs("d") <= 9


async def test_waiting_is_bounded_in_all_and_not_anew_at_each_try(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), queue_timeout=0.6) as cluster:

        async def vanish(context: Any) -> None:
            asyncio.get_running_loop().call_later(0.4, cluster["d0"].register)
            raise lost(Blame.DECODE)

        cluster["d0"].on_run = vanish
        started = monotonic()
        error = await ends(cluster)
        assert isinstance(error, Unavailable | NodeError)
        assert monotonic() - started < 30


async def test_a_request_that_has_begun_waits_longer_than_the_queue_time_out(
    tmp_path: Path,
) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), queue_timeout=0.1) as cluster:
        d0 = cluster["d0"]

        async def vanish(context: Any) -> None:
            d0.on_token = {}
            asyncio.get_running_loop().call_later(0.7, d0.register)
            raise lost(Blame.DECODE)

        d0.on_token = {3: vanish}
        stats = await cluster.ask()
        assert stats.timeline.migrations == 1


async def test_failures_of_prefill_are_not_blamed_on_decode(four: FakeCluster) -> None:
    four["p0"].on_run = fails(NodeError("broken", code="NODE_FAILED", blame=Blame.PREFILL))
    for _ in range(8):
        await four.ask()
    assert len(four["p0"].jobs) == 3, "then its breaker is open"
    states = {node.info.node_id: node.breaker.state.value for node in four.registry.nodes()}
    assert states == {"p0": "open", "p1": "closed", "d0": "closed", "d1": "closed"}
    assert four.jobs("d") == 8, "blocks that are reserved are kept"


@pytest.mark.parametrize("role", ["p0", "d0"])
async def test_a_token_that_cannot_be_is_its_nodes_and_not_the_clients(
    four: FakeCluster, role: str
) -> None:
    four[role].token_offset = 10**6
    for _ in range(6):
        await four.ask()
    (node,) = (each for each in four.registry.nodes() if each.info.node_id == role)
    while node.breaker.state is BreakerState.CLOSED:  # now and then the other half is first to tell
        await four.ask()
        assert len(four[role].jobs) < 30
    states = {node.info.node_id: node.breaker.state.value for node in four.registry.nodes()}
    assert states == {name: "open" if name == role else "closed" for name in four.nodes}


def _first_token(**changes: Any) -> Callable[[Any], Iterable[Any]]:
    def tells(event: Any) -> Iterable[Any]:
        token = event.first_token.token
        for name, value in changes.items() if event.HasField("first_token") else ():
            token.ClearField(name)
            token.MergeFrom(pb.TokenEvent(**{name: value}))
        return (event,)

    return tells


def _decoded(change: Callable[[pb.TokenEvent], Iterable[Any]]) -> Callable[[Any], Iterable[Any]]:
    return lambda event: change(event) if isinstance(event, pb.TokenEvent) else (event,)


def _said(kind: str, *times: int) -> Callable[[Any], Iterable[Any]]:
    """Such an event comes again and again, or so many times."""

    def tells(event: Any) -> Iterable[Any]:
        is_it = isinstance(event, pb.DecodeEvent) and event.HasField(kind)
        return repeat(event, *times) if is_it else (event,)

    return tells


def _never_ends(event: pb.TokenEvent) -> Iterable[Any]:
    ended, event.finish_reason = bool(event.finish_reason), 0
    return repeat(event) if ended else (event,)


def _of_choice_7(event: pb.TokenEvent) -> Iterable[Any]:
    event.choice = 7
    return (event,)


def _odd_logprob(event: pb.TokenEvent) -> Iterable[Any]:
    event.tokens[0].logprob = -1
    event.tokens[0].top_logprobs.add(token_id=2**32 - 1, logprob=-1)
    return (event,)


ID = inference_pb2.Token(id=50)
ODD = pb.Ended(failure=pb.Failure(status=99, message="\x1b"))
RUDE: dict[str, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    "two first tokens": ("p0", lambda event: (event, event)),
    "a first token of two": ("p0", _first_token(tokens=[ID, ID])),
    "a first token of none": ("p0", _first_token(tokens=[])),
    "a first token of another choice": ("p0", _first_token(choice=3)),
    "handed off at once": ("p0", lambda _: (pb.PrefillEvent(handed_off=pb.HandedOff()),)),
    "an event of none": ("p0", lambda _: (pb.PrefillEvent(),)),
    "an unknown choice": ("d0", _decoded(_of_choice_7)),
    "odd logprobs": ("d0", _decoded(_odd_logprob)),
    "more than max_tokens": ("d0", _decoded(_never_ends)),
    "tokens of nothing": ("d0", _decoded(lambda _: repeat(pb.TokenEvent()))),
    "tokens at once": ("d0", lambda _: (pb.TokenEvent(tokens=[ID]),)),
    "landed at once": ("d0", lambda _: (pb.DecodeEvent(landed=pb.Landed()),)),
    "landed again": ("d0", _said("landed")),
    "reserved again": ("d0", _said("reserved", 2)),
    "tokens before landed": ("d0", lambda event: (pb.TokenEvent(tokens=[ID]), event)),
    "the end at once": ("d0", lambda _: (pb.DecodeEvent(ended=pb.Ended()),)),
    "the end before the last token": (
        "d0",
        _decoded(lambda event: () if event.finish_reason else (event,)),
    ),
    "a failure without words": ("d0", lambda _: (pb.DecodeEvent(ended=ODD),)),
}


WORKED = {"landed again", "more than max_tokens", "the end before the last token"}


async def test_a_prefill_node_whose_answer_is_late_is_named(pair: FakeCluster) -> None:
    over = asyncio.Event()
    pair["p0"].tells = lambda _: ()
    pair["p0"].on_token[2] = lambda _: over.wait()
    line = (await pair.ask()).timeline
    over.set()
    assert line.prefill_node == "p0"


@pytest.mark.parametrize("rude", RUDE)
async def test_a_node_that_tells_what_cannot_be_is_left(four: FakeCluster, rude: str) -> None:
    """Its request goes on elsewhere, and its client sees nothing of it. A decode node that makes
    no good token soon gets no more; what a prefill node says may come when all is over."""
    name, tells = RUDE[rude]
    four[name].tells = tells
    async with asyncio.timeout(60):
        for _ in range(12):
            stats = await four.ask()
            assert stats.completion_tokens == 8
    (node,) = (each for each in four.registry.nodes() if each.info.node_id == name)
    assert four[name].jobs
    if name == "d0" and rude not in WORKED:
        assert len(four[name].jobs) < 6 and node.breaker.state is not BreakerState.CLOSED


async def test_events_after_the_end_are_dropped(four: FakeCluster) -> None:
    four["d0"].tells = four["d1"].tells = lambda event: (event, event, event)[
        : 3 if isinstance(event, pb.TokenEvent) and event.finish_reason else 1
    ]
    for _ in range(4):
        assert (await four.ask()).timeline.migrations == 0


# ---- prefill and decode nodes that do not reach each other ----


@pytest.mark.parametrize(
    "error",
    [
        PARTED,
        TransferError("no route", code="CONNECT_FAILED", blame=Blame.DECODE),
        TransferError("nothing came", code="LEASE_EXPIRED"),
    ],
)
async def test_a_pair_that_is_cut_is_remembered_and_the_decode_node_prefills(
    tmp_path: Path, error: PdserveError
) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        cluster["p0"].on_run, now = fails(error), [monotonic()]
        cluster.registry.links._now = lambda: now[0]  # a cool-down ends when it is told to
        answers = await asyncio.gather(*(cluster.ask() for _ in range(20)))
        assert max(stats.timeline.migrations for stats in answers) <= 2
        tried = cluster.jobs("p")
        await cluster.ask()
        assert cluster.jobs("p") == tried, "it is known by now"
        assert breakers(cluster) == {BreakerState.CLOSED}
        assert all(node["state"] == "ready" for node in cluster.pipeline.cluster()["nodes"])
        assert cluster.pipeline.ready()[0] and cluster.pipeline.cluster()["pairings"] == []
        cluster["p0"].on_run = None
        now[0] += 2 * LINK_COOLDOWN
        assert cluster.pipeline.cluster()["pairings"]
        local = cluster["d0"].local_prefills
        await cluster.ask()
        assert cluster["d0"].local_prefills == local, "it is tried again after a while"


async def test_other_pairs_serve_while_one_is_cut(four: FakeCluster) -> None:
    four["p0"].on_run = fails(PARTED)
    for _ in range(6):
        await four.ask()
    assert four["d0"].local_prefills == four["d1"].local_prefills == 0
    assert breakers(four) == {BreakerState.CLOSED}


async def test_a_lease_that_lapses_on_the_decode_node_breaks_the_pair(pair: FakeCluster) -> None:
    pair["d0"].on_landed = fails(TransferError("nothing came", code="LEASE_EXPIRED"))
    await pair.ask()
    assert pair["d0"].local_prefills == 1
    assert breakers(pair) == {BreakerState.CLOSED}


async def test_transfers_that_fail_on_the_prefill_node_end_in_a_local_prefill(
    pair: FakeCluster,
) -> None:
    """They do not count as failures of its engine, so the request is not poison."""
    pair["p0"].on_run = fails(TransferError("a defect", code="INTERNAL", blame=Blame.PREFILL))
    await pair.ask()
    assert pair["d0"].local_prefills == 1


async def test_a_decode_node_that_gave_the_blocks_up_is_asked_anew(pair: FakeCluster) -> None:
    pair["p0"].on_run = fails(lost(Blame.PREFILL), times=1)
    pair["d0"].on_retarget = fails(TransferError("no such transfer", code="UNKNOWN_TRANSFER"))
    task = asyncio.create_task(pair.ask())
    while not task.done():
        pair.registry.heartbeat("p0", pb.NodeLoad(healthy=True))
        await asyncio.sleep(0.02)
    await task


async def test_a_node_that_freezes_while_it_drains_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends no heartbeats any more, so only its silence towards the router tells."""
    monkeypatch.setattr(probes, "PROBE_TIMEOUT", 1.5)
    names, beats = ("p0", "d0", "d1"), {"heartbeat_interval": 0.1, "heartbeat_timeout": 3.0}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        async with fake_cluster(tmp_path, names, watched=True, **beats) as cluster:

            async def freeze(context: Any) -> None:
                node = next(n for n in cluster.registry.nodes() if n.info.node_id == "d0")
                cluster.registry.deregister("d0")
                node.info.address = f"127.0.0.1:{silent.getsockname()[1]}"
                await hangs(context)

            async def beat() -> None:
                while True:
                    for name in names:
                        cluster.registry.heartbeat(name, pb.NodeLoad(healthy=True))
                    await asyncio.sleep(0.1)

            cluster["d0"].on_token = {3: freeze}
            beating = asyncio.create_task(beat())
            async with asyncio.timeout(60):
                asked = [await cluster.ask() for _ in range(2)]
            beating.cancel()
            assert sum(stats.timeline.migrations for stats in asked) == 1


# ---- poison ----


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_node_that_can_compute_nothing_is_left(four: FakeCluster, role: str) -> None:
    """All its rows fail, those of others do not: no request is poison, and it gets no more."""
    blame = Blame.PREFILL if role == "p" else Blame.DECODE
    error = NodeError("r1: not a number", code="SEQUENCE_FAILED", blame=blame)
    four[f"{role}0"].on_token = {0: fails(error)}
    for _ in range(12):
        await four.ask()
    assert len(four[f"{role}0"].jobs) == 3


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_request_that_fails_alike_on_two_nodes_is_not_tried_on_a_third(
    tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{each}{number}" for each in "pd" for number in range(3)]
    async with fake_cluster(tmp_path, names) as cluster:
        blame = Blame.PREFILL if role == "p" else Blame.DECODE
        poison = NodeError("r1: not a number", code="SEQUENCE_FAILED", blame=blame)
        for number in range(3):
            cluster[f"{role}{number}"].on_token = {0: fails(poison)}
        with caplog.at_level(logging.WARNING):
            error = await ends(cluster)
        assert error.code == "POISON_REQUEST" and error.http_status == 500
        assert cluster.jobs(role) == 2
        assert any("POISON_REQUEST" in r.message and "r1" in r.message for r in caplog.records)
        assert breakers(cluster) == {BreakerState.CLOSED}


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_prompt_that_kills_nodes_does_not_kill_them_all(tmp_path: Path, role: str) -> None:
    """Even if each of them makes a token of it before the next one dies of it."""
    names = [f"{each}{number}" for each in "pd" for number in range(6)]
    async with fake_cluster(tmp_path, names) as cluster:
        for number in range(6):
            cluster[f"{role}{number}"].on_token = {0: dies}
        error = await ends(cluster)
        assert error.code == "POISON_REQUEST"
        assert cluster.jobs(role) == 3


async def test_requests_beside_one_that_kills_nodes_are_no_poison(tmp_path: Path) -> None:
    """Twice all that are there die with it before any has a token, and the node is started again:
    nothing is known of the new one. One more death would end each of them, so each comes alone."""
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster:
        node, bad = cluster["d0"], cluster.request()
        together, starts = asyncio.Barrier(4), 0
        beside: list[int] = []  # requests on the node, this one included, at each last chance
        restarts = set[asyncio.Task[None]]()

        def in_flight() -> int:
            return next(n.in_flight for n in cluster.registry.nodes() if n.info.node_id == "d0")

        async def restart() -> None:
            nonlocal starts
            await eventually(lambda: not in_flight())
            starts += 1
            node.register("", f"start {starts}")

        async def token(context: Any) -> None:
            if starts < 2:
                number = await together.wait()
            else:
                beside.append(in_flight())
                number = 0
                if dict(context.invocation_metadata())[REQUEST_ID_KEY] != bad.request_id:
                    return
            if number == 0:
                restarts.add(asyncio.create_task(restart()))
            await dies(context)

        node.on_token = {0: token}

        async def poison() -> None:
            async for _ in cluster.updates(bad):
                pass

        asked = (cluster.ask() for _ in range(3))
        results = await asyncio.gather(*asked, poison(), return_exceptions=True)
        assert isinstance(results[-1], NodeError) and results[-1].code == "POISON_REQUEST"
        assert not [each for each in results[:-1] if isinstance(each, BaseException)], results
        assert beside == [1, 1, 1, 1]
        await asyncio.gather(*restarts)


# ---- nodes that the router does not reach ----


@pytest.mark.parametrize("role", ["p", "d"])
async def test_a_node_whose_name_does_not_resolve_loses_nothing(tmp_path: Path, role: str) -> None:
    names = ("p0", "p1", "d0", "d1")
    options = {"queue_timeout": 5, "breaker_cooldown": 1}
    async with fake_cluster(tmp_path, names, watched=True, **options) as cluster:
        bad = cluster[f"{role}0"]
        bad.register("nowhere.invalid:7")
        started = monotonic()
        await asyncio.gather(*(cluster.ask() for _ in range(20)))
        assert monotonic() - started < 30
        (node,) = (n for n in cluster.pipeline.cluster()["nodes"] if n["node_id"] == bad.name)
        assert node["state"] == "lost" and node["reason"]
        assert all(bad.name not in each.values() for each in cluster.pipeline.cluster()["pairings"])
        cluster.registry.heartbeat(bad.name, pb.NodeLoad(healthy=True))
        (node,) = (n for n in cluster.pipeline.cluster()["nodes"] if n["node_id"] == bad.name)
        assert node["state"] == "lost", "a heartbeat says nothing of the way there"
        bad.register()
        async with asyncio.timeout(60):
            while len(cluster.pipeline.cluster()["pairings"]) < 4:
                await asyncio.sleep(0.05)


async def test_only_nodes_out_of_reach_is_not_ready_and_says_why(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path, ("p0", "d0"), watched=True, queue_timeout=3) as cluster:
        cluster["d0"].register("nowhere.invalid:7")
        started = monotonic()
        error = await ends(cluster)
        assert monotonic() - started < 30
        assert error.code == "NO_NODE" and "cannot be reached" in error.message
        ready, reason = cluster.pipeline.ready()
        assert not ready and "cannot be reached" in reason


async def test_a_stream_whose_version_is_gone_cannot_go_on(tmp_path: Path) -> None:
    """It waits for that version's nodes as any request does, then says that none will come."""
    async with fake_cluster(tmp_path, ("p0", "d0"), queue_timeout=0.2) as cluster:
        request = GenerationRequest("r", (1, 2), SamplingParams(max_tokens=4))
        of_its_nodes = next(iter(cluster.registry.nodes())).info.fingerprint
        for version in ("another", of_its_nodes):
            past = (Past(0, (5,), None, version),)
            with pytest.raises(Gone, match="ask anew") if version == "another" else nullcontext():
                await finish(cluster, replace(request, past=past))
        await cluster.settled()
