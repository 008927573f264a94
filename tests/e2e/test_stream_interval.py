"""`--stream-interval`: the first token at once, then every N tokens, and the last; by all doors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import grpc
import pytest
import requests

from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from warm import WarmCluster

MODEL = "llama-gqa"
PROMPT = "Once upon a time there was a"
TURN = {"role": "user", "content": PROMPT}
ENDS = {1, 5, 9, 10}  # tokens after an event, of 10 in steps of 4; a slow reader misses some
DRAW = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    with WarmCluster(MODEL, router={"stream_interval": 4}) as cluster:
        yield cluster
        cluster.wait_idle()


def events(cluster: WarmCluster, path: str, **body: Any) -> list[dict[str, Any]]:
    given = {"model": MODEL, "stream": True, **DRAW, **body}
    with requests.post(f"{cluster.url}/v1/{path}", json=given, stream=True, timeout=60) as answer:
        assert answer.status_code == 200, answer.text
        lines = [each[6:] for each in answer.iter_lines() if each.startswith(b"data: ")]
    return [json.loads(each) for each in lines if each != b"[DONE]"]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("completions", {"prompt": PROMPT}), ("chat/completions", {"messages": [TURN]})],
)
def test_events_have_so_many_tokens(
    cluster: WarmCluster, path: str, prompt: dict[str, Any]
) -> None:
    asked = {"max_tokens": 10, "n": 2, "return_token_ids": True, **prompt}
    for index in range(2):
        choices = [
            choice
            for event in events(cluster, path, **asked)
            for choice in event["choices"]
            if choice["index"] == index and choice.get("token_ids")
        ]
        ends = list(accumulate(len(each["token_ids"]) for each in choices))
        assert ENDS.issuperset(ends) and ends[-1] == 10


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("responses", "response.output_text.delta", {"input": PROMPT, "max_output_tokens": 40}),
        ("messages", "content_block_delta", {"messages": [TURN], "max_tokens": 40}),
    ],
)
def test_texts_come_in_fewer_pieces(
    cluster: WarmCluster, path: str, kind: str, body: dict[str, Any]
) -> None:
    pieces = [each for each in events(cluster, path, **body) if each["type"] == kind]
    assert 1 <= len(pieces) <= 11  # of 40 tokens: 1, then 9 times 4, then 3


def test_messages_over_grpc(cluster: WarmCluster) -> None:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    request = pb.GenerateRequest(model=MODEL, text=PROMPT, sampling=sampling)
    with grpc.insecure_channel(cluster.grpc) as channel:
        answers = list(pb_grpc.InferenceStub(channel).Generate(request))
    ends = list(accumulate(len(each.tokens) for each in answers if each.tokens))
    assert ENDS.issuperset(ends) and ends[-1] == 10


def test_a_stop_string_ends_the_wait(cluster: WarmCluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 10, **DRAW}
    (whole,) = requests.post(f"{cluster.url}/v1/completions", json=body, timeout=60).json()[
        "choices"
    ]
    stop = whole["text"].split()[2]
    answered = events(cluster, "completions", **body, stop=stop)
    last = answered[-1]["choices"][0]
    assert last["finish_reason"] == "stop" and last["stop_reason"] == stop
    text = "".join(each["choices"][0]["text"] for each in answered)
    assert text == whole["text"][: whole["text"].index(stop)]
