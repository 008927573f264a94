"""Whatever a peer or a client says is understood or refused: never a crash, a hang, a foreign
block touched, or an error without a type. Examples are drawn the same way every time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from fakes_pipeline import FakeGenerator, byte_level_folder, served_model
from kv_fakes import Geometry, shared_cache
from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.config.router import RouterConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import InvalidRequest, RequestError, TransferError
from pdserve.common.core.request import GenerateJob
from pdserve.common.node.model_facts import check_job
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2, inference_pb2
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.kv_transfer.commands import Reply, decode_event
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    KVConnector,
    Landed,
    RankContext,
    RunDigest,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.shm import Greeting, ShmConnector
from pdserve.kv_transfer.connectors.tcp import Endpoint, Options, TCPConnector, TCPTransport
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.frame import HEADER_NBYTES, Frame, FrameKind
from pdserve.kv_transfer.layout import CacheView, Piece, Rect, Share, plan
from pdserve.kv_transfer.rank.digester import Digester
from pdserve.kv_transfer.rank.group_connector import GroupConnector
from pdserve.kv_transfer.rank.worker_connector import WorkerConnector
from pdserve.router.api.app_state import AppState
from pdserve.router.grpc.service import InferenceServicer
from pdserve.router.http.app import make_app
from pdserve.router.http.server import HTTPServer
from thinned import EXAMPLES

settings.register_profile(
    "fuzz",
    derandomize=True,
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fuzz")

GEOMETRY = Geometry(num_blocks=8)
RECT = Rect(0, GEOMETRY.layers, 0, GEOMETRY.heads)
ID = b"transfer-id-0001"
OURS = (5, 2, 6)  # the transfer's blocks
OTHERS = [block for block in range(GEOMETRY.num_blocks) if block not in OURS]

U32 = st.integers(0, 2**32 - 1)
SMALL = st.integers(0, 6)


def ints(largest: int) -> st.SearchStrategy[int]:
    """Mostly such as make sense, else any."""
    return st.integers(0, 6) | st.integers(0, largest)


# ---- the data plane -----------------------------------------------------------------------

RECTS = st.just(RECT) | st.builds(Rect, *[ints(2**32 - 1)] * 4) | st.builds(Rect, *[SMALL] * 4)
FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    transfer_id=st.just(ID) | st.binary(min_size=16, max_size=16),
    epoch=st.just(1) | ints(2**32 - 1),
    rect=RECTS,
    first=ints(2**32 - 1),
    count=ints(2**32 - 1),
    nbytes=ints(2**64 - 1),
)


def fitting(frame: Frame) -> bytes:
    """The frame with as many bytes as it should have, when that is few enough."""
    cache = GEOMETRY.shape(RECT)
    head = cache[4] * cache[5] * GEOMETRY.dtype.itemsize
    nbytes = frame.rect.area * 2 * frame.count * head
    if not 0 < nbytes < 1 << 16:
        return frame.encode()
    fields = (frame.transfer_id, frame.epoch, frame.rect, frame.first, frame.count)
    payload = Frame(frame.kind, *fields, nbytes).encode() + b"\x3f" * nbytes
    return payload + Frame(FrameKind.CONFIRM, count=1).encode() * (frame.kind is FrameKind.DATA)


HELLO = Frame(FrameKind.HELLO, nbytes=4).encode() + b"same"
SAYINGS = st.lists(
    FRAMES.map(Frame.encode) | FRAMES.map(fitting) | st.binary(max_size=80), max_size=6
).map(b"".join)
STREAMS = SAYINGS.map(HELLO.__add__) | SAYINGS | st.binary(max_size=300)


@given(st.binary(max_size=2 * HEADER_NBYTES) | FRAMES.map(Frame.encode))
def test_headers(header: bytes) -> None:
    try:
        frame = Frame.decode(header)
    except TransferError as error:
        assert error.code == "BAD_FRAME"
    else:
        assert frame.encode() == header


class Sink:
    """A connector that takes blocks, and what it said."""

    def __init__(
        self, kind: type[KVConnector], fill: float = 0.0, keys: tuple[bytes, ...] = ()
    ) -> None:
        self.cache, self.fd = shared_cache(GEOMETRY.shape(RECT), GEOMETRY.dtype)
        self.cache.fill_(fill)
        self.said = b""  # to all who were heard
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.view = CacheView(self.cache, RECT, self.fd)
        context = RankContext(self.view, "127.0.0.1", "same", self.events.put, keys)
        self.connector: Any = kind(context, {})

    def hear(self, stream: bytes, fd: int | None = None) -> None:
        """One connection, from its first byte to its end, which is counted."""
        before = self.ended()
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with theirs:
                self.connector._serve(SocketPipe(theirs))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with ours, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            ours.settimeout(60.0)
            ours.sendall(stream)
            if fd is not None:
                socket.send_fds(ours, [b"F"], [fd])
            ours.shutdown(socket.SHUT_WR)
            while data := ours.recv(1 << 16):
                self.said += data
        thread.join(60.0)
        assert not thread.is_alive(), "the connection's thread hangs"
        assert self.ended() == before + 1

    def ended(self) -> int:
        return sum(count for name, count in self.connector.counts.items() if name.isupper())

    def close(self) -> None:
        self.connector.close(5.0)
        os.close(self.fd)


@pytest.fixture(params=[TCPConnector, ShmConnector])
def kind(request: pytest.FixtureRequest) -> type[KVConnector]:
    return request.param


@contextlib.contextmanager
def sink_and_source(kind: type[KVConnector]) -> Iterator[tuple[Sink, Sink]]:
    sink, source = Sink(kind), Sink(kind, fill=1.0)
    try:
        yield sink, source
    finally:
        source.close()
        sink.close()


def check_still_serves(sink: Sink, source: Sink) -> None:
    """After all that, an honest transfer lands."""
    sink.connector.quiesce(ID)
    while not sink.events.empty():
        sink.events.get()
    sink.connector.accept(SinkTransfer(ID, 1, 0, OURS))
    piece = (Piece(0, 0, RECT), sink.connector.endpoint())
    source.connector.submit(SourceTransfer(ID, 1, (piece,)))
    source.connector.ready(ID, BlockRun(0, 3), (0, 1, 2), True)
    while not isinstance(event := sink.events.get(timeout=30.0), Landed):
        assert not isinstance(event, Failed)
    assert (sink.cache[:, :, list(OURS)] == 1.0).all()


def check_what_was_heard(sink: Sink) -> None:
    assert not sink.cache[:, :, OTHERS].any(), "a block of no transfer was written"
    assert not sink.connector.counts["CONNECTOR_FAILED"], "an error without a type"


def memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_streams_at_a_sink(kind: type[KVConnector]) -> None:
    before = memory_kib()
    with sink_and_source(kind) as (sink, source):

        @given(STREAMS)
        @example(HELLO)
        @example(HELLO + Frame(FrameKind.BEGIN, ID, 1, RECT).encode())
        @example(HELLO + Frame(FrameKind.DATA, ID, 1, RECT, 0, 3, 1 << 40).encode())
        def hear(stream: bytes) -> None:
            sink.connector.accept(SinkTransfer(ID, 1, 0, OURS))
            sink.hear(stream)
            sink.connector.quiesce(ID)
            check_what_was_heard(sink)

        hear()
        check_still_serves(sink, source)
    assert memory_kib() - before < 128 << 10


def test_streams_at_a_sink_that_asks_for_a_key() -> None:
    """Nothing that a stranger says is an answer to a number that it has not seen yet."""
    sink = Sink(TCPConnector, keys=(b"a key of thirty-two bytes, or so",))
    challenge, proof = (
        Frame(kind, nbytes=32).encode() + bytes(32)
        for kind in (FrameKind.CHALLENGE, FrameKind.PROOF)
    )

    @given(STREAMS, st.sampled_from([b"", challenge, challenge + proof]))
    @example(HELLO, challenge + proof)
    def hear(stream: bytes, before: bytes) -> None:
        sink.connector.accept(SinkTransfer(ID, 1, 0, OURS))
        sink.hear(before + stream)
        sink.connector.quiesce(ID)

    try:
        hear()
        assert not sink.cache.any() and not sink.connector.counts["CONNECTOR_FAILED"]
        assert Frame(FrameKind.WELCOME).encode() not in sink.said
    finally:
        sink.close()


GREETINGS = st.fixed_dictionaries(
    {
        "fingerprint": st.just("same") | st.text(max_size=9),
        "rect": st.just([0, 3, 0, 2]) | st.lists(st.integers(-3, 9), min_size=4, max_size=4),
        "num_blocks": st.just(8) | st.integers(-(2**63), 2**63 - 1),
        "offset": st.just(0) | st.integers(-(2**63), 2**63 - 1),
        "nbytes": st.integers(-1, 1 << 14) | st.integers(-(2**63), 2**63 - 1),
    }
)


def test_greetings_at_a_shm_sink() -> None:
    with sink_and_source(ShmConnector) as (sink, source):
        honest = Greeting("same", RECT, 8, 0, source.cache.nbytes)

        @given(
            st.just(honest)
            | GREETINGS.map(lambda fields: {**fields, "rect": Rect(*fields["rect"])})
            | st.recursive(st.none() | U32, st.lists, max_leaves=3),
            st.booleans(),
            SAYINGS,
        )
        @example(honest, True, b"")
        def hear(greeting: Any, gives_memory: bool, rest: bytes) -> None:
            payload = msgspec.msgpack.encode(greeting)
            hello = Frame(FrameKind.HELLO, nbytes=len(payload)).encode() + payload
            sink.connector.accept(SinkTransfer(ID, 1, 0, OURS))
            sink.hear(hello + rest, source.fd if gives_memory else None)
            sink.connector.quiesce(ID)
            check_what_was_heard(sink)

        hear()
        check_still_serves(sink, source)


@given(
    st.binary(max_size=40)
    | st.tuples(st.text(max_size=300), st.integers(-(2**63), 2**64 - 1)).map(
        lambda at: msgspec.msgpack.encode({"host": at[0], "port": at[1]})
    )
)
@example(msgspec.msgpack.encode(Endpoint("a..b", 1)))
@example(msgspec.msgpack.encode(Endpoint("nul\0", 1)))
def test_tcp_endpoints(endpoint: bytes) -> None:
    def resolve(host: str, *_: Any) -> Any:
        """Raises what a resolver raises before it asks the network; nothing is asked here."""
        host.encode("idna")
        raise socket.gaierror("not asked")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        patch.setattr(socket, "getaddrinfo", resolve)
        TCPTransport(Options()).dial(endpoint)


# ---- between a node and its ranks ---------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)  # fmt: skip
NAMES = st.sampled_from(["Accept", "Submit", "Ready", "Verify", "Quiesce", "Release", "Landed"])
COMMANDS = st.tuples(NAMES, st.dictionaries(st.sampled_from(["transfer_id", "run", "last"]), PLAIN))
MESSAGES = (
    st.binary(max_size=60)
    | PLAIN.map(msgspec.msgpack.encode)
    | COMMANDS.map(lambda each: msgspec.msgpack.encode([0, {"type": each[0], **each[1]}]))
    | st.tuples(ints(2), NAMES, PLAIN).map(msgspec.msgpack.encode)
)


def test_commands_to_a_rank() -> None:
    with sink_and_source(TCPConnector) as (sink, _):
        rank = WorkerConnector({0: GroupConnector(sink.connector, source=False)})

        @given(MESSAGES)
        def handle(message: bytes) -> None:
            reply = msgspec.msgpack.decode(rank.handle(message), type=Reply)
            assert reply.error is None or reply.error.code

        handle()


@given(MESSAGES)
def test_events_of_a_rank(message: bytes) -> None:
    try:
        decode_event(message)
    except TransferError as error:
        assert error.code == "BAD_FRAME"


# ---- gRPC ---------------------------------------------------------------------------------

ENDPOINTS = st.builds(
    cluster_pb2.RankEndpoint,
    rank=ints(2**32 - 1), layer_start=ints(2**32 - 1), layer_end=ints(2**32 - 1),
    head_start=ints(2**32 - 1), head_end=ints(2**32 - 1), endpoint=st.binary(max_size=9),
)  # fmt: skip
TICKETS = st.builds(
    cluster_pb2.Ticket,
    transfer_id=st.just(ID) | st.binary(max_size=20),
    epoch=U32, lease_s=st.just(1.0) | st.floats(),
    address=st.just("h:1") | st.text(), fingerprint=st.text(),
    block_size=ints(2**32 - 1), num_tokens=ints(2**32 - 1),
    first_blocks=st.lists(ints(2**32 - 1), max_size=2), endpoints=st.lists(ENDPOINTS, max_size=3),
)  # fmt: skip
GOOD = {"rank": 0, "layer_end": 3, "head_end": 2}


@given(TICKETS)
@example(
    cluster_pb2.Ticket(
        transfer_id=ID, lease_s=1, address="h:1", block_size=4, num_tokens=9, first_blocks=[0],
        endpoints=[cluster_pb2.RankEndpoint(**GOOD)],
    )
)  # fmt: skip
def test_tickets(message: cluster_pb2.Ticket) -> None:
    with contextlib.suppress(TransferError):
        ticket = Ticket.from_pb(message)
        assert max(ticket.first_blocks) <= ticket.num_blocks
        assert Ticket.from_pb(ticket.to_pb()) == ticket
        plan([Share(0, RECT)], [each.share for each in ticket.endpoints])


SAMPLING = st.builds(
    inference_pb2.SamplingParams,
    max_tokens=ints(2**32 - 1), min_tokens=ints(2**32 - 1),
    temperature=st.floats(width=32), top_p=st.floats(width=32),
    top_k=st.integers(-(2**31), 2**31 - 1), min_p=st.floats(width=32), seed=ints(2**64 - 1),
    presence_penalty=st.floats(width=32), frequency_penalty=st.floats(width=32),
    repetition_penalty=st.floats(width=32),
    logit_bias=st.dictionaries(ints(2**32 - 1), st.floats(width=32), max_size=3),
    stop=st.lists(st.text(), max_size=6), stop_token_ids=st.lists(U32, max_size=3),
    ignore_eos=st.booleans(), logprobs=st.none() | ints(2**32 - 1), n=st.none() | U32,
)  # fmt: skip
TOKENS = st.lists(ints(2**32 - 1), max_size=9)


@given(
    st.builds(
        cluster_pb2.Job,
        request_id=st.text(),
        prompt_token_ids=TOKENS,
        sampling=SAMPLING,
        choices=st.lists(
            st.builds(cluster_pb2.Choice, index=U32, output_token_ids=TOKENS), max_size=3
        ),
    )
)
def test_jobs(message: cluster_pb2.Job) -> None:
    with contextlib.suppress(InvalidRequest):
        job = convert.job_from_pb(message)
        check_job(job, vocab_size=100, max_model_len=8)
        assert isinstance(job, GenerateJob) and max(job.prompt_token_ids) < 100


@given(
    st.lists(
        st.builds(RunDigest, U32, RECTS, st.builds(BlockRun, SMALL, SMALL), st.binary(max_size=16)),
        max_size=5,
    )
)
@example([RunDigest(0, RECT, BlockRun(0, 3), b"")])
def test_digests(digests: list[RunDigest]) -> None:
    cache, fd = shared_cache(GEOMETRY.shape(RECT), GEOMETRY.dtype)
    digester = Digester(CacheView(cache, RECT, fd), "same")
    try:
        assert digester.verify(SinkTransfer(ID, 1, 0, OURS), digests)[0] == digests
    except TransferError as error:
        assert error.code == "BAD_FRAME"
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("tokenizer")))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = st.recursive(
    SCALARS | st.sampled_from([2**64, -(2**70), 10**300, 10**4200]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
HALVES = st.text(st.characters(categories=["Cs", "Lu"]), max_size=4)
# JSON in a string: what a body's own parser does not look into.
TOLD = (
    JSON.map(json.dumps)
    | st.dictionaries(HALVES, HALVES, max_size=2).map(json.dumps)
    | st.sampled_from([500, 5000]).map(lambda deep: '{"a":' * deep + "[" * deep)
    | st.sampled_from([90, 400, 900]).map(lambda deep: '{"a":' * deep + "1" + "}" * deep)
    | st.text(max_size=9)
)
CHATS = st.builds(
    inference_pb2.Chat,
    messages=st.lists(
        st.builds(
            inference_pb2.Message, role=st.sampled_from(["user", "assistant", "tool", "x"]),
            content=st.text(max_size=9),
            tool_calls=st.lists(
                st.builds(inference_pb2.ToolCall, name=st.text(max_size=3), arguments=TOLD),
                max_size=2,
            ),
        ),
        max_size=3,
    ),
    tools=st.lists(st.builds(inference_pb2.Tool, name=st.just("f"), parameters=TOLD), max_size=2),
    mode=st.sampled_from([0, 1, 2, 3]),
)  # fmt: skip


@given(
    st.builds(
        inference_pb2.GenerateRequest,
        request_id=st.just("") | st.text(), model=st.just("tiny") | st.text(),
        token_ids=st.builds(inference_pb2.TokenIds, ids=TOKENS), sampling=SAMPLING,
    )
    | st.builds(inference_pb2.GenerateRequest, text=st.text(), sampling=SAMPLING)
    | st.builds(inference_pb2.GenerateRequest, chat=CHATS, sampling=SAMPLING)
)  # fmt: skip
def test_requests_over_grpc(tokenizer: Tokenizer, request_: inference_pb2.GenerateRequest) -> None:
    serving = AppState(pipeline=FakeGenerator(tokenizer), served=served_model(tokenizer))
    service = InferenceServicer(serving)
    with contextlib.suppress(RequestError):
        asyncio.run(service._make_request(request_))


# ---- HTTP ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tokenizer: Tokenizer) -> Iterator[http.client.HTTPConnection]:
    """A connection to the API, which runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def on_loop(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def start() -> HTTPServer:
        serving = AppState(pipeline=FakeGenerator(tokenizer), served=served_model(tokenizer))
        return await HTTPServer.start(
            make_app(serving, CollectorRegistry(), 1 << 20), "127.0.0.1", 0
        )

    server = on_loop(start())
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    yield connection
    connection.close()
    on_loop(server.stop(0))
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5.0)
    loop.close()


CHOICES = st.integers(-1, 3) | JSON


def mostly(sense: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any JSON now and then: a body with several fields is refused for the first that is odd."""
    return st.integers(0, 9).flatmap(lambda n: JSON if n == 9 else sense)


MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": mostly(st.sampled_from(["user", "assistant", "system", "tool"])),
        "content": mostly(st.text(max_size=9)),
        "name": JSON,
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "function": st.fixed_dictionaries(
                        {"name": st.just("f"), "arguments": TOLD | JSON}
                    )
                }
            ),
            max_size=2,
        )
        | JSON,
    },
)
SCHEMA = st.fixed_dictionaries(
    {},
    optional={
        "type": mostly(st.sampled_from(["object", "object", "string"])),
        "properties": st.dictionaries(st.text(max_size=3), JSON, max_size=3) | JSON,
        **dict.fromkeys(("pattern", "enum", "const", "minimum", "maxLength", "$ref"), JSON),
    },
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": mostly(st.sampled_from("fgh"))}, optional={"parameters": mostly(SCHEMA)}
            ),
        }
    ),
    max_size=2,
)
NAMED = [{"type": "function", "function": {"name": "f"}}, {"type": "tool", "name": "f"}]
CHOSEN = mostly(st.sampled_from(["none", "none", "auto", "required", *NAMED]))
GENERATION = {
    "max_tokens": CHOICES, "min_tokens": CHOICES, "temperature": CHOICES, "top_p": CHOICES,
    "top_k": CHOICES, "min_p": CHOICES, "n": CHOICES, "seed": CHOICES,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5) | JSON,
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3) | JSON,
    "logit_bias": st.dictionaries(st.integers(-1, 300).map(str) | st.text(max_size=5), CHOICES),
    "presence_penalty": CHOICES, "repetition_penalty": CHOICES, "ignore_eos": JSON,
    "stream": st.booleans() | JSON, "stream_options": JSON | st.just({"include_usage": True}),
    "response_format": JSON
    | SCHEMA.map(lambda each: {"type": "json_schema", "json_schema": {"schema": each}}),
    "guided_json": TOLD | SCHEMA | JSON, "structured_outputs": JSON,
    "logprobs": st.booleans() | CHOICES, "model": JSON | st.just("tiny"),
}  # fmt: skip
TEMPLATE = {
    "add_generation_prompt": st.booleans() | JSON, "continue_final_message": st.booleans() | JSON,
    "add_special_tokens": JSON, "chat_template": JSON,
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(["messages", "tokenize", "conversation", "chat_template", "loop", "x"])
        | st.text(max_size=9),
        JSON,
        max_size=3,
    ),
}  # fmt: skip
MESSAGES_FIELD = {"messages": mostly(st.lists(MESSAGE, max_size=3))}
PROMPT = {"prompt": st.text(max_size=9) | st.lists(st.integers(-1, 300), max_size=5) | JSON}


ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])},
    optional={
        "role": mostly(st.sampled_from(["user", "assistant"])), "content": mostly(st.text()),
        "call_id": mostly(st.text(max_size=3)), "name": mostly(st.just("f")),
        "arguments": mostly(TOLD), "output": mostly(TOLD),
    },
)  # fmt: skip
BLOCK = st.fixed_dictionaries(
    {"type": mostly(st.sampled_from(["text", "tool_use", "tool_result", "thinking"]))},
    optional={
        "text": mostly(st.text(max_size=9)), "id": mostly(st.just("c")),
        "name": mostly(st.just("f")),
        "input": mostly(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
        "tool_use_id": mostly(st.just("c")), "content": mostly(TOLD),
    },
)  # fmt: skip
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]),
     "content": mostly(st.text(max_size=9) | st.lists(BLOCK, max_size=3))}
)  # fmt: skip


def some_of(fields: dict[str, Any], always: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The fields of `always`, and at most three others."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({**{n: fields[n] for n in chosen}, **always})
    )


BODIES = {
    "/v1/completions": some_of({**GENERATION, "echo": st.booleans(), "best_of": CHOICES}, PROMPT),
    "/v1/chat/completions": some_of(
        {
            **GENERATION,
            **TEMPLATE,
            "top_logprobs": CHOICES,
            "tools": TOOLS | JSON,
            "tool_choice": CHOSEN,
        },
        MESSAGES_FIELD,
    ),
    "/v1/responses": some_of(
        {
            "tools": TOOLS.map(lambda tools: [{**t, **t["function"]} for t in tools]) | JSON,
            "tool_choice": CHOSEN,
            "metadata": JSON,
            "text": JSON,
            "reasoning": JSON,
            "instructions": st.text(max_size=9) | JSON,
        },
        {"input": mostly(st.text(max_size=9) | st.lists(ITEM, max_size=3))},
    ),
    "/v1/messages": some_of(
        {
            "tools": TOOLS.map(
                lambda tools: [
                    {"name": t["function"]["name"], "input_schema": t["function"].get("parameters")}
                    for t in tools
                ]
            )
            | JSON,
            "tool_choice": CHOSEN,
            "system": JSON,
            "metadata": JSON,
            "stop_sequences": JSON,
        },
        {"messages": mostly(st.lists(TURN, max_size=3)), "max_tokens": mostly(st.just(2))},
    ),
    "/tokenize": some_of({**TEMPLATE, **PROMPT}, MESSAGES_FIELD) | some_of(TEMPLATE, PROMPT),
    "/detokenize": some_of({"model": JSON}, {"tokens": PROMPT["prompt"]}),
}


RIGHT = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", BODIES)
def test_http_bodies(site: http.client.HTTPConnection, path: str) -> None:
    seen = set()

    @settings(max_examples=2 * EXAMPLES)
    @example(json.dumps(RIGHT[path]).encode())
    @given(BODIES[path].map(json.dumps).map(str.encode) | JSON.map(json.dumps).map(str.encode))
    @example(b"{")
    @example(b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}')
    @example(b"[" * 100_000)
    @example(b'{"a":' * 100_000)
    @example(b"\xff\xfe")
    def post(body: bytes) -> None:
        site.request("POST", path, body, {"Content-Type": "application/json"})
        response = site.getresponse()
        text = response.read()
        seen.add(response.status)
        assert response.status in (200, 400, 404), text
        assert b"internal error" not in text, text
        if response.status != 200:
            error = set(json.loads(text)["error"])
            assert {"message", "type"} <= error <= {"message", "type", "param", "code"}

    post()
    assert {200, 400} <= seen


# ---- options ------------------------------------------------------------------------------

KEYS = st.sampled_from(["port", "host", "model", "kv-connector-config", "api-key", "seed"])
VALUES = PLAIN.map(yaml.safe_dump) | st.text(max_size=20)
DOCUMENTS = (
    st.text(max_size=60)
    | PLAIN.map(yaml.safe_dump)
    | st.lists(st.tuples(KEYS | st.text(max_size=9), VALUES), max_size=4).map(
        lambda items: "\n".join(f"{key}: {value}" for key, value in items)
    )
)


@pytest.mark.parametrize("config", [RouterConfig, WorkerNodeConfig])
def test_config_files(config: type, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pdserve.yaml"

    @settings(max_examples=40)
    @given(DOCUMENTS)
    @example("1: a\n01: b")
    @example("2001-99-99")
    @example("? [a]\n: b")
    @example("a: !!int x")
    @example("a: !!int ''")
    @example("a: !!bool x")
    @example("a: !!timestamp x")
    @example("a: &b [*b]")
    @example("a: &b {c: *b}")
    @example("a: !!binary '*'")
    @example("kv-connector-config: {1: 2}")
    @example("kv-connector-config: {a: 2001-01-01}")
    @example("kv-connector-config: {[1]: 2}")
    def read(document: str) -> None:
        path.write_bytes(document.encode(errors="surrogatepass"))
        try:
            assert isinstance(
                parse(config, prog="x", argv=[f"--config={path}"], environ={}), config
            )
        except SystemExit as end:
            assert end.code == 2
            assert capsys.readouterr().err.startswith("x: error: ")

    read()


def test_a_config_file_that_is_nested_deeply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not among the examples above, for which hypothesis allows a recursion so deep that
    the parser needs seconds to reach its end."""
    path = tmp_path / "pdserve.yaml"
    path.write_text("[" * 10_000)
    with pytest.raises(SystemExit) as end:
        parse(RouterConfig, prog="x", argv=[f"--config={path}"], environ={})
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("x: error: ")
