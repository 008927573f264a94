"""instructor: a pydantic model of the answer, by a tool or by JSON."""

from __future__ import annotations

import instructor
import openai
import pytest
from weather import NEWS, NEWS_WEATHER, Weather

from conftest import Server


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON])
def test_both_modes(tool_server: Server, mode: instructor.Mode) -> None:
    with openai.OpenAI(base_url=tool_server.base_url, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model=tool_server.model,
            response_model=Weather,
            messages=[{"role": "user", "content": NEWS}],
            temperature=0,
            max_retries=0,
        )
    assert found.model_dump() == NEWS_WEATHER.model_dump()  # its class is a subclass
