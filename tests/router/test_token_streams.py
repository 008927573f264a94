"""One stream of tokens from a decode node to a router: both ends of it, and what happens to the
requests on it when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_nodes import FakeCluster, fake_cluster, hangs, stand_still
from pdserve.common.core.errors import InvalidRequest, NodeError, PdserveError
from pdserve.common.core.request import FinishReason, TokenEvent
from pdserve.common.core.sampling import SampledToken, TokenLogprobs
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.tokens import JobTokens, decode_tokens, encode_tokens
from pdserve.decode_node import token_streams
from pdserve.decode_node.token_streams import TokenStreams
from pdserve.router.requests.attempt import Attempt

# ---- the words ----

EVENTS = [
    TokenEvent(0, (SampledToken(7),)),
    TokenEvent(3, (SampledToken(0), SampledToken(2**31)), FinishReason.LENGTH),
    TokenEvent(0, (), FinishReason.STOP),
    TokenEvent(1, (SampledToken(9),), FinishReason.STOP, 9),
    TokenEvent(1, (SampledToken(9, TokenLogprobs(-0.5, ((9, -0.5), (4, -2.0)))),)),
    TokenEvent(1, (SampledToken(9, TokenLogprobs(float("-inf"))),)),
]


def test_tokens_arrive_as_they_were() -> None:
    sent = [JobTokens.of(number, 5 * number, event) for number, event in enumerate(EVENTS)]
    got = decode_tokens(encode_tokens(sent))
    assert [each.event() for each in got] == EVENTS
    assert [(each.job, each.position) for each in got] == [(i, 5 * i) for i in range(len(EVENTS))]


def test_a_token_is_a_few_bytes() -> None:
    """That is what the message is for."""
    assert len(encode_tokens([JobTokens.of(1000, 100, EVENTS[0])])) < 16


def test_what_a_later_version_says_is_understood() -> None:
    words = [[1, 0, 2, [5], "tired", None, None, None, "new", 8]]
    (tokens,) = decode_tokens(msgspec.msgpack.encode(words))
    assert tokens.event() == TokenEvent(0, (SampledToken(5),), FinishReason.STOP)


@pytest.mark.parametrize("words", [b"\xc1", b"", [[1, 0, 0]], [["a", 0, 0, []]], {"a": 1}, 7])
def test_what_no_node_says_is_refused(words: Any) -> None:
    message = words if isinstance(words, bytes) else msgspec.msgpack.encode(words)
    with pytest.raises(msgspec.DecodeError):
        decode_tokens(message)


def test_logprobs_of_some_tokens_and_not_of_others_are_refused() -> None:
    with pytest.raises(ValueError):
        JobTokens(0, 0, 0, (1, 2), logprobs=((-1.0, ()),)).event()


# ---- the node's end ----


def tokens(job: int, position: int = 0) -> JobTokens:
    return JobTokens.of(job, position, EVENTS[0])


async def test_what_comes_together_is_one_message_and_messages_are_counted() -> None:
    streams = TokenStreams()
    with streams.job("s", pytest.fail) as stream:
        assert stream is not None
        messages = streams.messages("s")
        for round in range(3):
            for job in range(4):
                stream.add(tokens(job, round))
            message = await anext(messages)
            assert message.number == round
            got = [(each.job, each.position) for each in decode_tokens(message.tokens)]
            assert got == [(job, round) for job in range(4)]
        reading = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        stream.add(tokens(9))
        assert decode_tokens((await reading).tokens) == [tokens(9)]


async def test_a_reader_that_was_behind_gets_all_in_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_streams, "MAX_MESSAGE", 3)
    streams = TokenStreams()
    with streams.job("s", pytest.fail) as stream:
        assert stream is not None
        for position in range(8):
            stream.add(tokens(1, position))
        messages = streams.messages("s")
        got = [decode_tokens((await anext(messages)).tokens) for _ in range(3)]
    assert [len(each) for each in got] == [3, 3, 2]
    assert [each.position for part in got for each in part] == list(range(8))


async def test_a_job_may_come_before_its_stream_is_read_or_after() -> None:
    streams = TokenStreams()
    with streams.job("early", pytest.fail) as stream:
        assert stream is not None
        stream.add(tokens(1))
        assert decode_tokens((await anext(streams.messages("early"))).tokens) == [tokens(1)]
    late = asyncio.ensure_future(anext(streams.messages("late")))
    await asyncio.sleep(0)
    with streams.job("late", pytest.fail) as stream:
        assert stream is not None
        stream.add(tokens(2))
        assert decode_tokens((await late).tokens) == [tokens(2)]


async def test_jobs_without_a_stream_have_none() -> None:
    with TokenStreams().job("", pytest.fail) as stream:
        assert stream is None


Breaks = Callable[[TokenStreams, Any, Any], Any]


async def leaves(streams: TokenStreams, stream: Any, messages: Any) -> None:
    await messages.aclose()


async def falls_behind(streams: TokenStreams, stream: Any, messages: Any) -> None:
    for position in range(6):
        stream.add(tokens(1, position))


async def stops(streams: TokenStreams, stream: Any, messages: Any) -> None:
    streams.close()


@pytest.mark.parametrize("breaks", [leaves, falls_behind, stops])
async def test_jobs_fail_with_their_stream_and_nothing_is_kept(
    breaks: Breaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_streams, "MAX_BEHIND", 5)
    streams, failed = TokenStreams(), list[PdserveError]()
    with ExitStack() as stack:
        first = stack.enter_context(streams.job("s", lambda error: failed.append(error)))
        stack.enter_context(streams.job("s", lambda error: failed.append(error)))
        messages = streams.messages("s")
        assert first is not None
        first.add(tokens(1))
        await anext(messages)
        await breaks(streams, first, messages)
        assert [each.code for each in failed] == ["TOKEN_STREAM_LOST"] * 2
        first.add(tokens(1))  # into the void
        with pytest.raises(NodeError), streams.job("s", failed.append):
            pass
        assert [each async for each in messages] == []
    assert not streams._streams


async def test_a_stream_has_one_reader() -> None:
    streams = TokenStreams()
    with streams.job("s", pytest.fail) as stream:
        assert stream is not None
        stream.add(tokens(1))
        messages = streams.messages("s")
        await anext(messages)
        with pytest.raises(InvalidRequest, match="read already"):
            await anext(streams.messages("s"))
        stream.add(tokens(2))
        assert decode_tokens((await anext(messages)).tokens) == [tokens(2)]


# ---- the router's end ----


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(tmp_path, ("p0", "p1", "d0", "d1")) as cluster:
        yield cluster


def streams_of(cluster: FakeCluster) -> dict[str, Any]:
    return {node.id: stream for node, stream in cluster.pipeline.streams._streams.items()}


async def test_all_requests_on_a_node_share_one_stream(four: FakeCluster) -> None:
    await asyncio.gather(*(four.ask() for _ in range(8)))
    before = streams_of(four)
    await asyncio.gather(*(four.ask() for _ in range(8)))
    assert streams_of(four) == before and set(before) == {"d0", "d1"}
    assert not any(stream._jobs for stream in before.values())
    assert all(len(four[name].streams._streams) == 1 for name in before)


async def test_a_node_of_an_older_version_sends_tokens_with_the_rest(four: FakeCluster) -> None:
    four["d0"].token_streams = False
    four["d0"].register()
    answers = await asyncio.gather(*(four.ask() for _ in range(8)))
    assert not any(stats.timeline.migrations for stats in answers)
    assert four["d0"].jobs and set(streams_of(four)) == {"d1"}


async def test_tokens_that_overtake_the_landed_event_go_on_after_it(four: FakeCluster) -> None:
    node = four["d0"]
    told = node._told

    async def landed_last(events: Any) -> AsyncIterator[Any]:
        held = None
        async for event in told(events):
            if not isinstance(event, bytes) and event.HasField("landed"):
                held = event
                continue
            yield event
        await asyncio.sleep(0.05)  # the tokens are there by now
        yield held

    node._told = landed_last  # type: ignore[method-assign]
    for _ in range(4):
        stats = await four.ask()
        assert stats.completion_tokens == 8 and stats.timeline.migrations == 0
    assert node.jobs


def skips(message: pb.StepTokens) -> Iterable[Any]:
    message.number += 1
    return (message,)


def babbles(message: pb.StepTokens) -> Iterable[Any]:
    message.tokens = b"\xc1"
    return (message,)


def mumbles(message: pb.StepTokens) -> Iterable[Any]:
    return (b"\xff\xff",)


def repeats(message: pb.StepTokens) -> Iterable[Any]:
    return (message, message)


def half_scored(message: pb.StepTokens) -> Iterable[Any]:
    told = decode_tokens(message.tokens)
    scored = [msgspec.structs.replace(each, logprobs=((-1.0, ()),) * 2) for each in told]
    return (pb.StepTokens(number=message.number, tokens=encode_tokens(scored)),)


@pytest.mark.parametrize("tells", [skips, babbles, mumbles, repeats, half_scored])
async def test_requests_leave_a_node_whose_stream_is_not_what_it_must_be(
    four: FakeCluster, tells: Callable[[Any], Iterable[Any]]
) -> None:
    four["d0"].tells_tokens = tells
    async with asyncio.timeout(60):
        answers = [await four.ask() for _ in range(6)]
    assert sum(stats.timeline.migrations for stats in answers) > 0
    four["d0"].tells_tokens = lambda message: (message,)
    for node in four.registry.nodes():
        node.breaker.succeeded()
        node.lost = False
    jobs = len(four["d0"].jobs)
    assert all([(await four.ask()).timeline.migrations == 0 for _ in range(6)])
    assert len(four["d0"].jobs) > jobs, "a new stream was opened"


async def test_a_stream_that_ends_is_opened_again(four: FakeCluster) -> None:
    await asyncio.gather(*(four.ask() for _ in range(8)))
    before = streams_of(four)
    reached = asyncio.Event()

    async def hang(context: Any) -> None:
        reached.set()
        await hangs(context)

    four["d0"].on_token = four["d1"].on_token = {4: hang}
    asking = asyncio.create_task(four.ask())
    await reached.wait()
    four["d0"].on_token = four["d1"].on_token = {}
    # The idle one's first: what fails on the busy one must not meet a stream about to end.
    for node in sorted((four["d0"], four["d1"]), key=lambda each: each.open):
        node.streams.close()
        while len(four.pipeline.streams._streams) > 1:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        assert (await asking).timeline.migrations == 1
        for node in four.registry.nodes():
            node.breaker.succeeded()
            node.lost = False
        await asyncio.gather(*(four.ask() for _ in range(8)))
    after = streams_of(four)
    assert set(after) == set(before) and not set(after.values()) & set(before.values())


@pytest.mark.parametrize("offset", [-1, 1])
async def test_a_token_at_the_wrong_place_is_its_nodes_fault(
    four: FakeCluster, offset: int
) -> None:
    four["d0"].position_offset = offset
    async with asyncio.timeout(60):
        for _ in range(6):
            await four.ask()  # which compares every token
    assert 0 < len(four["d0"].jobs) <= 3


async def test_a_bad_token_is_of_its_request_alone(four: FakeCluster) -> None:
    """The others of the same message go on."""
    four["d0"].on_token = four["d1"].on_token = {3: hangs}
    asked = [asyncio.create_task(four.ask()) for _ in range(4)]
    while sum(four[name].open for name in ("d0", "d1")) < 4:
        await asyncio.sleep(0.01)
    waiting = [job._state for each in streams_of(four).values() for job in each._jobs.values()]
    while not all(sum(state.generated) == 4 for state in waiting):
        await asyncio.sleep(0.01)  # all but the tokens that hang have come
    (stream,) = (each for name, each in streams_of(four).items() if name == "d0")
    victim, other = list(stream._jobs)[:2]
    taken: list[JobTokens] = []
    receiver = stream._jobs[other]
    stream._jobs[other] = type("", (), {"take_tokens": taken.append, "tokens_lost": taken.append})()
    attempt = stream._jobs[victim]
    assert isinstance(attempt, Attempt)
    generated = list(attempt._state.generated)
    stream._deliver(encode_tokens([tokens(victim, 10**6), tokens(other)]))
    stream._deliver(encode_tokens([tokens(victim, sum(generated))]))  # by accident it would fit
    assert attempt._state.generated == generated
    assert taken == [tokens(other)] and not stream.ended
    stream._jobs[other] = receiver
    four["d0"].on_token = four["d1"].on_token = {}
    await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_an_end_that_overtakes_the_last_tokens_waits_for_them(
    four: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a node that never sends them is left."""
    held: list[Any] = []

    def last_one_late(message: pb.StepTokens) -> Iterable[Any]:
        if any(each.finish_reason for each in decode_tokens(message.tokens)):
            held.append(message)
            return ()
        return (message,)

    monkeypatch.setattr("pdserve.router.requests.attempt.LAST_TOKENS", 0.3)
    four["d0"].tells_tokens = last_one_late
    async with asyncio.timeout(60):
        answers = [await four.ask() for _ in range(4)]
    assert held and sum(stats.timeline.migrations for stats in answers) > 0


async def test_a_loop_that_stood_still_before_the_last_tokens_blames_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in the socket when the time for them is over."""
    stood_still = []

    async def late(message: pb.StepTokens) -> None:
        if any(each.finish_reason for each in decode_tokens(message.tokens)):
            await asyncio.sleep(0.2)  # the router has the end of `Decode.Run`
            stand_still(1.5)
            stood_still.append(message)

    monkeypatch.setattr("pdserve.router.requests.attempt.LAST_TOKENS", 1.0)
    async with fake_cluster(tmp_path, ("p0", "d0")) as cluster, asyncio.timeout(60):
        cluster["d0"].on_tokens = late
        stats = await cluster.ask()
        assert stood_still and stats.timeline.migrations == 0
