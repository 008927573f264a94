"""C11: whole answers, every event of their streams and errors are what the packages of OpenAI and
Anthropic declare: all their fields, of their very types, as JSON has them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import requests
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter
from weather import QUESTION

from conftest import Server

TIMEOUT = 120.0  # seconds
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOLD = {"name": "get_weather", "description": "The weather in a city."}
FUNCTION = {"type": "function", "function": {**TOLD, "parameters": PARAMETERS}}
SAID = [{"role": "user", "content": QUESTION}]
TEXT = [{"role": "user", "content": "Write about a dog."}]
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 8}),
    (
        "/v1/completions",
        {"prompt": ["Zoë", "叫"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 8},
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 0}),
    ("/v1/chat/completions", {"messages": TEXT, "max_tokens": 8}),
    (
        "/v1/chat/completions",
        {"messages": TEXT, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 8},
    ),
    ("/v1/chat/completions", {"messages": SAID, "tools": [FUNCTION], "max_tokens": 300}),
    (
        "/v1/chat/completions",
        {"messages": SAID, "tools": [FUNCTION], "tool_choice": FUNCTION, "max_tokens": 60},
    ),
    ("/v1/responses", {"input": "Write about a dog.", "max_output_tokens": 8}),
    (
        "/v1/responses",
        {
            "input": SAID, "instructions": "Be brief.", "max_output_tokens": 300,
            "tools": [{"type": "function", "strict": False, **TOLD, "parameters": PARAMETERS}],
            "metadata": {"a": "b"},
        },
    ),
    ("/v1/messages", {"messages": TEXT, "max_tokens": 8}),
    ("/v1/messages", {"messages": TEXT, "max_tokens": 200, "stop_sequences": ["e"]}),
    (
        "/v1/messages",
        {"messages": SAID, "max_tokens": 300, "tools": [{**TOLD, "input_schema": PARAMETERS}]},
    ),
]  # fmt: skip
WHOLE: dict[str, Any] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/responses": Response,
    "/v1/messages": Message,
}
EVENT: dict[str, Any] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/responses": ResponseStreamEvent,
    "/v1/messages": RawMessageStreamEvent,
}
NAMED = ("/v1/responses", "/v1/messages")  # each event says its name in a line of its own
ids = [f"{path.rpartition('/')[2]}-{i}" for i, (path, _) in enumerate(ASKS)]


@cache
def adapter(declared: Any) -> TypeAdapter[Any]:
    return TypeAdapter(declared)


def check(declared: Any, said: Any) -> Any:
    """Checks it as the package declares it; "3" is no number, and nothing it needs is left out."""
    return adapter(declared).validate_json(json.dumps(said), strict=True)


def without_nulls(event: dict[str, Any]) -> dict[str, Any]:
    """A completion without the two nulls that OpenAI's own server sends and its package does not
    declare: no reason yet in a stream, and nothing before the first token of an echo."""
    for choice in event["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if (told := choice["logprobs"]) and told["token_logprobs"][:1] == [None]:
            assert told["top_logprobs"][0] is None and told["text_offset"][0] == 0
            told["token_logprobs"][0], told["top_logprobs"][0] = 0.0, {}
    return event


def ask(server: Server, path: str, body: dict[str, Any]) -> requests.Response:
    body = {"model": server.model, "temperature": 0, **body}
    return requests.post(server.url + path, json=body, timeout=TIMEOUT)


def events(path: str, answer: requests.Response) -> Iterator[dict[str, Any]]:
    """Returns what the frames of a stream hold; their form is checked on the way."""
    assert answer.status_code == 200, answer.text
    frames = answer.text.split("\n\n")
    assert frames.pop() == ""
    if path not in NAMED:
        assert frames.pop() == "data: [DONE]"
    for frame in frames:
        name, data = frame.split("\n") if path in NAMED else ("", frame)
        event = json.loads(data.removeprefix("data: "))
        assert not name or name == f"event: {event['type']}"
        yield event


@pytest.mark.parametrize(("path", "body"), ASKS, ids=ids)
def test_strict_whole_answers(tool_server: Server, path: str, body: dict[str, Any]) -> None:
    answer = ask(tool_server, path, body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    if path == "/v1/completions":
        assert all(choice["finish_reason"] for choice in said["choices"])
        said = without_nulls(said)
    check(WHOLE[path], said)


@pytest.mark.parametrize(("path", "body"), ASKS, ids=ids)
def test_strict_events(tool_server: Server, path: str, body: dict[str, Any]) -> None:
    streamed = {"stream": True}
    if path not in NAMED:
        streamed["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    found = list(events(path, ask(tool_server, path, body | streamed)))
    assert len(found) > 1
    for event in found:
        check(EVENT[path], without_nulls(event) if path == "/v1/completions" else event)


def test_strict_calls_are_among_what_is_checked(tool_server: Server) -> None:
    """The questions above make this model call tools, in each of the APIs."""
    found = {}
    for path, body in ASKS:
        if "tools" in body and "tool_choice" not in body:
            found[path] = ask(tool_server, path, body).json()
    (choice,) = found["/v1/chat/completions"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert "function_call" in [each["type"] for each in found["/v1/responses"]["output"]]
    assert found["/v1/messages"]["stop_reason"] == "tool_use"


def test_strict_usage(tool_server: Server) -> None:
    """Anthropic's stream begins with the count of the prompt's tokens."""
    said = [{"role": "user", "content": f"Write about {uuid.uuid4()}."}]  # nothing of it is cached
    body = {"messages": said, "max_tokens": 4}
    count = ask(tool_server, "/v1/messages/count_tokens", {"messages": said})
    tokens = check(MessageTokensCount, count.json()).input_tokens
    start, *_, delta, _ = events(
        "/v1/messages", ask(tool_server, "/v1/messages", body | {"stream": True})
    )
    assert start["message"]["usage"]["input_tokens"] == tokens > 0
    used = delta["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == tokens
    response = ask(tool_server, "/v1/responses", {"input": said, "max_output_tokens": 4}).json()
    details = response["usage"]["input_tokens_details"]
    assert details == {"cached_tokens": details["cached_tokens"], "cache_write_tokens": 0}


@pytest.mark.parametrize(
    ("path", "method", "body", "status", "kind"),
    [
        ("/v1/messages", "POST", {"messages": [], "max_tokens": 1}, 400, "invalid_request_error"),
        ("/v1/messages", "POST", {"model": "x", "messages": TEXT}, 404, "not_found_error"),
        ("/v1/messages", "GET", None, 405, "invalid_request_error"),
        ("/v1/messages/batches", "POST", {}, 404, "not_found_error"),
    ],
)
def test_strict_errors_of_anthropic(
    server: Server, path: str, method: str, body: Any, status: int, kind: str
) -> None:
    sent = {"model": server.model, "max_tokens": 1} | body if body is not None else None
    answer = requests.request(method, server.url + path, json=sent, timeout=TIMEOUT)
    assert answer.status_code == status, answer.text
    error = check(ErrorResponse, answer.json())
    assert error.error.type == kind
    assert error.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_strict_models_and_errors_of_openai(server: Server) -> None:
    models = requests.get(f"{server.base_url}/models", timeout=TIMEOUT).json()
    assert [check(Model, each).id for each in models["data"]] == [server.model]
    for path in WHOLE:
        if path != "/v1/messages":
            answer = ask(server, path, {"temperature": -1, "input": "a", "prompt": "a"})
            assert answer.status_code == 400
            check(ErrorObject, answer.json()["error"])
