"""The recorded bodies of coding agents and chat programs, on a cluster without flags."""

from __future__ import annotations

import pytest

from conftest import Server
from recorded import PROGRAMS, Conversation


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_recorded_body_is_answered_and_goes_on_after_a_call(
    tool_server: Server, program: str
) -> None:
    conversation = Conversation(program, tool_server.url, tool_server.model)
    answer = conversation.ask()
    if not conversation.has_tools:
        assert answer.text and not answer.calls
        return
    (call,) = answer.calls
    assert (call["name"], call["arguments"]) == ("get_weather", '{"city": "Oslo"}')
    conversation.give_results(answer)
    assert conversation.ask().text.startswith("It is snowy, 3 degrees in ")
