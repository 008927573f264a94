"""Structured output keeps its schema on all nodes and through failovers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import grpc
import jsonschema
import pytest
from pydantic import BaseModel, Field

from cluster import ask_until_preempted, text_of
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc as pb_grpc
from reference import encode
from warm import WarmCluster

if TYPE_CHECKING:
    import openai

PROMPT = "Once upon a time there was a naïve girl named"
# Bounded, so that a tiny model's answer ends.
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-zé]{1,12}$"},
        "age": {"type": "integer", "minimum": 3, "maximum": 12},
        "pets": {
            "type": "array", "minItems": 1, "maxItems": 3,
            "items": {"anyOf": [{"enum": ["dog", "cat 🐱"]}, {"$ref": "#/$defs/other"}]},
        },
        "happy": {"type": ["boolean", "null"]},
    },
    "$defs": {
        "other": {
            "type": "object",
            "properties": {"kind": {"type": "string", "maxLength": 8}},
            "required": ["kind"], "additionalProperties": False,
        }
    },
    "required": ["name", "age", "pets", "happy"], "additionalProperties": False,
}  # fmt: skip
WANTED = {"json": SCHEMA, "disable_any_whitespace": True}


class Girl(BaseModel):
    name: str = Field(max_length=8, pattern="^[A-Z][a-z]*$")
    mood: Literal["glad", "sad"]
    age: int = Field(ge=0, le=20)


@pytest.fixture(scope="module")
def cluster() -> Iterator[WarmCluster]:
    """Few blocks to decode in."""
    with WarmCluster("llama-gqa", 1, 0, max_model_len=384) as made:
        made.start_node("decode", num_gpu_blocks_override=26)
        made.wait_nodes()
        yield made
        made.wait_idle()


@pytest.fixture(scope="module")
def client(cluster: WarmCluster) -> Iterator[openai.OpenAI]:
    import openai  # takes as long as many tests

    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(cluster: WarmCluster, **body: Any) -> list[dict[str, Any]]:
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 1, **body}
    choices: list[dict[str, Any]] = cluster.complete(PROMPT, **options)["choices"]
    assert all(choice["finish_reason"] == "stop" for choice in choices), choices
    return choices


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def test_choices_streams_and_whole_answers_validate_and_agree(cluster: WarmCluster) -> None:
    options: dict[str, Any] = {"structured_outputs": WANTED, "n": 3, "logprobs": 2, "seed": 5}
    whole = ask(cluster, **options)
    assert len({choice["text"] for choice in whole}) > 1
    streamed = [""] * 3
    for event in cluster.stream(PROMPT, max_tokens=200, temperature=1.0, **options):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    for choice, text in zip(whole, streamed, strict=True):
        check(choice["text"])
        assert text == choice["text"]
        # Of the model's own distribution: what it would rather have said is there, too.
        assert any(len(top) == 3 for top in choice["logprobs"]["top_logprobs"])
    (greedy,) = ask(cluster, structured_outputs=WANTED, temperature=0)
    check(greedy["text"])
    assert ask(cluster, structured_outputs=WANTED, temperature=0)[0]["text"] == greedy["text"]


@pytest.mark.slow
def test_preemption_and_neighbours_change_no_token(cluster: WarmCluster) -> None:
    """Half of them have no grammar, and share steps with those that have one."""
    lines = {"guided_regex": "([A-Z][a-zé]{2,8}: [0-9]{2}(, | 🐱 )){20,}"}
    bodies = [{"seed": seed, **(lines if seed % 2 else {"ignore_eos": True})} for seed in range(10)]

    def texts(body: dict[str, Any]) -> str:
        options = {"max_tokens": 90, "temperature": 1.0, **body}
        return str(cluster.complete(PROMPT, **options)["choices"][0]["text"])

    alone = list(map(texts, bodies))

    def check_at_once() -> None:
        with ThreadPoolExecutor(10) as pool:
            assert list(pool.map(texts, bodies)) == alone

    (decode,) = cluster.nodes("decode")
    ask_until_preempted(decode, check_at_once)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["Lily", "a frog 🐸", "a dog"]}, "Lily|a frog 🐸|a dog"),
        ({"guided_regex": r"[A-Z][a-z]{2,9}, [0-9]{1,2} (years|é)\."}, None),
        ({"guided_grammar": 'root ::= "a" [0-9] [0-9]? ("x" | "y")'}, "a[0-9]{1,2}[xy]"),
        ({"structured_outputs": {"grammar": 'start: "a" /[0-9]{2}/ | "b"'}}, "a[0-9]{2}|b"),
        ({"guided_choice": ["yes"], "min_tokens": 9, "max_tokens": 30}, "yes"),
        ({"guided_choice": ["yes, sir"], "stop": [","]}, "yes"),
        ({"guided_json": {"type": "string", "pattern": "^[[a]b]$"}}, r'"[\[a]b\]"'),
        ({"guided_json": {"type": "object", "propertyNames": {"enum": ["a"]},
                          "required": ["a"], "additionalProperties": {"const": 1}}},
         r'\{ ?"a" ?: ?1 ?\}'),
    ],
)  # fmt: skip
def test_other_constraints(
    cluster: WarmCluster, fields: dict[str, Any], pattern: str | None
) -> None:
    for seed in range(3):
        (choice,) = ask(cluster, seed=seed, **fields)
        assert re.fullmatch(pattern or fields["guided_regex"], choice["text"]), choice


def test_the_openai_client_parses_a_pydantic_model(
    cluster: WarmCluster, client: openai.OpenAI
) -> None:
    """Within its budget, though white space is what the model likes best."""
    blank = {str(i): 100 for text in (" ", "\n", "\n\n") for i in encode(cluster.model, text)}
    answer = client.chat.completions.parse(
        model="llama-gqa", messages=[{"role": "user", "content": "Who is she?"}],
        response_format=Girl, seed=2, max_completion_tokens=100, logit_bias=blank,  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Girl)
    assert " :" in (answer.choices[0].message.content or "")


def test_json_mode(cluster: WarmCluster) -> None:
    text = text_of(
        cluster.stream(
            PROMPT, max_tokens=12, temperature=0, response_format={"type": "json_object"}
        )
    )
    assert text.startswith("{")


def test_over_grpc(cluster: WarmCluster) -> None:
    def generate(**sampling: Any) -> str:
        params = pb.SamplingParams(max_tokens=200, seed=1, **sampling)
        request = pb.GenerateRequest(text=PROMPT, sampling=params)
        answers = pb_grpc.InferenceStub(channel).Generate(request, timeout=120)
        return "".join(answer.text for answer in answers)

    wanted = pb.StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True)
    with grpc.insecure_channel(cluster.grpc) as channel:
        text = generate(structured_outputs=wanted)
        for wrong in (
            {"structured_outputs": pb.StructuredOutputs(regex="(")},
            {"structured_outputs": pb.StructuredOutputs()},
            {"grammar": "start: /a/"},
        ):
            with pytest.raises(grpc.RpcError) as caught:
                generate(**wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text == ask(cluster, structured_outputs=WANTED)[0]["text"]


def test_invalid_constraints_are_refused_by_the_router(cluster: WarmCluster) -> None:
    for fields, param in (
        ({"guided_json": {"items": {"uniqueItems": True}}}, "guided_json"),
        ({"guided_regex": r"(\w+x)?" * 5000}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ):
        answer = cluster.post("/v1/completions", prompt=PROMPT, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (
            400, param, "invalid_request_error",
        )  # fmt: skip
    check(ask(cluster, structured_outputs=WANTED)[0]["text"])


def test_a_dear_grammar_ends_alone(cluster: WarmCluster) -> None:
    """Each mask of it takes milliseconds, for as long as it may."""
    dear = 'start: start start start | start start | "a" | "aa" | ""'
    body = {"max_tokens": 300, "logit_bias": {"0": -100, "2": -100}, "temperature": 0}

    def ask_dear() -> Any:
        return cluster.post("/v1/completions", prompt=PROMPT, guided_grammar=dear, **body)

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask_dear) for _ in range(2)]
        check(ask(cluster, structured_outputs=WANTED)[0]["text"])
    for answer in (each.result() for each in answers):
        assert answer.status_code == 400, answer.text
        assert "its grammar has failed" in answer.json()["error"]["message"]
    cluster.wait_idle()
