"""Simon Willison's `llm`, a command line, with a model of its `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from weather import ANSWER, NEWS, NEWS_WEATHER, QUESTION, Weather

from conftest import Server, run

PROGRAM = str(Path(sys.executable).with_name("llm"))
TOOL = '''
def get_weather(city: str) -> str:
    """The weather in a city."""
    return {"Oslo": "snowy, 3 degrees", "Cairo": "sunny, 33 degrees"}[city]
'''


@pytest.fixture(scope="module")
def home(tool_server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has named the model."""
    folder = tmp_path_factory.mktemp("llm")
    model = {
        "model_id": "tiny", "model_name": tool_server.model, "api_base": tool_server.base_url,
        "can_stream": True, "supports_tools": True, "supports_schema": True,
    }  # fmt: skip
    (folder / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML
    return {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}


ASK = [PROGRAM, "-m", "tiny", "-o", "temperature", "0"]


@pytest.mark.parametrize("how", [[], ["--no-stream"]], ids=["streamed", "whole"])
def test_a_tool(home: dict[str, str], how: list[str]) -> None:
    assert run([*ASK, *how, "--functions", TOOL, QUESTION], env=home).strip() == ANSWER


def test_a_schema(home: dict[str, str]) -> None:
    schema = json.dumps(Weather.model_json_schema())
    said = run([*ASK, "--schema", schema, NEWS], env=home)
    assert Weather.model_validate_json(said) == NEWS_WEATHER


def test_a_conversation_and_its_usage(home: dict[str, str]) -> None:
    run([*ASK, "Hello"], env=home)
    run([*ASK, "--continue", "And again"], env=home)
    last, before = json.loads(run([PROGRAM, "logs", "-n", "2", "--json"], env=home))[::-1][:2][::-1]
    assert last["conversation_id"] == before["conversation_id"]
    assert last["output_tokens"] > 0 < last["input_tokens"]
