"""The gRPC front, and what every role's gRPC server tells of itself."""

from __future__ import annotations

import re
import runpy
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import psutil
import pytest
from google.rpc.error_details_pb2 import BadRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

import reference
from cluster import is_idle
from deaths import MORE_BLOCKS, D, P
from paths import ROOT
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from warm import WarmCluster

MODEL = "qwen2"
PROMPT = "Once upon a time there was a naïve girl named Zoë. She lived in an old mill"
HELLO = [pb.Message(role="user", content="Hello")]
SERVING = health_pb2.HealthCheckResponse.SERVING
SERVICES = {
    "router": {"pdserve.v1.Inference"},
    "registry": {"pdserve.v1.Registry"},
    "prefill": {"pdserve.v1.Prefill", "pdserve.v1.KVEvents"},
    "decode": {"pdserve.v1.Decode", "pdserve.v1.KVTransfer", "pdserve.v1.KVEvents"},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """Steps of the decode node can be held. A node that stands still is not noticed: its requests
    must not go elsewhere before their clients leave."""
    options = {"router": {"heartbeat_timeout": 30}, "kv_lease": 30}
    with WarmCluster(MODEL, 1, 0, **options) as cluster:
        cluster.start_held("decode")
        cluster.wait_nodes()
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
    assert tuple(stub.Tokenize(pb.TokenizeRequest(text=PROMPT)).token_ids) == ids
    said = stub.Detokenize(pb.DetokenizeRequest(token_ids=expected)).text
    assert said == reference.decode(cluster.model, expected)
    for request in (
        pb.GenerateRequest(request_id="mine", text=PROMPT, sampling=sampling()),
        pb.GenerateRequest(
            request_id="mine", model=MODEL, token_ids=pb.TokenIds(ids=ids), sampling=sampling()
        ),
    ):
        stream = stub.Generate(request, timeout=120)
        with cluster.standing_still("decode"):
            first = next(stream)  # before there are others, which may be joined
        *deltas, last = first, *stream
        assert {each.request_id for each in (*deltas, last)} == {"mine"}
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
    tokens = [token.id for each in stub.Generate(request, timeout=120) for token in each.tokens]
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
    tokens = [token.id for each in stub.Generate(request, timeout=120) for token in each.tokens]
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
    token = next(stub.Generate(request, timeout=120)).tokens[0]
    assert len(token.top_logprobs) == 3
    assert token.logprob <= token.top_logprobs[0].logprob <= 0


def test_prompt_logprobs(stub: pb_grpc.InferenceStub, cluster: WarmCluster) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(prompt_logprobs=2))
    told = [each for reply in stub.Generate(request, timeout=120) for each in reply.prompt_logprobs]
    ids = tuple(prompt_ids(cluster))
    assert tuple(token.id for token in told) == ids and not told[0].HasField("logprob")
    for token, row in zip(told[1:], reference.prompt_logprobs(cluster.model, ids), strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-3)
        best = [each.logprob for each in token.top_logprobs]
        assert best == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


def test_a_prompt_is_ranked_and_cut(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    ids = prompt_ids(cluster)[-20:]
    more = {"prompt_logprobs": 0, "truncate_prompt_tokens": 20}
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(**more), return_token_ids=True)
    replies = list(stub.Generate(request, timeout=120))
    assert tuple(token for reply in replies for token in reply.prompt_token_ids) == ids
    told = [token for reply in replies for token in reply.prompt_logprobs]
    for token, row in zip(told[1:], reference.prompt_logprobs(cluster.model, ids), strict=True):
        own = row[token.id].item()
        least, most = ((row >= own + d).sum().item() for d in (1e-3, -1e-3))
        assert least <= token.rank <= most and not token.top_logprobs


def test_a_chat_is_that_of_http(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    turns = [
        ("system", "Be kind."),
        ("user", "Tell me of Zoë."),
        ("assistant", "Zoë is"),
    ]
    body = {
        "messages": [{"role": role, "content": content} for role, content in turns],
        "continue_final_message": True, "max_tokens": 12, "temperature": 0, "n": 2,
        "truncate_prompt_tokens": 30, "chat_template_kwargs": {"deep": {"of": [1, None]}},
        "structured_outputs": {"choice": ["naïve and old", "young"]},
    }  # fmt: skip
    answer = cluster.post("/v1/chat/completions", **body).json()
    chat = pb.Chat(
        messages=[pb.Message(role=role, content=content) for role, content in turns],
        continue_final_message=True,
    )
    chat.chat_template_kwargs.update(body["chat_template_kwargs"])
    choice = pb.StructuredOutputs(choice=pb.Choices(texts=["naïve and old", "young"]))
    params = sampling(max_tokens=12, n=2, truncate_prompt_tokens=30, structured_outputs=choice)
    request = pb.GenerateRequest(chat=chat, sampling=params)
    said = [each["message"]["content"] for each in answer["choices"]]
    assert list(collect(stub, request).values()) == said and said[0] in choice.choice.texts
    *_, last = stub.Generate(request, timeout=120)
    assert last.usage.prompt_tokens == answer["usage"]["prompt_tokens"] == 30


def test_the_example_runs(
    cluster: WarmCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["grpc_client.py", cluster.grpc])
    runpy.run_path(str(ROOT / "examples" / "grpc_client.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert f"{MODEL}: 1024 tokens" in shown, shown and "20 tokens" in shown
    assert "tokenize on router" in shown and "prefill_compute on prefill-" in shown
    assert re.search(r'^{"name":"(Lily|Tom)","age":[1-9][0-9]?}$', shown, re.M), shown
    assert re.search(r"log-probability -[0-9.]+, [1-9]", shown)
    assert re.search(r'^get_weather: { ?"city" ?: ?"(Oslo|Cairo)" ?}$', shown, re.M)
    assert "pdserve: INVALID_REQUEST\n  field: sampling.top_p" in shown


def collect(stub: pb_grpc.InferenceStub, request: pb.GenerateRequest) -> dict[int, str]:
    texts: dict[int, str] = {}
    for response in stub.Generate(request, timeout=120):
        if not response.HasField("usage"):
            texts[response.index] = texts.get(response.index, "") + response.text
    return texts


def test_a_stop_string(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    whole = reference.decode(
        cluster.model, reference.greedy(cluster.model, prompt_ids(cluster), 20)
    )
    stop = whole[5:12]
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(stop=[stop]))
    *deltas, last = stub.Generate(request, timeout=120)
    assert "".join(each.text for each in deltas) == whole.partition(stop)[0]
    assert deltas[-1].finish_reason == pb.FINISH_REASON_STOP
    assert deltas[-1].stop_reason == stop
    assert last.usage.completion_tokens < 20


@pytest.mark.parametrize(
    ("request_", "status", "code", "path"),
    [
        (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "prompt"),
        (
            pb.GenerateRequest(text="a", model="other"),
            grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "model",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(top_p=2.0)),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "sampling.top_p",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(n=1000)),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "sampling.n",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(allowed_token_ids=[5, 5000])),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "sampling.allowed_token_ids",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(bad_words=["fine", ""])),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "sampling.bad_words",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5000])),
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "token_ids",
        ),
        (
            pb.GenerateRequest(text="a", sampling=sampling(max_tokens=5000)),
            grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_LENGTH_EXCEEDED", "text",
        ),
        *(
            (
                pb.GenerateRequest(chat=chat, sampling=sampling(n=2)),
                grpc.StatusCode.INVALID_ARGUMENT, code, f"chat.{path}",
            )
            for chat, code, path in (
                (pb.Chat(), "INVALID_REQUEST", "messages"),
                (pb.Chat(messages=[pb.Message(role="wizard")]), "INVALID_REQUEST",
                 "messages[0].role"),
                (pb.Chat(messages=[pb.Message(role="user", content="long " * 900)]),
                 "CONTEXT_LENGTH_EXCEEDED", "messages"),
                (pb.Chat(messages=HELLO, tools=[pb.Tool(name="a b")]), "INVALID_REQUEST",
                 "tools[0].name"),
                (pb.Chat(messages=HELLO, tools=[pb.Tool(name="a", parameters="{")]),
                 "INVALID_REQUEST", "tools[0].parameters"),
                (pb.Chat(messages=HELLO, tools=[pb.Tool(name="a", parameters="[" * 99_000)]),
                 "INVALID_REQUEST", "tools"),
                (pb.Chat(messages=HELLO, tool="b"), "INVALID_REQUEST", "tool_choice"),
                (pb.Chat(messages=HELLO, mode=9), "INVALID_REQUEST", "tool_choice"),
            )
        ),
    ],
)  # fmt: skip
def test_errors_carry_their_type(
    stub: pb_grpc.InferenceStub,
    request_: pb.GenerateRequest,
    status: grpc.StatusCode,
    code: str,
    path: str,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request_, timeout=120))
    error = caught.value
    assert error.code() is status
    metadata = dict(error.trailing_metadata())
    assert metadata["pdserve-error-code"] == code
    param = re.sub("^text$", "prompt", path.removeprefix("sampling.").removeprefix("chat."))
    assert metadata["pdserve-param"].replace(".function.", ".") == param
    assert (metadata["pdserve-blame"], metadata["pdserve-retryable"]) == ("client", "0")
    status, bad = rpc_status.from_call(error), BadRequest()
    assert status is not None and status.message == error.details()
    assert any(each.Unpack(bad) for each in status.details)
    assert bad.field_violations[0].field == path


def test_the_model(cluster: WarmCluster, stub: pb_grpc.InferenceStub) -> None:
    model = stub.GetModel(pb.GetModelRequest(), timeout=60)
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
            assert health.Check(request, timeout=60).status == SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="unknown"), timeout=60)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = reflection.ServerReflectionInfo(iter([question]), timeout=60)
        names = {each.name for each in answer.list_services_response.service}
        standard = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert names == SERVICES[role] | standard


# ---- clients that leave ---------------------------------------------------------------------


@contextmanager
def standing_still(cluster: WarmCluster, role: str, point: str, count: int) -> Iterator[str]:
    """A node that is asked next, and stops in the middle of its job."""
    arm = ("mortal:arm", "SIGSTOP", point, str(count))
    name = cluster.start_node(role, arm, num_gpu_blocks_override=MORE_BLOCKS)
    cluster.wait_nodes()
    try:
        yield name
    finally:
        cluster.kill(name)


@pytest.mark.parametrize(
    ("role", "point", "count"), [("prefill", f"{P}.computed", 1), ("decode", f"{D}.sampled", 3)]
)
@pytest.mark.parametrize("leave", ["cancel", "deadline"])
def test_leaving_frees_both_nodes(
    cluster: WarmCluster,
    stub: pb_grpc.InferenceStub,
    role: str,
    point: str,
    count: int,
    leave: str,
) -> None:
    request = pb.GenerateRequest(
        text=PROMPT * 3, sampling=sampling(max_tokens=600, ignore_eos=True, n=2)
    )
    with standing_still(cluster, role, point, count) as name:
        process = psutil.Process(cluster.pids[name])
        nodes = {node["name"]: node for node in cluster.state()["nodes"]}
        others = [nodes[each] for each in cluster.pids.keys() - {name, "router"}]

        def stands() -> bool:
            return process.status() == psutil.STATUS_STOPPED

        if leave == "cancel":
            call = stub.Generate(request)
            cluster.wait_for(stands)
            assert cluster.state()["running"] == 1
            call.cancel()
        else:
            for timeout in (1.0, 3.0, 9.0):  # a slow machine may take the first to get there
                with pytest.raises(grpc.RpcError) as late:
                    list(stub.Generate(request, timeout=timeout))
                assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if stands():
                    break
        cluster.wait_for(lambda: cluster.state()["running"] == 0)
        cluster.wait_for(lambda: all(map(is_idle, others)))  # though their peer says nothing
        process.send_signal(signal.SIGCONT)
        cluster.wait_for(lambda: is_idle(nodes[name]))
