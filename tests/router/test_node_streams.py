"""One stream of events from a decode node to a router: both ends of it, and what happens to the
requests on it when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_nodes import FakeCluster, fails, fake_cluster, hangs
from pdserve.common.core.errors import (
    Blame,
    InvalidRequest,
    NodeError,
    PdserveError,
    TransferError,
    Unavailable,
)
from pdserve.common.core.printable import MAX_PEER_TEXT
from pdserve.common.core.request import FinishReason, TokenEvent
from pdserve.common.core.sampling import SampledToken, TokenLogprobs
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.status import failure_from_pb, failure_to_pb
from pdserve.common.rpc.tokens import JobEvent, JobTokens, StepEvent, decode_events, encode_events
from pdserve.decode_node import router_streams
from pdserve.decode_node.router_streams import JobWriter, RouterStream, RouterStreams
from pdserve.router.cluster.node_streams import NodeStream
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


def test_events_arrive_unchanged_and_in_order() -> None:
    tokens = [JobTokens.of(number, 5 * number, event) for number, event in enumerate(EVENTS)]
    reserved = pb.DecodeEvent(reserved=pb.Ticket(epoch=3))
    ended = pb.DecodeEvent(ended=pb.Ended())
    sent: list[StepEvent] = [
        JobEvent(7, reserved.SerializeToString()),
        *tokens,
        JobEvent(7, ended.SerializeToString()),
    ]
    first, *between, last = decode_events(encode_events(sent))
    assert isinstance(first, JobEvent) and (first.job, first.event()) == (7, reserved)
    assert isinstance(last, JobEvent) and last.event() == ended
    assert between == tokens
    assert [each.event() for each in between] == EVENTS


def test_a_token_is_a_few_bytes() -> None:
    """That is what the message is for."""
    assert len(encode_events([JobTokens.of(1000, 100, EVENTS[0])])) < 18


def test_messages_of_a_later_version_are_understood() -> None:
    words = [[0, 1, 0, 2, [5], "tired", None, None, None, "new", 8], [1, 3, b"", "new"]]
    tokens, event = decode_events(msgspec.msgpack.encode(words))
    assert tokens.event() == TokenEvent(0, (SampledToken(5),), FinishReason.STOP)
    assert event == JobEvent(3, b"") and event.event() == pb.DecodeEvent()


@pytest.mark.parametrize(
    "words",
    [b"\xc1", b"", [[0, 1, 0, 0]], [[0, "a", 0, 0, []]], [[2, 1]], [[1, 1]], {"a": 1}, 7],
)
def test_invalid_messages_are_refused(words: Any) -> None:
    message = words if isinstance(words, bytes) else msgspec.msgpack.encode(words)
    with pytest.raises(msgspec.DecodeError):
        decode_events(message)


def test_an_event_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="does not parse"):
        JobEvent(0, b"\xff\xff").event()


@pytest.mark.parametrize(
    "error",
    [
        NodeError("not a number", code="SEQUENCE_FAILED", blame=Blame.DECODE),
        TransferError("nothing came", code="LEASE_EXPIRED", retryable=True),
        InvalidRequest("no such token", param="logit_bias"),
        Unavailable("it stops", code="NODE_STOPPING", blame=Blame.DECODE, retry_after=2.0),
    ],
)
def test_a_failure_arrives_as_the_error_that_it_was(error: PdserveError) -> None:
    found = failure_from_pb(failure_to_pb(error), Blame.BOTH)
    assert type(found) is type(error)
    for name in ("message", "code", "blame", "retryable", "param", "retry_after"):
        assert getattr(found, name) == getattr(error, name)


def test_a_failure_that_says_nothing_is_its_nodes() -> None:
    found = failure_from_pb(pb.Failure(status=99, message="\n" + "x" * 5000), Blame.DECODE)
    assert isinstance(found, NodeError) and found.blame is Blame.DECODE
    assert found.message.isprintable() and len(found.message) < MAX_PEER_TEXT + 100


def test_logprobs_of_some_tokens_and_not_of_others_are_refused() -> None:
    with pytest.raises(ValueError):
        JobTokens(0, 0, 0, (1, 2), logprobs=((-1.0, ()),)).event()


# ---- the node's end ----


def tokens(job: int, position: int = 0) -> JobTokens:
    return JobTokens.of(job, position, EVENTS[0])


def say(writer: JobWriter, position: int = 0) -> None:
    writer.tokens(position, EVENTS[0])


def kinds(message: pb.StepEvents) -> list[str | None]:
    """Returns the kinds of all that is in a message."""
    return [
        "tokens" if isinstance(each, JobTokens) else each.event().WhichOneof("event")
        for each in decode_events(message.events)
    ]


async def test_events_of_a_step_are_one_counted_message() -> None:
    stream = RouterStream()
    with ExitStack() as stack:
        writers = [stack.enter_context(stream.job(number, pytest.fail)) for number in range(4)]
        messages = stream.messages()
        for round in range(3):
            for writer in writers:
                say(writer, round)
            message = await anext(messages)
            assert message.number == round
            got = [(each.job, each.position) for each in decode_events(message.events)]
            assert got == [(job, round) for job in range(4)]
        reading = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        say(writers[3])
        assert decode_events((await reading).events) == [tokens(3)]


async def test_all_that_is_said_of_a_job_is_in_order_and_nothing_follows_its_end() -> None:
    stream = RouterStream()
    with stream.job(1, pytest.fail) as writer:
        writer.event(pb.DecodeEvent(reserved=pb.Ticket()))
        writer.event(pb.DecodeEvent(landed=pb.Landed()))
        say(writer)
        writer.end(NodeError("gone"))
        say(writer, 1)
        writer.end()
        message = await anext(stream.messages())
    assert kinds(message) == ["reserved", "landed", "tokens", "ended"]


async def test_a_reader_that_was_behind_gets_all_in_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_streams, "MAX_MESSAGE", 3)
    stream = RouterStream()
    with stream.job(1, pytest.fail) as writer:
        for position in range(8):
            say(writer, position)
        messages = stream.messages()
        got = [decode_events((await anext(messages)).events) for _ in range(3)]
        assert [len(each) for each in got] == [3, 3, 2]
        assert [each.position for part in got for each in part] == list(range(8))
        large = pb.Prefilled(prompt_logprobs=pb.PromptLogprobs(logprobs=bytes(4096)))
        say(writer)
        writer.event(pb.DecodeEvent(prefilled=large))
        say(writer)
        assert [kinds(await anext(messages)) for _ in range(3)] == [
            ["tokens"], ["prefilled"], ["tokens"],
        ]  # fmt: skip


async def test_a_reader_that_keeps_up_is_never_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "MAX_BEHIND", 3)
    stream = RouterStream()
    with stream.job(1, pytest.fail) as writer:
        messages = stream.messages()
        for position in range(10):
            say(writer, position)
            assert kinds(await anext(messages)) == ["tokens"]


async def test_a_job_waits_until_its_router_reads_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or its answer would go nowhere: the two calls may come in any order."""
    streams = RouterStreams()
    with streams.named("s") as stream:
        waiting = asyncio.create_task(stream.until_open())
        await asyncio.sleep(0)
        messages = streams.messages("s")
        reading = asyncio.ensure_future(anext(messages))
        await waiting
        with stream.job(1, pytest.fail) as writer:
            say(writer)
            assert decode_events((await reading).events) == [tokens(1)]
    await messages.aclose()
    monkeypatch.setattr(router_streams, "OPEN_TIMEOUT", 0.05)
    with streams.named("another") as stream, pytest.raises(NodeError) as caught:
        await stream.until_open()
    assert caught.value.code == "TOKEN_STREAM_LOST" and not streams._streams


Breaks = Callable[[RouterStream, JobWriter, Any], Any]


async def leaves(stream: RouterStream, writer: JobWriter, messages: Any) -> None:
    await messages.aclose()


async def falls_behind(stream: RouterStream, writer: JobWriter, messages: Any) -> None:
    for position in range(6):
        say(writer, position)


async def falls_behind_with_few(stream: RouterStream, writer: JobWriter, messages: Any) -> None:
    large = pb.Prefilled(prompt_logprobs=pb.PromptLogprobs(logprobs=bytes(6 * 1024)))
    writer.event(pb.DecodeEvent(prefilled=large))


async def stops(stream: RouterStream, writer: JobWriter, messages: Any) -> None:
    stream.close()


@pytest.mark.parametrize("breaks", [leaves, falls_behind, falls_behind_with_few, stops])
async def test_jobs_fail_with_their_stream_and_nothing_is_kept(
    breaks: Breaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_streams, "MAX_BEHIND", 5)
    streams, failed = RouterStreams(), list[PdserveError]()
    with ExitStack() as stack:
        stream = stack.enter_context(streams.named("s"))
        first = stack.enter_context(stream.job(1, lambda error: failed.append(error)))
        stack.enter_context(stream.job(2, lambda error: failed.append(error)))
        messages = streams.messages("s")
        say(first)
        await anext(messages)
        await breaks(stream, first, messages)
        assert [each.code for each in failed] == ["TOKEN_STREAM_LOST"] * 2
        say(first)  # into the void
        with pytest.raises(NodeError), stream.job(3, failed.append):
            pass
        assert [each async for each in messages] == []
    assert not streams._streams


async def test_a_node_that_stops_says_how_its_jobs_ended() -> None:
    """And takes no more."""
    streams = RouterStreams()
    messages = streams.messages("s")
    with streams.named("s") as stream, ExitStack() as stack:
        writer = stack.enter_context(stream.job(1, pytest.fail))
        say(writer)
        await anext(messages)
        streams.end()
        with pytest.raises(NodeError), stream.job(2, pytest.fail):
            pass
        reading = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0)
        writer.end(NodeError("gone"))
        assert kinds(await reading) == ["ended"]
        rest = asyncio.ensure_future(anext(messages, None))
        await asyncio.sleep(0)
        assert not rest.done(), "its job is still there"
        stack.close()
        assert await rest is None
    assert not streams._streams


async def test_a_stream_has_one_reader() -> None:
    streams = RouterStreams()
    with streams.named("s") as stream, stream.job(1, pytest.fail) as writer:
        say(writer)
        messages = streams.messages("s")
        await anext(messages)
        with pytest.raises(InvalidRequest, match="read already"):
            await anext(streams.messages("s"))
        say(writer)
        assert decode_events((await anext(messages)).events) == [tokens(1)]
    await messages.aclose()


# ---- the router's end ----


@pytest.fixture
async def four(tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(tmp_path, ("p0", "p1", "d0", "d1")) as cluster:
        yield cluster


def streams_of(cluster: FakeCluster) -> dict[str, NodeStream]:
    return {node.id: stream for node, stream in cluster.pipeline.streams._streams.items()}


async def test_all_requests_on_a_node_share_one_stream(four: FakeCluster) -> None:
    await asyncio.gather(*(four.ask() for _ in range(8)))
    before = streams_of(four)
    await asyncio.gather(*(four.ask() for _ in range(8)))
    assert streams_of(four) == before and set(before) == {"d0", "d1"}
    assert not any(stream._jobs for stream in before.values())
    assert all(len(four[name].streams._streams) == 1 for name in before)


def skips(message: pb.StepEvents) -> Iterable[Any]:
    message.number += 1
    return (message,)


def babbles(message: pb.StepEvents) -> Iterable[Any]:
    message.events = b"\xc1"
    return (message,)


def mumbles(message: pb.StepEvents) -> Iterable[Any]:
    return (b"\xff\xff",)


def repeats(message: pb.StepEvents) -> Iterable[Any]:
    return (message, message)


def half_scored(message: pb.StepEvents) -> Iterable[Any]:
    return changed(
        message,
        lambda each: (
            msgspec.structs.replace(each, logprobs=((-1.0, ()),) * 2)
            if isinstance(each, JobTokens)
            else each
        ),
    )


def garbles(message: pb.StepEvents) -> Iterable[Any]:
    return changed(
        message,
        lambda each: each if isinstance(each, JobTokens) else JobEvent(each.job, b"\xff\xff"),
    )


def changed(message: pb.StepEvents, change: Callable[[StepEvent], StepEvent]) -> Iterable[Any]:
    events = encode_events([change(each) for each in decode_events(message.events)])
    return (pb.StepEvents(number=message.number, events=events),)


@pytest.mark.parametrize("tells", [skips, babbles, mumbles, repeats, half_scored, garbles])
async def test_requests_leave_a_node_whose_stream_is_not_what_it_must_be(
    four: FakeCluster, tells: Callable[[Any], Iterable[Any]]
) -> None:
    four["d0"].streams_message = tells
    async with asyncio.timeout(60):
        answers = [await four.ask() for _ in range(6)]
    assert sum(stats.timeline.migrations for stats in answers) > 0
    four["d0"].streams_message = lambda message: (message,)
    for node in four.registry.nodes():
        node.breaker.succeeded()
        node.lost = False
        four.registry.kinds.changed(node)
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
        for stream in list(node.streams._streams.values()):
            stream.close()
        while len(four.pipeline.streams._streams) > 1:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        assert (await asking).timeline.migrations == 1
        for node in four.registry.nodes():
            node.breaker.succeeded()
            node.lost = False
            four.registry.kinds.changed(node)
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
    jobs: list[Any] = [job for each in streams_of(four).values() for job in each._jobs.values()]
    waiting = [job.receiver._state for job in jobs]
    while not all(sum(state.generated) == 4 for state in waiting):
        await asyncio.sleep(0.01)  # all but the tokens that hang have come
    (stream,) = (each for name, each in streams_of(four).items() if name == "d0")
    victim, other = list(stream._jobs)[:2]
    taken: list[JobTokens] = []
    receiver = stream._jobs[other]
    stream._jobs[other] = type("", (), {"take": taken.append, "fail": taken.append})()
    counting: Any = stream._jobs[victim]
    attempt = counting.receiver
    assert isinstance(attempt, Attempt)
    generated = list(attempt._state.generated)
    stream._deliver(encode_events([tokens(victim, 10**6), tokens(other)]))
    stream._deliver(encode_events([tokens(victim, sum(generated))]))  # by accident it would fit
    assert attempt._state.generated == generated
    assert taken == [tokens(other)] and not stream.ended
    stream._jobs[other] = receiver
    four["d0"].on_token = four["d1"].on_token = {}
    await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_a_failure_comes_after_the_tokens_before_it(four: FakeCluster) -> None:
    """The client has them, and the node that goes on does not make them again."""
    lost = NodeError("gone", code="SEQUENCE_FAILED", blame=Blame.DECODE)
    four["d0"].on_token = four["d1"].on_token = {4: fails(lost, times=1)}
    stats = await four.ask()
    assert stats.timeline.migrations == 1
    first, second = (job for name in ("d0", "d1") for job in four[name].jobs)
    begun = sorted(len(job.choices[0].output_token_ids) for job in (first, second))
    assert begun == [0, 5]


async def test_a_call_that_ends_before_its_jobs_end_is_read_says_nothing(
    four: FakeCluster,
) -> None:
    """Only the stream says how a job ended, however late it comes."""
    late: list[Any] = []

    def last_one_late(message: pb.StepEvents) -> Iterable[Any]:
        events = decode_events(message.events)
        if not late and not any(isinstance(e, JobTokens) and e.finish_reason for e in events):
            return (message,)
        late.append(message)
        return ()

    four["d0"].streams_message = four["d1"].streams_message = last_one_late
    asking = asyncio.create_task(four.ask())
    while not late:
        await asyncio.sleep(0.01)
    while any(four[name].open for name in ("d0", "d1")):
        await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert not asking.done()
    (stream,) = streams_of(four).values()
    stream._deliver(late[0].events)
    assert (await asking).timeline.migrations == 0
