"""OpenAI's `functions` and `function_call`, from before there were tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, check_refused, serve
from pdserve.common.config.router import ChatConfig
from pdserve.router.api.parsers.formats import HermesParser

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTIONS = [{"name": "f", "parameters": PARAMETERS}, {"name": "g"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEMPLATE = "{{ {'m': messages, 't': tools}|tojson }}"


@pytest.fixture
async def legacy_site(tmp_path: Path) -> AsyncIterator[Site]:
    chat = ChatConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    folder = byte_level_folder(tmp_path)
    async with serve(folder, 2000, chat=chat, tool_parser=HermesParser) as site:
        site.generator.text = CALL + CALL  # there was one call at most
        yield site


async def test_a_function_is_called(legacy_site: Site) -> None:
    body = await legacy_site.chat(functions=FUNCTIONS, function_call="auto")
    (choice,) = body["choices"]
    called = {"name": "f", "arguments": '{"x": 1}'}
    message = {"role": "assistant", "content": None, "function_call": called}
    assert (choice["message"], choice["finish_reason"]) == (message, "function_call")


async def test_a_function_is_called_in_a_stream(legacy_site: Site) -> None:
    events = await legacy_site.events(
        "/v1/chat/completions", {"messages": CHAT, "functions": FUNCTIONS}
    )
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert calls[0] == {"name": "f", "arguments": ""}
    assert "".join(call["arguments"] for call in calls) == '{"x": 1}'
    assert not any("tool_calls" in delta for delta in deltas)
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_a_named_function_is_forced(legacy_site: Site) -> None:
    legacy_site.generator.text = '{"x": 1}'
    body = await legacy_site.chat(functions=FUNCTIONS, function_call={"name": "f"})
    (choice,) = body["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"x": 1}'}
    assert choice["finish_reason"] == "stop"
    legacy_site.generator.text = CALL
    body = await legacy_site.chat(functions=FUNCTIONS, function_call="none")
    assert body["choices"][0]["message"]["content"] == CALL


async def test_the_template_gets_tools_and_their_results(legacy_site: Site) -> None:
    legacy_site.tokenizer.use_chat_template(TEMPLATE)
    called = {"name": "f", "arguments": '{"x": 1}'}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "f", "content": "2"},
    ]
    await legacy_site.chat(messages=messages, functions=FUNCTIONS)
    prompt = legacy_site.generator.requests[-1].prompt_token_ids
    given: dict[str, Any] = json.loads(legacy_site.tokenizer.decode(prompt))
    (call,) = given["m"][1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"x": 1}}
    assert given["m"][2] == {
        "role": "tool", "name": "f", "content": "2", "tool_call_id": call["id"],
    }  # fmt: skip
    assert [tool["function"]["name"] for tool in given["t"]] == ["f", "g"]


async def test_wrong_functions(legacy_site: Site) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"functions": FUNCTIONS, "tools": [tool]}, "functions"),
        ({"functions": FUNCTIONS, "function_call": {"name": "h"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"function_call": "auto"}, "function_call"),
    ]
    await check_refused(legacy_site, "/v1/chat/completions", {"messages": CHAT}, cases)
