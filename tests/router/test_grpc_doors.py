"""gRPC ports and those who have no business there: what strangers send is not read, what clients
send is bounded, and a crowd is refused in words."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from fakes_pipeline import FakeGenerator, byte_level_folder, served_model
from links import Link
from pdserve.common.core.errors import Overloaded
from pdserve.common.rpc import health, receive, reflection
from pdserve.common.rpc import server as rpc_server
from pdserve.common.rpc.auth import TOKEN_KEY, ClusterKey
from pdserve.common.rpc.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.common.rpc.server import AuthInterceptor, Door, GrpcServer
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.app_state import AppState
from pdserve.router.api.auth import APIKeys
from pdserve.router.grpc import chat as grpc_chat
from pdserve.router.grpc import door as grpc_door
from pdserve.router.grpc.door import INFERENCE, ClientDoor, Messages
from pdserve.router.grpc.service import InferenceServicer
from waiting import eventually

KEY, CLUSTER_KEY = "a-client-s", "of-this-cluster-alone"
BEARER = (("authorization", f"Bearer {KEY}"),)
LIMIT = 2**18  # bytes of a client's message
LARGE = b"\x0a\x00" * 2**20  # a message that a server might take, if it read it
HEALTH, REFLECT = health.SERVICE, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
RUN, RENEW = "/pdserve.v1.Prefill/Run", "/pdserve.v1.KVTransfer/Renew"
GENERATE, MODEL = INFERENCE + "Generate", INFERENCE + "GetModel"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


@pytest.fixture
def generator(tmp_path: Path) -> FakeGenerator:
    return FakeGenerator(Tokenizer.from_folder(byte_level_folder(tmp_path)))


def serving(generator: FakeGenerator, keys: str | None = KEY) -> AppState:
    model = served_model(generator.tokenizer)
    return AppState(pipeline=generator, served=model, keys=APIKeys(keys))


def client_server(
    generator: FakeGenerator,
    messages: Messages | None = None,
    keys: str | None = KEY,
    streams: int | None = None,
) -> GrpcServer:
    parts = serving(generator, keys)
    most = streams or CALLS
    door = ClientDoor(parts.keys, messages or Messages(LIMIT), parts.refused, most)
    server = GrpcServer(door, LIMIT, max_streams=streams)
    descriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server.add(descriptor, add, InferenceServicer(parts))
    return server


class Node(cluster_pb2_grpc.PrefillServicer, cluster_pb2_grpc.KVTransferServicer):
    async def Run(self, request: Any, context: Any) -> AsyncIterator[cluster_pb2.PrefillEvent]:
        yield cluster_pb2.PrefillEvent()

    async def Renew(self, request: Any, context: Any) -> cluster_pb2.RenewResponse:
        return cluster_pb2.RenewResponse(progress=7)


def node_server(door: Door | None = None) -> GrpcServer:
    server = GrpcServer(door or AuthInterceptor(ClusterKey(CLUSTER_KEY)))
    for name in ("Prefill", "KVTransfer"):
        add = getattr(cluster_pb2_grpc, f"add_{name}Servicer_to_server")
        server.add(cluster_pb2.DESCRIPTOR.services_by_name[name], add, Node())
    return server


def token(method: str, message: bytes) -> tuple[tuple[str, str], ...]:
    role = "router" if method == RUN else "prefill"
    return ((TOKEN_KEY, ClusterKey(CLUSTER_KEY).sign(role, "me", method, "here", message)),)


@asynccontextmanager
async def linked(server: GrpcServer) -> AsyncIterator[tuple[Link, grpc.aio.Channel]]:
    """The server, behind a link that counts."""
    link = Link(server.bind("127.0.0.1", 0))
    await server.start()
    proxy = await asyncio.start_server(link.join, "127.0.0.1", 0)
    address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield link, channel
    finally:
        link.close()
        proxy.close()
        await server.stop(0)


@asynccontextmanager
async def started(server: GrpcServer) -> AsyncIterator[int]:
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def dialled(port: int, *options: tuple[str, int]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)


async def told(
    channel: grpc.aio.Channel, method: str, message: bytes, metadata: Any = ()
) -> tuple[grpc.StatusCode, str]:
    """The call's status and, of an error, its code."""
    call = channel.unary_stream(method)(message, metadata=metadata, timeout=60)
    try:
        async for _ in call:
            pass
        return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), dict(error.trailing_metadata() or ()).get("pdserve-error-code", "")


# ---- strangers ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "GetModel"])
async def test_a_client_without_a_key_is_refused_before_its_message_is_read(
    method: str, generator: FakeGenerator
) -> None:
    async with linked(client_server(generator)) as (link, channel):
        refused = (grpc.StatusCode.UNAUTHENTICATED, "INVALID_API_KEY")
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            assert await told(channel, INFERENCE + method, LARGE, metadata) == refused
        assert link.sent < 2 * 2 * rpc_server.WINDOW


@pytest.mark.parametrize("method", [RUN, RENEW, REFLECT])
async def test_a_role_without_the_cluster_key_is_refused_before_its_message_is_read(
    method: str,
) -> None:
    async with linked(node_server()) as (link, channel):
        refused = (grpc.StatusCode.UNAUTHENTICATED, "CLUSTER_AUTH_FAILED")
        assert await told(channel, method, LARGE) == refused
        assert link.sent < 2 * rpc_server.WINDOW


async def test_health_is_told_to_strangers_without_reading(generator: FakeGenerator) -> None:
    async with linked(node_server()) as (link, channel):
        assert await told(channel, HEALTH + "Check", LARGE) == (grpc.StatusCode.OK, "")
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="x"), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        assert link.sent < 2 * 2 * rpc_server.WINDOW
    # Clients' messages are short, and there health says of which services it knows nothing.
    async with linked(client_server(generator)) as (link, channel):
        asked = health_pb2.HealthCheckRequest(service="x").SerializeToString()
        assert (await told(channel, HEALTH + "Check", asked))[0] is grpc.StatusCode.NOT_FOUND
        assert (await told(channel, HEALTH + "Check", b"x" * 5000))[1] == "REQUEST_TOO_LARGE"


async def test_a_host_that_asks_for_health_without_an_end_leaves_room_to_others(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "MAX_OWN_READS", 2)
    monkeypatch.setattr(health, "READ", 1.0)
    async with started(client_server(generator)) as port, dialled(port) as channel:
        flood = [channel.stream_unary(HEALTH + "Check")(timeout=60) for _ in range(3)]
        ends = await asyncio.gather(*flood, return_exceptions=True)
        codes = Counter(each.code() for each in ends if isinstance(each, grpc.aio.AioRpcError))
        refused, late = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED
        assert codes == {refused: 1, late: 2}
        assert (await told(channel, HEALTH + "Check", b""))[0] is grpc.StatusCode.OK


async def test_health_is_watched_by_few_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    server = node_server()
    async with linked(server) as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(16)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await told(channel, HEALTH + "Watch", b""))[1] == "OVERLOADED"
        await server.set_healthy(False)
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        monkeypatch.setattr(health, "WATCH", 0.05)
        while (ended := await told(channel, HEALTH + "Watch", b""))[1] == "OVERLOADED":
            await asyncio.sleep(0.01)  # until it is known that the others have left
        assert ended[0] is grpc.StatusCode.OK


async def test_the_contracts_are_told_to_few_at_a_time(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflection, "MAX_CALLS", 1)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    async with linked(client_server(generator, keys=None)) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=60)
        await call.write(question)
        assert (await call.read()).list_services_response.service
        asked = question.SerializeToString()
        assert (await told(channel, REFLECT, asked))[1] == "OVERLOADED"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert (await told(channel, REFLECT, asked))[0] is grpc.StatusCode.OK
        assert (await told(channel, REFLECT, b"x" * 5000))[1] == "INVALID_REQUEST"


# ---- messages -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
async def test_a_call_has_exactly_one_message(count: int, generator: FakeGenerator) -> None:
    async with started(client_server(generator)) as port, dialled(port) as channel:
        call = channel.stream_stream(MODEL)(iter([b""] * count), metadata=BEARER, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError, match="exactly one message") as caught:
            [each async for each in call]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(caught.value)
        assert status is not None and status.details[0].Is(ErrorInfo.DESCRIPTOR)
        assert await told(channel, MODEL, b"", BEARER) == (grpc.StatusCode.OK, "")


async def test_an_unparseable_message_is_the_caller_s_mistake(
    generator: FakeGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(client_server(generator)) as port, dialled(port) as channel:
        wrong = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert await told(channel, GENERATE, b"\xff" * 9, BEARER) == wrong
        too_large = (grpc.StatusCode.RESOURCE_EXHAUSTED, "")  # gRPC's own, from its length alone
        assert await told(channel, GENERATE, LARGE, BEARER) == too_large
    assert not caplog.records


async def test_a_chat_of_very_many_messages_is_refused_before_it_is_converted(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_chat, "_message", lambda message: pytest.fail("converted"))
    many = pb_chat(100_000)
    async with started(client_server(generator)) as port, dialled(port) as channel:
        wrong = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert await told(channel, GENERATE, many, BEARER) == wrong


def pb_chat(count: int) -> bytes:
    messages = [inference_pb2.Message()] * count
    return inference_pb2.GenerateRequest(chat={"messages": messages}).SerializeToString()


async def test_a_message_that_comes_drop_by_drop_is_given_up(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive, "GRACE", 0.1)
    monkeypatch.setattr(receive, "RATE", 2**30)
    async with started(client_server(generator)) as port, dialled(port) as channel:
        call = channel.stream_stream(MODEL)(metadata=BEARER, timeout=60)
        await call.wait_for_connection()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert dict(caught.value.trailing_metadata())["pdserve-error-code"] == ("MESSAGE_TOO_SLOW")


async def test_only_the_methods_that_need_them_take_large_messages() -> None:
    async with started(node_server()) as port, dialled(port) as channel:
        large = cluster_pb2.PrefillRequest(
            ticket=cluster_pb2.Ticket(address="x" * 2**21)
        ).SerializeToString()
        assert await told(channel, RUN, large, token(RUN, large)) == (grpc.StatusCode.OK, "")
        code = (await told(channel, RENEW, large, token(RENEW, large)))[1]
        assert code == "REQUEST_TOO_LARGE"
        small = cluster_pb2.RenewRequest(epoch=1).SerializeToString()
        assert (await told(channel, RENEW, small, token(RENEW, small)))[1] == ""
        other = await told(channel, RENEW, b"", token(RENEW, small))
        assert other == (grpc.StatusCode.UNAUTHENTICATED, "CLUSTER_AUTH_FAILED")


async def test_bytes_of_clients_messages_are_bounded_until_they_are_requests(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_door, "HELD", 4)
    messages = Messages(LIMIT, share=1.0)
    most, known = 0, list[int]()
    read, preprocess = receive.read_message, AppState.preprocess

    async def reading(context: Any, limit: int) -> bytes:
        nonlocal most
        raw = await read(context, limit)
        most = max(most, messages._room.held)
        return raw

    async def preprocessing(*args: Any) -> Any:
        known.append(messages._room.held)
        return await preprocess(*args)

    monkeypatch.setattr(grpc_door, "read_message", reading)
    monkeypatch.setattr(AppState, "preprocess", preprocessing)
    generator.delay = 0.02
    async with started(client_server(generator, messages)) as port, dialled(port) as channel:
        text = inference_pb2.GenerateRequest(text="h", request_id="x").SerializeToString()
        await told(channel, GENERATE, text, BEARER)
        assert max(known) <= len(text)  # once it is there, no more than it has
        ends = await asyncio.gather(*(told(channel, GENERATE, text, BEARER) for _ in range(40)))
        assert set(ends) == {(grpc.StatusCode.OK, "")}
        assert LIMIT <= most <= 4 * LIMIT and messages._room.held == 0
        calls = [asyncio.create_task(told(channel, GENERATE, text, BEARER)) for _ in range(9)]
        await eventually(lambda: generator.open == 9)  # more than were read at once: they let go
        assert messages._room.held == 0
        await asyncio.gather(*calls)


async def test_a_burst_of_one_connection_stands_before_no_other(generator: FakeGenerator) -> None:
    """A call that is held back in its client is behind the others' in the server's line."""
    messages, apart = Messages(LIMIT, timeout=60), ("grpc.use_local_subchannel_pool", 1)
    another = (("authorization", "Bearer another-s"),)
    server = client_server(generator, messages, keys=f"{KEY},another-s", streams=4)
    async with (
        started(server) as port,
        dialled(port, apart) as crowded,
        dialled(port, apart) as other,
    ):
        burst = [crowded.stream_stream(MODEL)(metadata=BEARER, timeout=60) for _ in range(40)]
        await eventually(lambda: messages._room.held == 4 * LIMIT)
        for _ in range(3):  # whatever had come by then would have been seen before these
            assert (await told(other, MODEL, b"", another))[0] is grpc.StatusCode.OK
            assert messages._room.held == 4 * LIMIT and not messages._room.waiting
        for call in burst:
            call.cancel()
        await eventually(lambda: not messages._room.held)


@asynccontextmanager
async def crowd(port: int, metadata: Any) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Three calls on each of many connections: what each is told."""
    apart = ("grpc.use_local_subchannel_pool", 1)
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(dialled(port, apart)) for _ in range(40)]
        calls = [c.stream_stream(MODEL)(metadata=metadata, timeout=60) for c in channels * 3]
        tasks = [asyncio.create_task(each.read()) for each in calls]
        yield tasks
        for call in calls:
            call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("metadata", [BEARER, ()], ids=["one key", "no key"])
async def test_a_client_of_many_connections_stands_before_no_other(
    metadata: Any, generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the calls of one connection; what is too many is refused at a pace, so that it does
    not come again at once. Each refusal says when to try again, or that the key is missing."""
    monkeypatch.setattr(grpc_door, "REFUSAL_PAUSE", 3600)
    another = (("authorization", "Bearer another-s"),)
    server = client_server(generator, Messages(LIMIT), keys=f"{KEY},another-s", streams=4)
    async with started(server) as port, dialled(port) as other, crowd(port, metadata) as calls:
        await eventually(lambda: sum(task.done() for task in calls) == grpc_door.REFUSALS)
        for _ in range(5):
            assert await told(other, MODEL, b"", another) == (grpc.StatusCode.OK, "")
        assert sum(task.done() for task in calls) == grpc_door.REFUSALS
        for task in filter(asyncio.Task.done, calls):
            error = task.exception()
            assert isinstance(error, grpc.aio.AioRpcError) and says(error, ErrorInfo)
            if metadata:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert says(error, RetryInfo)
            else:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_refusals_beyond_those_that_may_wait_are_told_at_once(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_door, "REFUSAL_PAUSE", 3600)
    monkeypatch.setattr(grpc_door, "MAX_WAITING", 8)
    async with started(client_server(generator)) as port, crowd(port, ()) as calls:
        await eventually(lambda: sum(task.done() for task in calls) == len(calls) - 8)


async def test_a_pace_of_refusals_goes_on(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_door, "REFUSAL_PAUSE", 0.01)
    async with started(client_server(generator)) as port, crowd(port, ()) as calls:
        await asyncio.wait(calls)


async def test_calls_that_a_client_holds_back_are_not_refused(generator: FakeGenerator) -> None:
    """A client that has as many calls at once as it may starts another when it hears of an end,
    which is before the server's event loop has let go of the ended call."""
    text = inference_pb2.GenerateRequest(text="h").SerializeToString()
    async with started(client_server(generator, streams=2)) as port, dialled(port) as channel:
        calls = [told(channel, GENERATE, text, BEARER) for _ in range(60)]
        assert Counter(await asyncio.gather(*calls)) == {(grpc.StatusCode.OK, ""): 60}


async def test_more_calls_than_may_wait_are_refused_in_words(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_door, "HELD", 1)
    monkeypatch.setattr(grpc_door, "MAX_WAITING", 1)
    messages = Messages(LIMIT, timeout=60)
    async with started(client_server(generator, messages)) as port, dialled(port) as channel:
        opened = [channel.stream_stream(MODEL)(metadata=BEARER, timeout=60) for _ in range(3)]
        await eventually(lambda: messages._room.waiting)
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="are waiting already") as caught:
            await stub.GetModel(inference_pb2.GetModelRequest(), metadata=BEARER)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert says(caught.value, RetryInfo) and says(caught.value, ErrorInfo)
        for call in opened:
            call.cancel()
        while (await told(channel, MODEL, b"", BEARER))[0] is not grpc.StatusCode.OK:
            await asyncio.sleep(0.01)
        assert messages._room.held == 0 and not messages._room.waiting


async def test_of_the_calls_that_wait_those_of_the_client_with_most_give_way(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_door, "HELD", 1)
    monkeypatch.setattr(grpc_door, "MAX_WAITING", 3)
    messages = Messages(LIMIT, timeout=60)  # room for two, one of each client
    another = (("authorization", "Bearer another-s"),)
    server = client_server(generator, messages, keys=f"{KEY},another-s")
    async with started(server) as port, dialled(port) as channel:
        flood = [channel.stream_stream(MODEL)(metadata=BEARER, timeout=60) for _ in range(4)]
        await eventually(lambda: messages._room.waiting == 3)
        honest = [channel.stream_stream(MODEL)(metadata=another, timeout=60) for _ in range(2)]
        reads = [asyncio.ensure_future(call.read()) for call in flood]
        (refused,), _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(grpc.aio.AioRpcError, match="3 calls are waiting already"):
            await refused
        for call in honest:
            await call.write(b"")
            await call.done_writing()
            assert [each async for each in call]
        for call in flood:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


def says(error: Any, kind: Any) -> bool:
    status = rpc_status.from_call(error)
    return status is not None and any(each.Is(kind.DESCRIPTOR) for each in status.details)


# ---- crowds ---------------------------------------------------------------------------------

CALLS, STREAMS = 4000, 448  # of one connection; those of them at once, as by default


@pytest.fixture
def crowded(generator: FakeGenerator) -> Iterator[int]:
    """A server that has room for 64 requests, and whose event loop is busy elsewhere now and then;
    its port."""
    over, ports = threading.Event(), Queue[int]()
    generate = generator.generate

    async def some(request: Any) -> AsyncIterator[Any]:
        if generator.open >= 64:
            raise Overloaded("64 requests are being served already", retry_after=1.0)
        async for update in generate(request):
            yield update

    async def serve() -> None:
        generator.generate = some  # type: ignore[method-assign, assignment]
        async with started(client_server(generator, streams=STREAMS)) as port:
            ports.put(port)
            while not over.is_set():
                time.sleep(0.1)  # noqa: ASYNC251
                await asyncio.sleep(0.1)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    yield ports.get(timeout=30)
    over.set()
    thread.join()


@pytest.mark.slow
async def test_each_of_4000_calls_at_once_is_answered_or_refused_in_words(crowded: int) -> None:
    ends: Counter[str] = Counter()

    async def ended(call: Any) -> None:
        try:
            await call if isinstance(call, grpc.aio.UnaryUnaryCall) else [e async for e in call]
            ends["OK"] += 1
        except grpc.aio.AioRpcError as error:
            ends[error.code().name] += 1
            assert says(error, RetryInfo) and says(error, ErrorInfo), error

    async with dialled(crowded) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)
        model, tokens = inference_pb2.GetModelRequest(), inference_pb2.GenerateRequest(text="h")
        calls = [
            call
            for _ in range(CALLS // 2)
            for call in (
                stub.GetModel(model, metadata=BEARER, timeout=120),
                stub.Generate(tokens, metadata=BEARER, timeout=120),
            )
        ]
        await asyncio.gather(*map(ended, calls))
    assert ends.total() == CALLS and set(ends) <= {"OK", "RESOURCE_EXHAUSTED"}, ends
    assert ends["OK"] > CALLS // 2


async def test_refused_calls_leave_nothing_to_the_garbage_collector(
    generator: FakeGenerator,
) -> None:
    """The event loop stands still while it looks for what thousands of them leave."""

    async def full(request: Any) -> AsyncIterator[Any]:
        raise Overloaded("there is no room", retry_after=1.0)
        yield

    generator.generate = full  # type: ignore[method-assign, assignment]
    text = inference_pb2.GenerateRequest(text="h").SerializeToString()
    calls = [(GENERATE, text, BEARER), (GENERATE, text, ()), (MODEL, b"x" * 9, BEARER)]
    try:
        async with started(client_server(generator)) as port, dialled(port) as channel:
            await told(channel, *calls[0])
            gc.collect()
            gc.disable()
            for call in calls * 5:
                assert (await told(channel, *call))[0] is not grpc.StatusCode.OK
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
    finally:
        gc.set_debug(0)
        gc.enable()
    left = Counter(type(each).__name__ for each in gc.garbage)
    gc.garbage.clear()
    assert not left["_ServicerContext"] and not left["Overloaded"], left


# ---- connections ----------------------------------------------------------------------------


def sooner(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    given = {f"grpc.{name.replace('__', '.')}": value for name, value in values.items()}
    options = [(name, given.get(name, value)) for name, value in rpc_server._OPTIONS]
    assert set(given) <= {name for name, _ in options}
    monkeypatch.setattr(rpc_server, "_OPTIONS", options)


@pytest.mark.parametrize("said", [b"", PREFACE[:9], PREFACE, PREFACE + SETTINGS])
async def test_a_silent_connection_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that speaks HTTP/2 and then says nothing."""
    assert rpc_server.SILENCE_MS <= 20_000
    sooner(monkeypatch, server_handshake_timeout_ms=200, http2__settings_timeout=200)
    async with started(node_server()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        async with asyncio.timeout(30):
            while await reader.read(2**16):
                pass
        writer.close()


async def test_a_connection_without_calls_is_closed_and_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sooner(monkeypatch, max_connection_idle_ms=1000)
    async with started(node_server()) as port, dialled(port) as channel:
        await told(channel, HEALTH + "Check", b"")
        state = channel.get_state()
        async with asyncio.timeout(60):
            while state is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
                state = channel.get_state()
        assert await told(channel, HEALTH + "Check", b"") == (grpc.StatusCode.OK, "")


async def test_a_crowd_of_silent_connections_leaves_descriptors_and_honest_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_server, "max_connections", lambda: 8)
    sooner(monkeypatch, server_handshake_timeout_ms=2000)
    async with started(node_server()) as port, dialled(port) as channel:
        assert (await told(channel, HEALTH + "Check", b""))[0] is grpc.StatusCode.OK
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await eventually(lambda: sum(task.done() for task in ended) >= 40 - 8)
        assert (await told(channel, HEALTH + "Check", b""))[0] is grpc.StatusCode.OK
        async with dialled(port, ("grpc.use_local_subchannel_pool", 1)) as another:
            call = health_pb2_grpc.HealthStub(another).Check(
                health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True
            )
            assert (await call).status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.gather(*ended, return_exceptions=True)
        for _, writer in silent:
            writer.close()
