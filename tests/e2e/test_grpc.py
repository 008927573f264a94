"""The gRPC front, and what every role's gRPC server tells of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import reference
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from warm import WarmCluster, shared

MODEL = "qwen2"
PROMPT = "Once upon a time there was a naïve girl named Zoë. She lived in an old mill"
SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICES = {
    "router": {"pdserve.v1.Inference"},
    "registry": {"pdserve.v1.Registry"},
    "prefill": {"pdserve.v1.Prefill"},
    "decode": {"pdserve.v1.Decode", "pdserve.v1.KVTransfer"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, warm=shared()) as cluster:
        yield cluster
        cluster.wait_idle()


@pytest.fixture(scope="module")
def stub(cluster: WarmCluster) -> Iterator[pb_grpc.InferenceStub]:
    with grpc.insecure_channel(cluster.grpc) as channel:
        yield pb_grpc.InferenceStub(channel)


def sampling(**options: object) -> pb.SamplingParams:
    return pb.SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **options})  # type: ignore[arg-type]


def prompt_ids(cluster: WarmCluster) -> tuple[int, ...]:
    return tuple(reference.encode(cluster.model, PROMPT))


def test_text_and_token_ids_give_the_reference(
    cluster: WarmCluster, stub: pb_grpc.InferenceStub
) -> None:
    ids = prompt_ids(cluster)
    expected = reference.greedy(cluster.model, ids, 20)
    for request in (
        pb.GenerateRequest(request_id="mine", text=PROMPT, sampling=sampling()),
        pb.GenerateRequest(
            request_id="mine", model=MODEL, token_ids=pb.TokenIds(ids=ids), sampling=sampling()
        ),
    ):
        *deltas, last = stub.Generate(request, timeout=30)
        assert {each.request_id for each in (*deltas, last)} == {"mine"}
        assert len(deltas) > 2  # a stream
        assert tuple(token.id for each in deltas for token in each.tokens) == expected
        text = "".join(each.text for each in deltas)
        assert text == reference.decode(cluster.model, expected)
        assert deltas[-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(ids), 20)
        assert last.timeline.transfer_bytes > 0
        assert not last.tokens


def test_allowed_token_ids(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    only = range(60, 300, 7)
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(allowed_token_ids=only))
    tokens = [token.id for each in stub.Generate(request, timeout=30) for token in each.tokens]
    expected = reference.greedy(cluster.model, prompt_ids(cluster), 20, tuple(only))
    assert tuple(tokens) == expected


@pytest.mark.parametrize("form", ["bad_words", "bad_words_token_ids"])
def test_bad_words(cluster: WarmCluster, stub: pb_grpc.InferenceStub, form: str) -> None:
    plain = reference.greedy(cluster.model, prompt_ids(cluster), 20)
    words = re.findall(r" (\w+)\b", reference.decode(cluster.model, plain))[:3]
    ids = reference.bad_words(cluster.model, *words)
    lists = [pb.TokenIds(ids=each) for each in ids]
    given = sampling(**{form: words if form == "bad_words" else lists})
    request = pb.GenerateRequest(text=PROMPT, sampling=given)
    tokens = [token.id for each in stub.Generate(request, timeout=30) for token in each.tokens]
    expected = reference.greedy(cluster.model, prompt_ids(cluster), 20, bad_words=ids)
    assert tuple(tokens) == expected != plain


def test_choices_and_logprobs(stub: pb_grpc.InferenceStub) -> None:
    request = pb.GenerateRequest(
        text=PROMPT, sampling=sampling(n=2, temperature=4.0, seed=4, logprobs=3)
    )
    first, second = (collect(stub, request) for _ in range(2))
    assert first == second
    assert set(first) == {0, 1}
    assert first[0] != first[1]
    token = next(stub.Generate(request, timeout=30)).tokens[0]
    assert len(token.top_logprobs) == 3
    assert token.logprob <= token.top_logprobs[0].logprob <= 0


def test_prompt_logprobs(stub: pb_grpc.InferenceStub, cluster: WarmCluster) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(prompt_logprobs=2))
    told = [each for reply in stub.Generate(request, timeout=30) for each in reply.prompt_logprobs]
    ids = tuple(prompt_ids(cluster))
    assert tuple(token.id for token in told) == ids and not told[0].HasField("logprob")
    for token, row in zip(told[1:], reference.prompt_logprobs(cluster.model, ids), strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-3)
        best = [each.logprob for each in token.top_logprobs]
        assert best == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


def collect(stub: pb_grpc.InferenceStub, request: pb.GenerateRequest) -> dict[int, str]:
    texts: dict[int, str] = {}
    for response in stub.Generate(request, timeout=30):
        if not response.HasField("usage"):
            texts[response.index] = texts.get(response.index, "") + response.text
    return texts


def test_a_stop_string(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    whole = reference.decode(
        cluster.model, reference.greedy(cluster.model, prompt_ids(cluster), 20)
    )
    stop = whole[5:12]
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(stop=[stop]))
    *deltas, last = stub.Generate(request, timeout=30)
    assert "".join(each.text for each in deltas) == whole.partition(stop)[0]
    assert deltas[-1].finish_reason == pb.FINISH_REASON_STOP
    assert deltas[-1].stop_reason == stop
    assert last.usage.completion_tokens < 20


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "prompt"),
        (
            pb.GenerateRequest(text="a", model="other"),
            grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "model",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(top_p=2.0)),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "top_p",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(n=1000)),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "n",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(allowed_token_ids=[5, 5000])),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "allowed_token_ids",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(bad_words=["fine", ""])),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "bad_words",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5000])),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "token_ids",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(max_tokens=5000)),
            grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", "prompt",
        ),
    ],
)  # fmt: skip
def test_errors_carry_their_type(
    stub: pb_grpc.InferenceStub,
    request_: pb.GenerateRequest,
    status: grpc.StatusCode,
    code: str,
    param: str,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request_, timeout=30))
    error = caught.value
    assert error.code() is status
    metadata = dict(error.trailing_metadata())
    assert metadata["pdserve-error-code"] == code
    assert metadata["pdserve-param"] == param
    assert (metadata["pdserve-blame"], metadata["pdserve-retryable"]) == ("client", "0")


def test_the_model(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    model = stub.GetModel(pb.GetModelRequest(), timeout=10)
    assert (model.id, model.max_model_len, model.vocab_size) == (MODEL, 1024, 512)
    assert list(model.eos_token_ids) == [0, 2]
    assert model.root == str(cluster.model)


def addresses(cluster: WarmCluster) -> dict[str, str]:
    router = {"router": cluster.grpc, "registry": cluster.registry}
    return router | {node["role"]: node["address"] for node in cluster.nodes()}


@pytest.mark.parametrize("role", SERVICES)
def test_health_and_reflection(cluster: WarmCluster, role: str) -> None:
    with grpc.insecure_channel(addresses(cluster)[role]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES[role]):
            request = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(request, timeout=10).status == SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = reflection.ServerReflectionInfo(iter([question]), timeout=10)
        names = {each.name for each in answer.list_services_response.service}
        standard = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert names == SERVICES[role] | standard


def test_cancelling_frees_everything(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    call = stub.Generate(
        pb.GenerateRequest(text=PROMPT, sampling=sampling(max_tokens=900, ignore_eos=True, n=2))
    )
    for _ in range(5):
        next(call)
    call.cancel()
    cluster.wait_idle(5)
    assert cluster.get("/v1/cluster").json()["running"] == 0


def test_a_deadline_frees_everything(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(max_tokens=900, ignore_eos=True))
    with pytest.raises(grpc.RpcError) as late:
        list(stub.Generate(request, timeout=0.2))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_idle(5)
