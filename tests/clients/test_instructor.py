"""instructor: a pydantic model of the answer, by a tool, by JSON or by its schema."""

from __future__ import annotations

import pytest
from test_budget import by_instructor
from weather import NEWS, NEWS_WEATHER, Weather

from conftest import Server


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_its_modes(tool_server: Server, mode: str) -> None:
    assert by_instructor(mode)(tool_server, Weather, NEWS) == NEWS_WEATHER
