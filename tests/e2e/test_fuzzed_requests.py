"""Requests with odd values and odd types, over HTTP and gRPC, beside a steady load that must not
notice: each is answered or refused, and no node fails."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import requests

import reference
from cluster import MODELS, node_metrics
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from thinned import EXAMPLES
from warm import WarmCluster

NUM_TOKENS = 20
STEADY = [tuple(5 + (37 * k + 7 * i) % 480 for i in range(20 + 30 * k)) for k in range(3)]
NAN, INF = float("nan"), float("inf")

REALS = (0, 1, 0.5, -1, 2, 1e-39, 1e-45, 1e-46, 3e38, 1e39, 1e308, 5e-324, -0.0, NAN, INF, -INF, 9)
WHOLE = (0, 1, 2, 5, -1, 511, 512, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**300)
OTHER = (None, True, "1", "", [], {}, [1], {"a": 1}, 0.1, "\x00", "ü" * 2000)
FLOATS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
INTS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
LISTS: dict[str, tuple[Any, ...]] = {
    "stop": ("a", [" the", "x"], [""], ["y"] * 300, [1], "\ud800"),
    "stop_token_ids": ([1, 2], list(range(512)), [-1], [2**40], list(range(2000)), ["1"]),
    "allowed_token_ids": ([5, 6], [0], list(range(512)), [], [512], [-1], ["5"], [5] * 2000),
    "bad_words": (["a"], ["the"], [], [""], [" "], "the", [1], ["x" * 65], ["y"] * 129, ["ü🐶"]),
    "logit_bias": ({"5": 100}, {"5": NAN}, {"x": 1}, {"600": 1}, {"-1": 1}, {"1": "2"}),
    "prompt": ("once", [1, 2], [[1], [2]], ["a", "b"], [], [[]], [-1], [10**9], "", [1.5]),
}  # fmt: skip
# Arguments that a model once wrote, as the next turn of a conversation sends them again.
ARGUMENTS = (
    '{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a":' * 900 + "1" + "}" * 900, "[" * 60_000, "{", "",
    '{"a": NaN, "b": 1e999, "c": 1' + "0" * 5000 + "}", {"a": 2**70}, {}, None, 7, "\x00",
)  # fmt: skip
SCHEMAS = (
    {"const": 2**70}, {"enum": [10**4000, NAN]}, {"pattern": "("}, {"minimum": INF},
    {"$ref": "#/x"}, {"properties": {"ü": {"const": "🐶"}}}, {"type": "object"}, {"type": []},
    None, 7,
)  # fmt: skip
PATHS = ("/v1/chat/completions", "/tokenize")
ALLOWED = {200, 400, 413, 429}
GRPC_ALLOWED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """A node that is late is not given up: that would look like one that was hurt."""
    options = {"router": {"heartbeat_timeout": 30}, "kv_lease": 30, "max_model_len": 1024}
    with WarmCluster("mistral", 1, 1, **options) as made:
        yield made


def odd_body(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": [5, 6, 7 + rng.randrange(400)], "max_tokens": 6}
    for _ in range(rng.randint(1, 4)):
        name = rng.choice((*FLOATS, *FLOATS, *INTS, *LISTS))
        values = REALS if name in FLOATS else WHOLE if name in INTS else LISTS[name]
        body[name] = rng.choice(values if rng.random() < 0.8 else OTHER)
    return body


def odd_chat(rng: random.Random) -> str:
    """JSON; of a third more bytes than those that the router's own process prepares."""
    call = {"type": "function", "function": {"name": "f", "arguments": rng.choice(ARGUMENTS)}}
    said = {"role": "assistant", "content": "x", "tool_calls": [call] * rng.randint(0, 2)}
    messages = [{"role": "user", "content": "once"}, said, {"role": "user", "content": "upon"}]
    function = {"name": "f", "parameters": rng.choice(SCHEMAS)}
    body: dict[str, Any] = {"messages": messages, "max_tokens": 6}
    if rng.random() < 0.5:
        body["tools"] = [{"type": "function", "function": function}]
        body["tool_choice"] = rng.choice(("none", "required", "auto", 7))
    else:
        schema = {"name": "f", "schema": rng.choice(SCHEMAS)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return json.dumps(body) + " " * rng.choice((0, 0, 70_000))


def send_http(cluster: WarmCluster, rng: random.Random) -> str:
    if is_chat := rng.random() < 0.3:
        path, body = rng.choice(PATHS), odd_chat(rng)
    else:
        path, body = "/v1/completions", json.dumps(odd_body(rng))
    headers = {"Content-Type": "application/json"}
    response = requests.post(f"{cluster.url}{path}", body, headers=headers, timeout=120)
    assert response.status_code in ALLOWED, (body, response.text)
    answer = response.json()
    assert ("error" in answer) == (response.status_code != 200), body
    return f"{'chat ' if is_chat else ''}HTTP {response.status_code}"


def odd_sampling(rng: random.Random) -> pb.SamplingParams:
    sampling = pb.SamplingParams(max_tokens=6)
    for _ in range(rng.randint(1, 4)):
        name = rng.choice((*FLOATS, *INTS))
        try:
            setattr(sampling, name, rng.choice(REALS if name in FLOATS else WHOLE))
        except ValueError:  # not a number of the field's size
            setattr(sampling, name, 1)
    for _ in range(rng.choice((0, 0, 1, 3))):
        sampling.logit_bias[rng.choice((1, 5, 511, 512, 2**32 - 1))] = rng.choice(REALS)
    for _ in range(rng.choice((0, 0, 1, 3))):
        sampling.bad_words.append(rng.choice(("a", " the", "", "ü🐶", "x" * 65)))
        ids = rng.choice(((5,), (5, 6), (), (512,), (5,) * 65))
        sampling.bad_words_token_ids.append(pb.TokenIds(ids=ids))
    for _ in range(rng.choice((0, 0, 1, 3))):
        sampling.allowed_token_ids.append(rng.choice((1, 5, 5, 7, 511, 512, 2**32 - 1)))
    return sampling


def send_grpc(stub: pb_grpc.InferenceStub, rng: random.Random) -> str:
    ids = [5, 6, 7 + rng.randrange(400)]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=odd_sampling(rng))
    try:
        assert list(stub.Generate(request, timeout=120))
    except grpc.RpcError as error:
        assert error.code() in GRPC_ALLOWED, (request, error)
        return error.code().name
    return "OK"


def steady_load(cluster: WarmCluster, expected: dict[tuple[int, ...], str], stop: Any) -> int:
    """Asks until told to stop; how often every answer was the one it should be."""
    rounds = 0
    while not stop.is_set() or not rounds:
        for prompt, text in expected.items():
            answer = cluster.complete(list(prompt), max_tokens=NUM_TOKENS, ignore_eos=True)
            assert answer["choices"][0]["text"] == text
        rounds += 1
    return rounds


def test_no_request_hurts_another(cluster: WarmCluster) -> None:
    model = MODELS / "mistral"
    expected = {
        prompt: reference.decode(model, reference.greedy(model, prompt, NUM_TOKENS))
        for prompt in STEADY
    }
    before, stop = dict(cluster.pids), threading.Event()
    with (
        grpc.insecure_channel(cluster.grpc) as channel,
        ThreadPoolExecutor(2) as steady,
        ThreadPoolExecutor(6) as senders,
    ):
        stub = pb_grpc.InferenceStub(channel)
        loads = [steady.submit(steady_load, cluster, expected, stop) for _ in range(2)]

        def send(seed: int) -> str:
            rng = random.Random(seed)
            return send_http(cluster, rng) if seed % 2 else send_grpc(stub, rng)

        try:
            seen = Counter(senders.map(send, range(2 * EXAMPLES)))
        finally:
            stop.set()
        assert all(load.result() for load in loads)
    print(dict(seen))
    assert seen["OK"] and seen["HTTP 200"] and seen["HTTP 400"] and seen["INVALID_ARGUMENT"]
    cluster.wait_idle()
    assert cluster.pids == before and not cluster.crashed()
    assert "Traceback" not in cluster.log() and "migrates to other nodes" not in cluster.log()


def sampled(cluster: WarmCluster) -> float:
    """Tokens that all nodes have drawn since they started."""
    return sum(node_metrics(node)["pdserve_generation_tokens_total"] for node in cluster.nodes())


def test_a_stop_string_ends_its_choice_on_the_node(cluster: WarmCluster) -> None:
    """The tokens that nodes draw are those that clients are told of, but for what is under way
    until the node hears of it: little of what a choice would have become."""
    choices, most, drawn = 8, 900, []
    options = {"temperature": 0.9, "seed": 1, "n": choices, "ignore_eos": True, "stop": [" the"]}
    for _ in range(5):  # a router that stands still tells the node late
        cluster.wait_idle()
        before = sampled(cluster)
        answer = cluster.complete([5, 6, 7, 8], max_tokens=most, **options)
        stopped = sum(each["finish_reason"] == "stop" for each in answer["choices"])
        reported = answer["usage"]["completion_tokens"]
        cluster.wait_idle()
        assert stopped > choices / 2 and reported < most * choices / 4
        drawn.append(sampled(cluster) - before)
        if drawn[-1] < most * choices / 2:
            return
    pytest.fail(f"drew {drawn} tokens, told {reported}")
