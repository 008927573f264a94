"""Anthropic's own package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from weather import ANSWER, FOUND, QUESTION

from conftest import Server

TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_messages_whole_and_streamed_agree(server: Server, client: anthropic.Anthropic) -> None:
    options = {
        "model": server.model, "max_tokens": 12, "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Write of a dog."}]}],
    }  # fmt: skip
    whole = client.messages.create(**options, extra_body={"temperature": 0})
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""
        assert stream.get_final_message().stop_reason == "max_tokens"
    del options["max_tokens"]
    read = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert client.messages.count_tokens(**options).input_tokens == read


def test_a_refusal_is_typed(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="messages is an empty list"):
        client.messages.create(model=server.model, max_tokens=2, messages=[])


@pytest.fixture(scope="module")
def tool_client(tool_server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0) as client:
        yield client


def say(client: anthropic.Anthropic, messages: list[Any], stream: bool, **options: Any) -> Any:
    options = {"model": "tool-caller", "max_tokens": 200, "tools": [TOOL], **options}
    options["extra_body"] = {"temperature": 0}
    if not stream:
        return client.messages.create(messages=messages, **options)
    with client.messages.stream(messages=messages, **options) as streamed:
        said = "".join(event.text for event in streamed if event.type == "text")
        whole = streamed.get_final_message()
    assert said == "".join(block.text for block in whole.content if block.type == "text")
    return whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop(tool_client: anthropic.Anthropic, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    said = say(tool_client, messages, stream)
    assert said.stop_reason == "tool_use"
    calls = [block for block in said.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": city} for city in FOUND]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": FOUND[call.input["city"]]}
        for call in calls
    ]
    messages += [
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": results},
    ]
    said = say(tool_client, messages, stream)
    assert (said.stop_reason, said.content[-1].text) == ("end_turn", ANSWER)
    assert said.usage.output_tokens > 10 < said.usage.input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_is_insisted_on(tool_client: anthropic.Anthropic, choice: Any) -> None:
    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    *thought, call = say(tool_client, asked, stream=True, tool_choice=choice).content
    assert all(block.type == "thinking" for block in thought)
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
