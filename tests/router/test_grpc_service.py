"""The gRPC API: the same generations and the same checks as over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from grpc_status import rpc_status

from fakes_pipeline import FakeGenerator, byte_level_folder, served_model
from pdserve.common.core.errors import NodeError, PdserveError, Unavailable
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.app_state import AppState
from pdserve.router.grpc import service as grpc_service
from pdserve.router.grpc.service import InferenceServicer
from waiting import eventually


@pytest.fixture
def generator(tmp_path: Path) -> FakeGenerator:
    return FakeGenerator(Tokenizer.from_folder(byte_level_folder(tmp_path)))


@pytest.fixture
def service(generator: FakeGenerator) -> InferenceServicer:
    model = served_model(generator.tokenizer)
    return InferenceServicer(AppState(pipeline=generator, served=model))


@pytest.fixture
async def stub(service: InferenceServicer) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
    await server.stop(0)


def told(error: grpc.aio.AioRpcError, kind: type[Message]) -> Message | None:
    """The detail of a kind, as grpcio-status finds it: code and message must agree."""
    status = rpc_status.from_call(error)
    assert status is not None
    for each in status.details:
        found = kind()
        if each.Unpack(found):
            return found
    return None


def with_kwargs(**kwargs: object) -> pb.Chat:
    chat = pb.Chat(messages=[pb.Message(role="user", content="hell")])
    chat.chat_template_kwargs.update(kwargs)
    return chat


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(chat=with_kwargs(x=float("nan"))), "chat.chat_template_kwargs"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=2)), "sampling.top_p"),
        (pb.GenerateRequest(text="a", model="本" * 50_000), "model"),
        (pb.GenerateRequest(text="a" * 500), "text"),
        (pb.GenerateRequest(), "prompt"),
    ],
)
async def test_details_name_the_field(
    stub: inference_pb2_grpc.InferenceStub, request_: pb.GenerateRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in stub.Generate(request_)]
    bad = told(caught.value, BadRequest)
    assert isinstance(bad, BadRequest)
    (wrong,) = bad.field_violations
    assert (wrong.field, wrong.description) == (field, caught.value.details())
    info = told(caught.value, ErrorInfo)
    assert isinstance(info, ErrorInfo)
    code = dict(caught.value.trailing_metadata())["pdserve-error-code"]
    assert (info.reason, info.domain) == (code, "pdserve")
    assert dict(info.metadata) == {"blame": "client", "retryable": "false"}
    assert told(caught.value, RetryInfo) is None


async def test_a_drain_waits_for_calls_and_tells_those_it_cuts_off(
    stub: inference_pb2_grpc.InferenceStub, service: InferenceServicer, generator: FakeGenerator
) -> None:
    async def call(tokens: int) -> list[pb.GenerateResponse]:
        sampling = pb.SamplingParams(max_tokens=tokens)
        request = pb.GenerateRequest(text="a", sampling=sampling)
        return [response async for response in stub.Generate(request)]

    generator.delay, generator.text = 0.02, "hello " * 10
    whole = asyncio.create_task(call(2))
    await eventually(lambda: generator.open)
    await service.drain(60)
    assert (await whole)[-1].usage.completion_tokens == 2
    late = asyncio.create_task(call(70))
    await eventually(lambda: generator.open)
    await service.drain(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await late
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE and not generator.open
    assert dict(caught.value.trailing_metadata())["pdserve-error-code"] == "SHUTTING_DOWN"
    await service.drain(60)  # there is none


async def test_a_router_that_was_just_called_waits_for_balancers(
    stub: inference_pb2_grpc.InferenceStub,
    service: InferenceServicer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = monotonic()
    await service.quiet(60)
    assert monotonic() - began < 30, "never called"
    monkeypatch.setattr(grpc_service, "QUIET", 0.2)
    began = monotonic()
    [response async for response in stub.Generate(pb.GenerateRequest(text="a"))]
    await service.quiet(60)
    assert 0.2 <= monotonic() - began < 30
    monkeypatch.setattr(grpc_service, "QUIET", 60.0)
    await service.quiet(0.01)  # within its time-out


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (Unavailable("no node", retry_after=2.5), 2.5),
        (NodeError("lost"), 1.0),
        (PdserveError("a defect"), None),
    ],
)
async def test_details_say_when_to_retry(
    stub: inference_pb2_grpc.InferenceStub,
    generator: FakeGenerator,
    error: PdserveError,
    seconds: float | None,
) -> None:
    generator.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in stub.Generate(pb.GenerateRequest(request_id="x", text="a"))]
    retry, asked = told(caught.value, RetryInfo), told(caught.value, RequestInfo)
    assert isinstance(asked, RequestInfo) and asked.request_id == "x"
    assert (retry and retry.retry_delay.ToTimedelta().total_seconds()) == seconds  # type: ignore[attr-defined]
    assert told(caught.value, BadRequest) is None


async def test_a_refusal_has_the_id_that_the_client_gave(
    stub: inference_pb2_grpc.InferenceStub,
) -> None:
    for given, expected in (("mine", "mine"), ("no word", "ours"), ("", "ours")):
        request = pb.GenerateRequest(request_id=given, text="a", priority=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [each async for each in stub.Generate(request, metadata=(("x-request-id", "ours"),))]
        asked = told(caught.value, RequestInfo)
        assert isinstance(asked, RequestInfo) and asked.request_id == expected


async def test_text_to_tokens_and_back(
    stub: inference_pb2_grpc.InferenceStub, generator: FakeGenerator
) -> None:
    tokenizer = generator.tokenizer
    told = await stub.Tokenize(pb.TokenizeRequest(text="hello w", model="tiny"))
    assert tuple(told.token_ids) == tokenizer.encode("hello w") and told.max_model_len == 100
    back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=told.token_ids))
    assert back.text == "hello w"
    chat = await stub.Tokenize(pb.TokenizeRequest(chat=with_kwargs(x=1)))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hell"}])
    assert tuple(chat.token_ids) == rendered


@pytest.mark.parametrize(
    ("request_", "status", "field"),
    [
        (pb.TokenizeRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        (pb.TokenizeRequest(text="a", model="x"), grpc.StatusCode.NOT_FOUND, "model"),
        (pb.TokenizeRequest(text="a" * 5000), grpc.StatusCode.INVALID_ARGUMENT, "text"),
        (pb.TokenizeRequest(chat=pb.Chat()), grpc.StatusCode.INVALID_ARGUMENT, "chat.messages"),
        (pb.DetokenizeRequest(token_ids=[10**6]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        (pb.DetokenizeRequest(model="x"), grpc.StatusCode.NOT_FOUND, "model"),
    ],
)
async def test_a_request_without_tokens_names_the_reason(
    stub: inference_pb2_grpc.InferenceStub,
    request_: Message,
    status: grpc.StatusCode,
    field: str,
) -> None:
    call = stub.Tokenize if isinstance(request_, pb.TokenizeRequest) else stub.Detokenize
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(request_)
    bad = told(caught.value, BadRequest)
    assert caught.value.code() is status and isinstance(bad, BadRequest)
    assert [each.field for each in bad.field_violations] == [field]


async def test_a_large_chat_is_not_read_on_the_event_loop(
    stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of numbers takes half a second."""
    threads: list[threading.Thread] = []
    real = grpc_service.chat_fields

    def fields(*args: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return real(*args)

    monkeypatch.setattr(grpc_service, "chat_fields", fields)
    for numbers in ([1.0], [1.0] * 1000):
        request = pb.GenerateRequest(chat=with_kwargs(x=numbers))
        assert [each async for each in stub.Generate(request)]
    small, large = threads
    assert small is threading.main_thread() and large is not small


async def test_a_cancelled_generation_ends_the_call(
    stub: inference_pb2_grpc.InferenceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC itself would let the client wait for ever."""

    async def cancelled(*args: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(AppState, "preprocess", cancelled)
    async with asyncio.timeout(60):
        with pytest.raises(grpc.aio.AioRpcError, match="internal error"):
            await stub.Tokenize(pb.TokenizeRequest(text="hell"))
