"""Pydantic AI: an agent that calls a function and answers, in words or as an object."""

from __future__ import annotations

import pytest
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import ANSWER, NEWS, NEWS_WEATHER, QUESTION, Weather, get_weather

from conftest import Server


@pytest.fixture(scope="module")
def model(tool_server: Server) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=tool_server.base_url, api_key="none")
    return OpenAIChatModel(tool_server.model, provider=provider, settings={"temperature": 0})


async def test_an_agent_in_words(model: OpenAIChatModel) -> None:
    agent = Agent(model, tools=[get_weather])
    result = await agent.run(QUESTION)
    assert result.output == ANSWER
    assert len(result.all_messages()) == 4
    async with agent.run_stream(QUESTION) as stream:
        assert await stream.get_output() == ANSWER


async def test_an_agent_with_an_object(model: OpenAIChatModel) -> None:
    """`final_result` is a tool, and one must be called. The tiny model has not learnt such lists of
    calls: in them it copies words rightly, but not always numbers."""
    result = await Agent(model, output_type=Weather).run(NEWS)
    assert (result.output.city, result.output.sky) == (NEWS_WEATHER.city, NEWS_WEATHER.sky)
    both = Agent(model, tools=[get_weather], output_type=Weather)
    result = await both.run("What is the weather in Oslo?")
    assert result.output == Weather(city="Oslo", sky="snowy", degrees=3)
