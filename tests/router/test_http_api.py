"""The HTTP API through a real server: what OpenAI's client, curl and a browser would see."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse

from fakes_pipeline import byte_fallback_folder, byte_level_folder
from http_site import CHAT, WINDOW, Site, check_error, check_refused, serve
from pdserve.common.config.router import ChatConfig
from pdserve.common.core.errors import (
    DeadlineExceeded,
    NodeError,
    Overloaded,
    Unavailable,
)
from pdserve.router.http import response
from pdserve.router.http.events import EventWriter
from pdserve.router.http.request import STATE
from waiting import eventually

# ---- shapes -------------------------------------------------------------------------------


async def test_priorities_arrive_where_they_count(tmp_path: Path) -> None:
    async with serve(byte_level_folder(tmp_path), priorities=True) as site:
        await site.complete(priority=-5)
        await site.chat(priority="7")
        await site.post("/v1/messages", {"messages": CHAT, "max_tokens": 5, "priority": 3})
        await site.post("/v1/responses", {"input": "a", "priority": 2})
        await site.complete()
        assert [each.priority for each in site.generator.requests] == [-5, 7, 3, 2, 0]
        refused = await site.post("/v1/completions", {"prompt": "a", "priority": 2**31})
        await check_error(refused, 400, "priority")


async def test_a_long_whole_answer_is_not_made_on_the_event_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[threading.Thread] = []
    for writer in (response.OpenAIWriter, EventWriter):

        def whole(self: Any, *args: Any, real: Any = writer.whole) -> Any:
            made.append(threading.current_thread())
            return real(self, *args)

        monkeypatch.setattr(writer, "whole", whole)
    monkeypatch.setattr(response, "MUCH", 20)
    chats = {"model": "alias", "max_tokens": 50, "messages": CHAT}
    for path, body in (
        ("/v1/completions", {"prompt": ["a"] * 4}),
        ("/v1/chat/completions", {"messages": CHAT, "n": 4}),
        ("/v1/messages", chats),
        ("/v1/responses", {"input": "a"}),
    ):
        site.generator.text = "hello world " * 8
        assert (await site.post(path, body)).status == 200
        assert made and threading.main_thread() not in made
        made.clear()
    site.generator.text = "hell"
    assert (await site.post("/v1/completions", {"prompt": "a"})).status == 200
    assert made == [threading.main_thread()]


async def test_completion_shape(site: Site) -> None:
    body = await site.complete(prompt="hell", model="tiny/model")
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "tiny/model",
        "choices": [
            {
                "index": 0,
                "text": "hello world",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 8,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


async def test_defaults_of_max_tokens(site: Site) -> None:
    await site.complete()
    await site.chat()
    await site.complete(prompt=[5] * (WINDOW - 3))
    first, chat, long = site.generator.requests
    assert first.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == WINDOW - len(chat.prompt_token_ids)
    assert long.sampling.max_tokens == 3


async def test_every_parameter_arrives(site: Site) -> None:
    await site.complete(
        max_tokens=9, min_tokens=2, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=7, n=2,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5, ignore_eos=True,
        logit_bias={"5": -100}, stop="x", stop_token_ids=[3], include_stop_str_in_output=True,
        skip_special_tokens=False, logprobs=2, user="me", priority=0, best_of=2,
        response_format={"type": "text"}, stream_options=None, allowed_token_ids=[3, 4],
        bad_words=["hell", " x"], use_beam_search=False, metadata={"a": "b"},
    )  # fmt: skip
    (request,) = site.generator.requests
    sampling = request.sampling
    assert sampling.max_tokens == 9 and sampling.min_tokens == 2 and sampling.seed == 7
    assert sampling.greedy and sampling.top_p == 0.5 and sampling.top_k == 0
    assert sampling.min_p == 0.1 and sampling.presence_penalty == 1
    assert sampling.frequency_penalty == -1 and sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {5: -100} and sampling.stop_token_ids == (3,)
    assert sampling.ignore_eos and sampling.logprobs == 2
    assert sampling.allowed_token_ids == (3, 4)
    forms = [site.tokenizer.encode(form) for form in ("hell", " hell", "x", " x")]
    assert sampling.bad_words_token_ids == tuple(forms)
    assert request.n == 2 and request.stop == ("x",)
    assert request.include_stop_str_in_output and not request.skip_special_tokens


async def test_null_means_absent(site: Site) -> None:
    names = "max_tokens temperature top_p n seed stop stream logprobs echo user logit_bias suffix"
    await site.complete(**dict.fromkeys(names.split()))
    assert site.generator.requests[0].sampling.temperature == 1.0


async def test_numbers_as_clients_write_them(site: Site) -> None:
    await site.complete(
        max_tokens=8.0, temperature="0.5", n="2", seed=-1, top_k=-1.0, logit_bias={"5": "-1.5"}
    )
    await site.complete(seed=-1)
    first, second = site.generator.requests
    assert (first.sampling.max_tokens, first.sampling.temperature, first.n) == (8, 0.5, 2)
    assert first.sampling.logit_bias == {5: -1.5} and first.sampling.top_k == 0
    assert first.sampling.seed != second.sampling.seed


async def test_the_end_of_a_prompt(site: Site) -> None:
    prompt = list(range(1, WINDOW + 20))
    answer = await site.complete(prompt=prompt, truncate_prompt_tokens=3, echo=True)
    assert answer["choices"][0]["text"].startswith(site.tokenizer.decode(prompt[-3:]))
    await site.complete(prompt=prompt, truncate_prompt_tokens=-1, max_tokens=10)
    await site.chat(truncate_prompt_tokens=4, max_tokens=1)
    ends = [list(request.prompt_token_ids) for request in site.generator.requests]
    assert ends[:2] == [prompt[-3:], prompt[-(WINDOW - 10) :]]
    assert tuple(ends[2]) == site.tokenizer.apply_chat_template(CHAT)[-4:]


async def test_token_ids(site: Site) -> None:
    said = [*site.tokenizer.encode("hello world"), site.tokenizer.eos_token_ids[0]]
    options = {"return_token_ids": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    whole = await site.complete(prompt=["hell", "ab"], n=2, **options)
    assert [each["token_ids"] for each in whole["choices"]] == [said] * 4
    prompts = [each["prompt_token_ids"] for each in whole["choices"]]
    assert prompts == [list(site.tokenizer.encode(one)) for one in ("hell", "hell", "ab", "ab")]
    assert whole["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in said]
    events = await site.events("/v1/completions", {"prompt": [7, 8], "return_token_ids": True})
    assert [e["choices"][0].get("prompt_token_ids") for e in events][:2] == [[7, 8], None]
    assert [i for e in events for i in e["choices"][0]["token_ids"]] == said
    body = {"messages": CHAT, **options, "logprobs": True}
    prompt = list(site.tokenizer.apply_chat_template(CHAT))
    chat = await site.chat(**options | {"logprobs": True})
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (prompt, said)
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{said[0]}"
    events = await site.events("/v1/chat/completions", body)
    assert [event.get("prompt_token_ids") for event in events][:2] == [prompt, None]
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == said


async def test_usage_in_every_event(site: Site) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hell", "stream_options": options}
    *events, last = await site.events("/v1/completions", body)
    assert [event["usage"]["completion_tokens"] for event in events] == list(range(1, 9))
    assert events[-1]["usage"]["total_tokens"] == last["usage"]["total_tokens"] == 9
    body["stream_options"] = {"continuous_usage_stats": True}  # of no use alone, as in vLLM
    assert all("usage" not in e for e in await site.events("/v1/completions", body))


async def test_many_stop_strings(site: Site) -> None:
    stops = [f"{i} and so on" for i in range(254)] + ["o w", "wor"]
    (choice,) = (await site.complete(stop=stops))["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("hell", "o w")


async def test_max_completion_tokens_wins(site: Site) -> None:
    body = await site.chat(max_tokens=5, max_completion_tokens=2)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 2


async def test_empty_prompt_needs_a_bos(site: Site, tmp_path: Path) -> None:
    await check_error(await site.post("/v1/completions", {"prompt": ""}), 400, "prompt")
    async with serve(byte_fallback_folder(tmp_path / "llama")) as llama:
        llama.generator.text = "hello world"
        body = await llama.complete(prompt="")
        assert body["choices"][0]["text"] == "hello world"
        assert body["usage"]["prompt_tokens"] == 1


async def test_messages_parts_roles_and_continuation(site: Site) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "hell", "tool_calls": []},
    ]
    await site.chat(messages=messages, continue_final_message=True, max_tokens=1)
    prompt = site.generator.requests[0].prompt_token_ids
    text = site.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text == "<|im_start|>system\na<|im_end|>\n<|im_start|>assistant\nhell"


async def test_a_clients_template_needs_trust(site: Site, tmp_path: Path) -> None:
    body = {"messages": CHAT, "chat_template": "x{{ y }}", "chat_template_kwargs": {"y": "z"}}
    await check_error(await site.post("/v1/chat/completions", body), 400, "chat_template")
    chat = ChatConfig(trust_request_chat_template=True)
    async with serve(byte_level_folder(tmp_path), chat=chat) as trusting:
        await trusting.chat(**body)
        prompt = trusting.generator.requests[0].prompt_token_ids
        assert trusting.tokenizer.decode(prompt) == "xz"


async def test_unknown_fields_are_logged_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve.router.api.app_state")
    await site.complete(frobnicate=1)
    await site.complete(frobnicate=2)
    assert caplog.text.count("frobnicate") == 1


# ---- streams ------------------------------------------------------------------------------


async def test_chat_stream_raw(site: Site) -> None:
    site.generator.text = "é o"
    response = await site.post("/v1/chat/completions", {"messages": CHAT, "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Request-Id"]
    events = await site.events("/v1/chat/completions", {"messages": CHAT})
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all("usage" not in event for event in events)
    choices = [event["choices"][0] for event in events]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:-1] == [{"content": "é"}, {"content": " "}, {"content": "o"}]
    assert deltas[-1] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]


# ---- errors -------------------------------------------------------------------------------

# Those that `tests/e2e/test_api.py` asks of a cluster are not here.
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**400}, "prompt"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"n": 10**6}, "n"),
    ({"best_of": 2}, "best_of"),  # they are streams
    ({"best_of": 129}, "best_of"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["x" * 999 + str(i) for i in range(9)]}, "stop"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"guided_json": {"type": "banana"}}, "guided_json"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"priority": 1}, "priority"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": WINDOW + 1}, "truncate_prompt_tokens"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"temperature": "nan"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"n": "1e1000"}, "n"),
    ({"logit_bias": {"5": "1e9"}}, "logit_bias"),
    ({"stop": [1]}, "stop"),
    ({"timeline": "yes"}, "timeline"),
    ({"stop": "x" * 2000}, "stop"),
    ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    ({"repetition_penalty": 1e-45, "temperature": 1}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"temperature": 100.5}, "temperature"),
    ({"top_p": 1e-50}, "top_p"),  # nothing, in the 32 bits that nodes get
    ({"min_p": 9}, "min_p"),
    ({"seed": 10**4000}, "seed"),
    ({"max_tokens": 10**4299}, "prompt"),
    ({"logit_bias": {str(10**4000): 1}}, "logit_bias"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"logprobs": 20, "echo": True, "n": 128, "prompt": [[1] * 8] * 32}, "prompt_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x" * 2 * WINDOW}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"echo": True}, "echo"),
    ({"stream_options": {}}, "stream_options"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
]


async def test_bad_completions(site: Site) -> None:
    await check_refused(site, "/v1/completions", {"prompt": "a", "stream": True}, BAD_COMPLETIONS)


async def test_bad_chats(site: Site) -> None:
    await check_refused(site, "/v1/chat/completions", {"messages": CHAT}, BAD_CHATS)


async def test_malformed_json(site: Site) -> None:
    for raw in (b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b"[" * 5000):
        error = await check_error(await site.post("/v1/completions", raw), 400)
        assert error["code"] == "invalid_json", raw


async def test_context_message_has_all_numbers(site: Site) -> None:
    response = await site.post("/v1/completions", {"prompt": [5] * 90, "max_tokens": 20})
    error = await check_error(response, 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 100 tokens" in error["message"]
    assert "requested 110 tokens (90 in the prompt, 20 for the completion)" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full", retry_after=2.5), 429, "3"),
        (Unavailable("no node"), 503, "1"),
        (DeadlineExceeded("late"), 504, None),
        (NodeError("lost"), 500, None),
    ],
)
async def test_errors_before_the_first_token_set_the_status(
    site: Site, error: Exception, status: int, retry_after: str | None, stream: bool
) -> None:
    site.generator.error = error
    response = await site.post("/v1/completions", {"prompt": "a", "stream": stream})
    await check_error(response, status)
    assert response.headers.get("Retry-After") == retry_after
    assert site.generator.open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_names_only_the_request(site: Site, stream: bool) -> None:
    site.generator.error = KeyError("secret")
    response = await site.post(
        "/v1/completions", {"prompt": ["a", "b"], "stream": stream}, **{"X-Request-Id": "mine"}
    )
    error = await check_error(response, 500)
    assert "mine" in error["message"] and "secret" not in error["message"]
    assert site.generator.open == 0


@pytest.mark.parametrize("error", [NodeError("lost"), KeyError("secret")])
async def test_error_in_mid_stream_is_an_event(site: Site, error: Exception) -> None:
    site.generator.error, site.generator.error_after = error, 2
    events = await site.events("/v1/completions", {"prompt": ["a", "b"]})
    assert set(events[-1]) == {"error"}
    assert events[-1]["error"]["type"] == "server_error"
    assert "secret" not in events[-1]["error"]["message"]
    assert all("error" not in event for event in events[:-1])
    assert site.generator.open == 0


# ---- connections --------------------------------------------------------------------------


async def raw_request(site: Site, body: dict[str, Any]) -> tuple[Any, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


async def test_stop_lets_requests_end(site: Site) -> None:
    site.generator.delay = 0.02
    request = asyncio.create_task(site.complete())
    await eventually(lambda: site.generator.open)
    await site.server.stop(drain_timeout=5)
    assert (await request)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_tells_those_it_cuts_off(site: Site, stream: bool) -> None:
    site.generator.delay = 0.05
    site.generator.text = "hello " * 10
    ask = site.events if stream else site.post
    request = asyncio.create_task(ask("/v1/completions", {"prompt": "a", "max_tokens": 70}))
    await eventually(lambda: site.generator.tokens_said)
    await site.server.stop(drain_timeout=0.05)
    assert site.generator.open == 0
    if stream:
        assert (await request)[-1]["error"]["code"] == "shutting_down"
    else:
        await check_error(await request, 503)


async def test_no_new_request_while_draining(site: Site) -> None:
    """On a connection that is already open."""
    site.generator.delay = 0.05
    await site.complete(max_tokens=1)
    _, writer = await raw_request(site, {"prompt": "a"})
    await eventually(lambda: site.generator.open)
    stop = asyncio.create_task(site.server.stop(drain_timeout=5))
    await asyncio.sleep(0)
    await check_error(await site.post("/v1/completions", {"prompt": "a"}), 503)
    await stop
    writer.close()


# ---- the rest -----------------------------------------------------------------------------


async def get(site: Site, path: str) -> ClientResponse:
    response = await site.session.get(site.url + path)
    await response.read()
    return response


async def test_models(site: Site) -> None:
    body = await (await get(site, "/v1/models")).json()
    card = {
        "id": "tiny/model",
        "object": "model",
        "created": 1700000000,
        "owned_by": "pdserve",
        "root": site.server.app[STATE].model.root,
        "parent": None,
        "max_model_len": WINDOW,
    }
    assert body == {"object": "list", "data": [card, card | {"id": "alias"}]}
    assert await (await get(site, "/v1/models/tiny/model")).json() == card
