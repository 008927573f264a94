"""A hundred tokens are enough for a small object, with every client and small models: none is spent
on endless white space."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import Report, Verdict

from conftest import Server, apart, run

BUDGET = 100  # tokens
INSTRUCTOR = str(Path(__file__).parent / "apart" / "ask_instructor.py")
Asked = Callable[[Server, type[BaseModel], str], Any]


@pytest.fixture(params=["tool_server", "small_server"])
def asked(request: pytest.FixtureRequest) -> tuple[Server, type[BaseModel], str]:
    """Returns server, class and prompt; each model once wrote newlines there until its budget was
    spent."""
    server: Server = request.getfixturevalue(request.param)
    if request.param == "tool_server":
        return server, Report, "Lima: foggy, 17 degrees on Monday."
    return server, Verdict, "Is 2 + 2 = 4?"


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def by_parse(server: Server, wanted: type[BaseModel], text: str) -> Any:
    with client_of(server) as client:
        answer = client.chat.completions.parse(
            model=server.model, messages=[{"role": "user", "content": text}], temperature=0,
            response_format=wanted, max_tokens=BUDGET,
        )  # fmt: skip
    return answer.choices[0].message.parsed


def by_responses_parse(server: Server, wanted: type[BaseModel], text: str) -> Any:
    with client_of(server) as client:
        answer = client.responses.parse(
            model=server.model, input=text, text_format=wanted, max_output_tokens=BUDGET,
            temperature=0,
        )  # fmt: skip
    return answer.output_parsed


def by_langchain(method: Any) -> Asked:
    def ask(server: Server, wanted: type[BaseModel], text: str) -> Any:
        model = ChatOpenAI(
            base_url=server.base_url, api_key="none", model=server.model, temperature=0,
            max_retries=0, max_tokens=BUDGET,
        )  # fmt: skip
        return model.with_structured_output(wanted, method=method).invoke(text)

    return ask


def by_instructor(mode: str) -> Asked:
    def ask(server: Server, wanted: type[BaseModel], text: str) -> Any:
        asked = [server.base_url, server.model, mode, wanted.__name__, text, str(BUDGET)]
        return wanted.model_validate_json(run([apart("python"), INSTRUCTOR, *asked]))

    return ask


def by_pydantic_ai(output: Any) -> Asked:
    def ask(server: Server, wanted: type[BaseModel], text: str) -> Any:
        provider = OpenAIProvider(base_url=server.base_url, api_key="none")
        settings: Any = {"temperature": 0, "max_tokens": BUDGET}
        model = OpenAIChatModel(server.model, provider=provider, settings=settings)
        return Agent(model, output_type=output(wanted), retries=0).run_sync(text).output

    return ask


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(by_parse, id="openai-parse"),
        pytest.param(by_responses_parse, id="openai-responses-parse"),
        pytest.param(by_langchain("json_schema"), id="langchain-json_schema"),
        pytest.param(by_langchain("function_calling"), id="langchain-function_calling"),
        pytest.param(by_instructor("TOOLS"), id="instructor-tools"),
        pytest.param(by_instructor("JSON_SCHEMA"), id="instructor-json_schema"),
        pytest.param(by_pydantic_ai(NativeOutput), id="pydantic-ai-native"),
        pytest.param(by_pydantic_ai(ToolOutput), id="pydantic-ai-tool"),
    ],
)
def test_structured_output_keeps_within_its_budget(
    asked: tuple[Server, type[BaseModel], str], ask: Asked
) -> None:
    assert isinstance(ask(*asked), asked[1])
