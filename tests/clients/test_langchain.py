"""LangChain's ChatOpenAI: `bind_tools` in a loop, `with_structured_output` in its three ways."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from weather import ANSWER, FOUND, NEWS, NEWS_WEATHER, QUESTION, Weather, get_weather

from conftest import Server


@pytest.fixture(scope="module")
def model(tool_server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=tool_server.base_url, api_key="none", model=tool_server.model, temperature=0,
        max_retries=0,
    )  # fmt: skip


def say(model: Any, messages: list[Any], stream: bool) -> AIMessage:
    if not stream:
        return model.invoke(messages)
    whole: AIMessageChunk | None = None
    for chunk in model.stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop(model: ChatOpenAI, stream: bool) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    while calls := (said := say(bound, messages, stream)).tool_calls:
        assert [call["args"]["city"] for call in calls] == list(FOUND)
        messages.append(said)
        messages += [
            ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in calls
        ]
    assert said.content == ANSWER and len(messages) == 4


@pytest.mark.parametrize("choice", ["get_weather", "required"])
def test_a_call_that_is_insisted_on(model: ChatOpenAI, choice: str) -> None:
    bound = model.bind_tools([get_weather], tool_choice=choice)
    (call,) = bound.invoke("What is the weather in Oslo?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(model: ChatOpenAI, method: Any) -> None:
    assert model.with_structured_output(Weather, method=method).invoke(NEWS) == NEWS_WEATHER


def test_json_mode(model: ChatOpenAI) -> None:
    structured = model.with_structured_output(Weather, method="json_mode")
    assert structured.invoke(NEWS) == NEWS_WEATHER
