"""OpenAI's Agents SDK, by chat and by responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import agents
import openai
import pytest
from weather import ANSWER, NEWS, NEWS_WEATHER, QUESTION, Weather, get_weather

from conftest import Server


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
async def model(request: pytest.FixtureRequest, tool_server: Server) -> AsyncIterator[Any]:
    agents.set_tracing_disabled(True)  # else it is sent to OpenAI
    async with openai.AsyncOpenAI(
        base_url=tool_server.base_url, api_key="none", max_retries=0
    ) as client:
        yield request.param(model=tool_server.model, openai_client=client)


def agent(model: Any, **options: Any) -> agents.Agent[Any]:
    settings = agents.ModelSettings(temperature=0, include_usage=True)
    return agents.Agent(name="weather", model=model, model_settings=settings, **options)


async def test_an_agent(model: Any) -> None:
    asked = agent(model, tools=[agents.function_tool(get_weather)])
    result = await agents.Runner.run(asked, QUESTION)
    assert result.final_output == ANSWER
    assert [type(item).__name__ for item in result.new_items].count("ToolCallItem") == 2
    assert result.context_wrapper.usage.requests == 2
    assert result.context_wrapper.usage.output_tokens > 20


async def test_an_agent_that_streams(model: Any) -> None:
    asked = agent(model, tools=[agents.function_tool(get_weather)])
    result = agents.Runner.run_streamed(asked, QUESTION)
    events = [event.data async for event in result.stream_events() if hasattr(event, "data")]
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == result.final_output == ANSWER
    assert result.context_wrapper.usage.output_tokens > 20


async def test_an_agent_with_an_object(model: Any) -> None:
    result = await agents.Runner.run(agent(model, output_type=Weather), NEWS)
    assert result.final_output == NEWS_WEATHER
