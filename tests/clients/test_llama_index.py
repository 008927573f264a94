"""LlamaIndex, in its own process: its package wants an older `openai` than others do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from weather import ANSWER, NEWS_WEATHER, Weather

from conftest import Server, apart, run

PROGRAM = Path(__file__).parent / "apart" / "llama_index_agent.py"


@pytest.fixture(scope="module")
def told(tool_server: Server) -> dict[str, object]:
    told: dict[str, object] = json.loads(
        run([apart("python"), str(PROGRAM), tool_server.base_url, tool_server.model])
    )
    return told


def test_an_agent(told: dict[str, object]) -> None:
    assert told["agent"] == ANSWER
    assert told["chat"] == told["streamed"] != ""


def test_structured_output(told: dict[str, object]) -> None:
    """The tiny model has not learnt such lists of calls: see `test_pydantic_ai.py`."""
    assert told["by_schema"] == NEWS_WEATHER.model_dump()
    assert Weather.model_validate(told["by_tool"]).sky == NEWS_WEATHER.sky
