"""Haystack: its generators and its agent."""

from __future__ import annotations

from typing import Any

import pytest
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from weather import ANSWER, FOUND, NEWS, NEWS_WEATHER, QUESTION, Weather, get_weather

from conftest import Server


@pytest.fixture(params=[OpenAIChatGenerator, OpenAIResponsesChatGenerator])
def generator(request: pytest.FixtureRequest, tool_server: Server) -> Any:
    return request.param(
        api_key=Secret.from_token("none"), model=tool_server.model, max_retries=0,
        api_base_url=tool_server.base_url, generation_kwargs={"temperature": 0},
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent(generator: Any, stream: bool) -> None:
    pieces: list[StreamingChunk] = []
    agent = Agent(
        chat_generator=generator,
        tools=[create_tool_from_function(get_weather)],
        streaming_callback=pieces.append if stream else None,
    )
    found = agent.run([ChatMessage.from_user(QUESTION)])
    assert found["last_message"].text == ANSWER
    results = [m.tool_call_result.result for m in found["messages"] if m.tool_call_result]
    assert results == list(FOUND.values())
    if stream:
        assert "".join(piece.content for piece in pieces if not piece.tool_call_result) == ANSWER


def test_a_pydantic_model(tool_server: Server) -> None:
    generator = OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model=tool_server.model, max_retries=0,
        api_base_url=tool_server.base_url,
        generation_kwargs={"temperature": 0, "response_format": Weather},
    )  # fmt: skip
    (reply,) = generator.run([ChatMessage.from_user(NEWS)])["replies"]
    assert Weather.model_validate_json(reply.text) == NEWS_WEATHER
    assert reply.meta["usage"]["completion_tokens"] > 10
