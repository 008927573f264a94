"""LangChain's ChatAnthropic: `bind_tools` in a loop, over Anthropic's API."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from test_langchain import say
from weather import ANSWER, FOUND, NEWS, NEWS_WEATHER, QUESTION, Weather, get_weather

from conftest import Server


@pytest.fixture(scope="module")
def model(tool_server: Server) -> ChatAnthropic:
    return ChatAnthropic(
        base_url=tool_server.url, api_key="none", model=tool_server.model, temperature=0,
        max_retries=0, max_tokens=200,
    )  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop(model: ChatAnthropic, stream: bool) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    while calls := (said := say(bound, messages, stream)).tool_calls:
        assert [call["args"]["city"] for call in calls] == list(FOUND)
        messages.append(said)
        messages += [
            ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in calls
        ]
    assert said.text == ANSWER and len(messages) == 4


def test_structured_output(model: ChatAnthropic) -> None:
    assert model.with_structured_output(Weather).invoke(NEWS) == NEWS_WEATHER
