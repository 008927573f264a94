"""smolagents: its model class, with tools, streamed and not; what its agents are made of."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool, agglomerate_stream_deltas
from weather import FOUND

from conftest import Server


class GetWeather(Tool):
    name = "get_weather"
    description = "The weather in a city."
    inputs: ClassVar = {"city": {"type": "string", "description": "its name"}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return FOUND[city]


@pytest.fixture(scope="module")
def model(tool_server: Server) -> OpenAIModel:
    return OpenAIModel(
        model_id=tool_server.model, api_base=tool_server.base_url, api_key="none", temperature=0
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call(model: OpenAIModel, stream: bool, choice: str) -> None:
    asked = [
        ChatMessage(MessageRole.USER, [{"type": "text", "text": "What is the weather in Oslo?"}])
    ]
    given = {"tools_to_call_from": [GetWeather()], "tool_choice": choice}
    if stream:
        said = agglomerate_stream_deltas(list(model.generate_stream(asked, **given)))
    else:
        said = model.generate(asked, **given)
    (call,) = said.tool_calls
    arguments = call.function.arguments
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert (call.function.name, arguments) == ("get_weather", {"city": "Oslo"})
