"""/v1/responses and /v1/messages: the same chat, asked and answered in other words."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from fakes_pipeline import byte_level_folder
from http_site import Site, check_refused, serve
from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.router import ChatConfig
from pdserve.common.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NodeError,
    Overloaded,
    PermissionDenied,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
)
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.router.api.app_state import SMALL
from pdserve.router.api.ignored import Ignored
from pdserve.router.api.messages_body import MessagesBody
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Content, Event
from pdserve.router.api.preprocess_worker import Spec
from pdserve.router.api.preprocess_workers import PreprocessWorkers
from pdserve.router.api.responses_body import ResponsesBody
from pdserve.router.http.messages import MessagesFormat
from pdserve.router.http.responses import ResponsesFormat

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASK = {"max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
# What chat or completions would tell of, and these cannot.
NOT_TOLD: list[tuple[dict[str, Any], str]] = [
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 0}, "logprobs"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"n": 2}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"documents": [{"text": "a"}]}, "documents"),
]


async def answer(site: Site, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await site.post(path, body)
    assert response.status == 200, await response.text()
    return await response.json()


async def events(site: Site, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Their names are in both places."""
    response = await site.post(path, body | {"stream": True})
    assert response.status == 200, await response.text()
    frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def prompts(site: Site) -> list[str]:
    decode = site.tokenizer.decode
    return [decode(r.prompt_token_ids, skip_special_tokens=False) for r in site.generator.requests]


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_vllms_parameters(site: Site, path: str) -> None:
    more = {"top_k": 4, "seed": 9, "logit_bias": {"5": 1.5}, "ignore_eos": True, "min_p": "0.5"}
    nothing = {"n": 1, "logprobs": False, "return_token_ids": False, "prompt_logprobs": None}
    body = {"input": "hi"} if path == RESPONSES else ASK
    await answer(site, path, {**body, **more, **nothing, "cache_salt": "s", "wizardry": 1})
    (seen,) = site.generator.requests
    sampling = seen.sampling
    assert (sampling.top_k, sampling.seed, sampling.min_p) == (4, 9, 0.5)
    assert sampling.logit_bias == {5: 1.5} and sampling.ignore_eos and "s" in seen.cache_salt


@pytest.mark.parametrize("way", ["field", "header"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "hi"}),
        (MESSAGES, ASK),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", ASK),
    ],
)
async def test_timelines(site: Site, path: str, body: dict[str, Any], way: str) -> None:
    assert "pdserve" not in await answer(site, path, body | {"timeline": False})
    plain = await site.post(path, body | {"stream": True})
    assert "pdserve" not in await plain.text()
    headers = {"X-PDServe-Timeline": "1"} if way == "header" else {}
    body = body | ({"timeline": True} if way == "field" else {})
    whole = await (await site.post(path, body, **headers)).json()
    streamed = await (await site.post(path, body | {"stream": True}, **headers)).text()
    last = json.loads(streamed.removesuffix("data: [DONE]\n\n").rpartition("data: ")[2])
    for told in (whole, last):
        timeline = told["pdserve"]["timeline"]
        assert timeline["first_token"] == 0.5 and timeline["transfer_bytes"] == 7
    assert streamed.count("pdserve") == 1


# ---- OpenAI's Responses ---------------------------------------------------------------------


async def test_a_whole_response(site: Site) -> None:
    body = await answer(site, RESPONSES, {"input": "hi", "instructions": "be", "top_p": 0.5})
    assert body["id"].startswith("resp-") and body["object"] == "response"
    assert (body["status"], body["model"], body["store"]) == ("completed", "tiny/model", False)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    part = {"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}
    assert item["content"] == [part]
    assert body["usage"]["output_tokens"] == 8 and body["top_p"] == 0.5
    details = {"cached_tokens": 3, "cache_write_tokens": 0}
    assert body["usage"]["input_tokens_details"] == details
    assert prompts(site)[0].startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<")


async def test_the_events_of_a_response(site: Site) -> None:
    found = await events(site, RESPONSES, {"input": [{"role": "user", "content": "hi"}]})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    ends = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[-4:] == ends
    assert found[0]["response"]["output"] == [] and found[2]["item"]["content"] == []
    assert found[3]["part"]["text"] == ""
    assert "".join(event["delta"] for event in found[4:-4]) == "hello world"
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[-1]["response"]["usage"]["output_tokens"] == 8


async def test_a_response_that_is_cut(site: Site) -> None:
    body = await answer(site, RESPONSES, {"input": "hi", "max_output_tokens": 2})
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    found = await events(site, RESPONSES, {"input": "hi", "max_output_tokens": 2})
    assert found[-1]["type"] == "response.incomplete"


async def test_a_response_that_fails_in_mid_stream(site: Site) -> None:
    async with site.client() as client:
        site.generator.error, site.generator.error_after = NodeError("lost"), 2
        stream = await client.responses.create(model="alias", input="a", stream=True)
        *_, error, failed = [event async for event in stream]
        assert (error.type, error.message, failed.type) == ("error", "lost", "response.failed")
        assert failed.response.error.code == "node_failed"


def test_ids_of_items_sort_as_they_come() -> None:
    """Clients that gather a stream by ids may sort them."""
    sampling = SimpleNamespace(temperature=1.0, top_p=1.0)
    generation = SimpleNamespace(request_id="resp-1", sampling=sampling)
    asked: Any = SimpleNamespace(
        echoed=("null", "[]"),
        generation=generation,
        choices=None,
        body=SimpleNamespace(reasoning_effort=None),
    )
    shape = ResponsesFormat("tiny", asked, ResponsesBody(input="hi"))
    ids = [
        event["item"]["id"]
        for number in range(12)
        for event in shape.event(CallStart(number, f"c{number}", "f"))
        if event["type"] == "response.output_item.added"
    ]
    assert ids == sorted(ids) and len(set(ids)) == 12


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    body = ResponsesBody(
        input=[
            {"role": "user", "content": parts},
            {"type": "reasoning", "summary": []},
            call, {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {}}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {}}},
    )  # fmt: skip
    user, called, result = body.conversation(Ignored())
    texts = [{"type": "text", "text": each} for each in "ab"]
    assert user == {"role": "user", "content": texts}
    assert [each["id"] for each in called["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    fields = body.parameters(Ignored())
    assert fields["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert fields["tool_choice"]["function"] == {"name": "f"}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    assert fields["response_format"] == schema


BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": [5]}, "input"),
    ({"input": []}, "messages"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"previous_response_id": "resp-1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_completion_tokens"),
    ({"text": {"format": "x"}}, "text.format"),
    ({"text": {"format": {"type": []}}}, "text.format.type"),
    ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
    ({"tool_choice": {"type": {}}, "tools": [5]}, "tools[0]"),
    ({"input": [{"type": {}}]}, "input"),
    ({"reasoning": {"effort": "odd"}}, "reasoning.effort"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"temperature": 101}, "temperature"),
    ({"enable_response_messages": True}, "enable_response_messages"),
    ({"top_k": -2}, "top_k"),
    (
        {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
        "structured_outputs.regex",
    ),
    *NOT_TOLD,
]


async def test_bad_responses(site: Site) -> None:
    await check_refused(site, RESPONSES, {"input": "a", "stream": True}, BAD_RESPONSES)


# ---- Anthropic's Messages -------------------------------------------------------------------


async def test_a_whole_message(site: Site) -> None:
    blocks = [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    body = await answer(site, MESSAGES, {**ASK, "system": blocks, "stop_sequences": ["rld"]})
    assert body.pop("id").startswith("msg-")
    assert body == {
        "type": "message", "role": "assistant", "model": "tiny/model",
        "content": [{"type": "text", "text": "hello wo"}],
        "stop_reason": "stop_sequence", "stop_sequence": "rld",
        "usage": body["usage"],
    }  # fmt: skip
    assert body["usage"]["cache_read_input_tokens"] == 3
    assert prompts(site)[0].startswith("<|im_start|>system\nb<|im_end|>")
    count = await answer(site, f"{MESSAGES}/count_tokens", {**ASK, "system": "b"})
    assert count == {"input_tokens": len(site.generator.requests[0].prompt_token_ids)}


async def test_the_events_of_a_message(site: Site) -> None:
    start, block, *deltas, stop, delta, end = await events(site, MESSAGES, ASK)
    assert (start["type"], start["message"]["stop_reason"]) == ("message_start", None)
    assert block["content_block"] == {"type": "text", "text": ""}
    assert "".join(each["delta"]["text"] for each in deltas) == "hello world"
    assert (stop["type"], end["type"]) == ("content_block_stop", "message_stop")
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 8


async def test_a_message_begins_with_the_count_of_its_prompt(site: Site) -> None:
    start, *_, delta, _ = await events(site, MESSAGES, ASK)
    prompt = len(site.generator.requests[0].prompt_token_ids)
    begun = {"input_tokens": prompt, "cache_read_input_tokens": 0, "output_tokens": 0}
    assert start["message"]["usage"] == begun | {"cache_creation_input_tokens": 0}
    assert delta["usage"]["input_tokens"] + delta["usage"]["cache_read_input_tokens"] == prompt


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("a"), 400, "invalid_request_error"),
        (Unauthenticated("a"), 401, "authentication_error"),
        (PermissionDenied("a"), 403, "permission_error"),
        (ModelNotFound("a"), 404, "not_found_error"),
        (RequestTooLarge("a"), 413, "request_too_large"),
        (Overloaded("a"), 429, "rate_limit_error"),
        (NodeError("a"), 500, "api_error"),
        (RuntimeError("a"), 500, "api_error"),
        (Unavailable("a"), 503, "overloaded_error"),
        (DeadlineExceeded("a"), 504, "timeout_error"),
    ],
)
async def test_errors_are_anthropics_own(
    site: Site, error: Exception, status: int, kind: str
) -> None:
    """Before a stream, within one, and for OpenAI's clients as they were."""
    site.generator.error = error
    answer = await site.post(MESSAGES, ASK, **{"X-Request-Id": "mine"})
    body = await answer.json()
    assert (answer.status, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["request_id"] == answer.headers["request-id"] == "mine"
    site.generator.error_after = 2
    last = (await events(site, MESSAGES, ASK))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    site.generator.error_after = 0
    response = await site.post(RESPONSES, {"input": "a"})
    types = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    types |= {504: "timeout_error"}
    default = "server_error" if status >= 500 else "invalid_request_error"
    assert (await response.json())["error"]["type"] == types.get(status, default)
    assert "request-id" not in response.headers


async def test_anthropics_clients_know_their_requests(site: Site) -> None:
    for path, body in ((MESSAGES, ASK), (f"{MESSAGES}/count_tokens", ASK), (MESSAGES, {})):
        for stream in (False, True):
            answer = await site.post(path, {**body, "stream": stream}, Origin="http://localhost")
            assert answer.headers["request-id"] == answer.headers["X-Request-Id"] != ""
            assert "Request-Id" in answer.headers["Access-Control-Expose-Headers"]


async def test_thoughts_are_as_openais_package_declares(tmp_path: Path) -> None:
    """Answers that no tiny model gives: `tests/clients` has the rest."""
    from openai.types import responses as openai  # takes as long as many tests

    chat = ChatConfig(reasoning_parser="qwen3")
    async with serve(byte_level_folder(tmp_path), chat=chat) as site:
        site.generator.text = "<think>hm</think>hello"
        declared: TypeAdapter[Any] = TypeAdapter(openai.ResponseStreamEvent)
        found = await events(site, RESPONSES, {"input": "hi"})
        for event in found:
            declared.validate_json(json.dumps(event), strict=True)
        assert "response.reasoning_text.delta" in [event["type"] for event in found]
        whole = await answer(site, RESPONSES, {"input": "hi"})
        openai.Response.model_validate_json(json.dumps(whole), strict=True)
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]


BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
    ({"thinking": {"type": "odd"}}, "thinking.type"),
    ({"output_config": {"effort": "odd"}}, "output_config.effort"),
    ({"system": [{"type": "text", "text": 5}]}, "system"),
    ({"top_k": -2}, "top_k"),
    ({"stop": ["a"]}, "stop"),
    *NOT_TOLD,
]


async def test_bad_messages(site: Site) -> None:
    await check_refused(site, MESSAGES, ASK, BAD_MESSAGES)


async def test_errors_that_no_message_had_yet(tmp_path: Path) -> None:
    """They have Anthropic's shape, too, and are counted, under each path."""
    metrics = RouterMetrics()
    path = "/api" + MESSAGES
    async with serve(byte_level_folder(tmp_path), root_path="/api", metrics=metrics) as site:
        large = ASK | {"system": "a" * 70_000}
        for status, response in [
            (413, await site.post(path, large)),
            (415, await site.post(path, ASK, **{"Content-Type": "text/plain"})),
            (400, await site.post(path, {})),
            (405, await site.session.get(site.url + path)),
        ]:
            body = await response.json()
            assert (response.status, body["type"], set(body)) == (
                status,
                "error",
                {"type", "error", "request_id"},
            )
        assert (await site.session.get(site.url + "/api/v1/message")).status == 404
    found = {
        code: metrics.registry.get_sample_value("pdserve_requests_total", {"code": code})
        for code in ("REQUEST_TOO_LARGE", "UNSUPPORTED_MEDIA_TYPE", "INVALID_REQUEST")
    }
    assert set(found.values()) == {1}, found


def test_calls_and_their_results() -> None:
    used = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}
    body = MessagesBody(
        messages=[
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, used]},
            {"role": "user", "content": [result, {"type": "text", "text": "b"}]},
        ],
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    called, given, said = body.conversation(Ignored())
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert given == {"role": "tool", "tool_call_id": "t1", "content": "2"}
    assert said == {"role": "user", "content": [{"type": "text", "text": "b"}]}
    assert body.parameters(Ignored())["tool_choice"] == "required"
    assert body.parameters(Ignored())["parallel_tool_calls"] is False
    # A call becomes a block.
    counts: Any = SimpleNamespace(reasoning_tokens=0)
    shape = MessagesFormat("msg-1", "m", 7, counts)
    parsed: list[Event] = [Content("a"), CallStart(0, "t1", "f"), CallArguments(0, "{}")]
    found = [event for each in parsed for event in shape.event(each)]
    found += shape.finish("tool_calls", None)
    assert [(event["type"], event["index"]) for event in found] == [
        ("content_block_start", 0), ("content_block_delta", 0), ("content_block_stop", 0),
        ("content_block_start", 1), ("content_block_delta", 1), ("content_block_stop", 1),
    ]  # fmt: skip


async def test_a_large_body_is_told_again_as_a_small_one() -> None:
    """Another process has prepared it, and keeps what has become tokens."""
    folder = MODELS / "llama-gqa"
    spec = Spec(asdict(ModelConfig(model=str(folder))), {}, {})
    workers = PreprocessWorkers(spec, size=1)
    parameters = {"type": "object", "description": "x" * SMALL}
    told = {
        "instructions": "Be brief: é",
        "tools": [{"type": "function", "name": "f", "parameters": parameters}],
    }
    async with serve(folder, limit=10**6, workers=workers) as site:
        for stream in (False, True):
            body = {"input": "hi", "tool_choice": "none", "stream": stream, **told}
            if stream:
                found = [each["response"] for each in (await events(site, RESPONSES, body))[:2]]
            else:
                found = [await answer(site, RESPONSES, body)]
            for each in found:
                assert {name: each[name] for name in told} == told
    await workers.close()
