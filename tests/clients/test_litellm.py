"""LiteLLM: its OpenAI and vLLM providers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest
from weather import ANSWER, FOUND, NEWS, NEWS_WEATHER, QUESTION, Weather, get_weather

from conftest import Server

TOOL = {
    "type": "function",
    "function": {
        "name": get_weather.__name__,
        "description": "The weather in a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        },
    },
}  # fmt: skip


@pytest.fixture(params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, tool_server: Server) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{tool_server.model}", "api_base": tool_server.base_url,
        "api_key": "none", "temperature": 0, "max_retries": 0,
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop(options: dict[str, Any], stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def say() -> Any:
        said: Any = litellm.completion(**options, messages=messages, tools=[TOOL], stream=stream)
        if stream:
            said = litellm.stream_chunk_builder(list(said), messages=messages)
        assert said.usage.completion_tokens > 0 < said.usage.prompt_tokens
        return said.choices[0]

    choice = say()
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == list(FOUND)
    messages.append(choice.message.model_dump())
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": found}
        for call, found in zip(calls, FOUND.values(), strict=True)
    ]
    choice = say()
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)


def test_usage_at_the_end_of_a_stream(options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole: Any = litellm.completion(**options, messages=messages)
    *_, last = litellm.completion(
        **options, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_pydantic_model(options: dict[str, Any]) -> None:
    said: Any = litellm.completion(
        **options, messages=[{"role": "user", "content": NEWS}], response_format=Weather
    )
    assert Weather.model_validate_json(said.choices[0].message.content) == NEWS_WEATHER


async def test_text_and_responses(server: Server) -> None:
    options = {"api_base": server.base_url, "api_key": "none", "temperature": 0}
    text: Any = await litellm.atext_completion(
        model=f"text-completion-openai/{server.model}", prompt="Once upon", max_tokens=8, **options
    )
    assert text.usage.completion_tokens == 8 and text.choices[0].finish_reason == "length"
    said: Any = await litellm.aresponses(
        model=f"openai/{server.model}", input="Write about a dog.", max_output_tokens=16, **options
    )
    assert (said.status, said.usage.output_tokens) == ("incomplete", 16)


def test_a_refusal_is_typed(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(
            **{**options, "temperature": -1}, messages=[{"role": "user", "content": "a"}]
        )
