"""The recorded bodies of coding agents and chat programs, before a model that calls a tool and then
answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fakes_pipeline import byte_level_folder
from http_site import Site, serve
from pdserve.common.config.router import ChatConfig
from pdserve.router.api.parsers.detect import resolved
from pdserve.router.api.parsers.formats import HermesParser
from recorded import PROGRAMS, WEATHER, Conversation

TEMPLATE = (
    "{{ tools | tojson }}<tool_call><think>{% for m in messages %}{{ m | tojson }}{% endfor %}"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = "It is snowy."
HOSTED = {"context_management", "reasoning.summary"}  # and the tools without a function


@pytest.fixture
async def agent_site(tmp_path: Path) -> AsyncIterator[Site]:
    """Its options are the defaults; its template shows the marks of calls and thoughts."""
    chat = resolved(ChatConfig(), TEMPLATE)
    folder = byte_level_folder(tmp_path)
    async with serve(folder, 20_000, chat=chat, tool_parser=HermesParser) as site:
        site.tokenizer.use_chat_template(TEMPLATE)
        yield site


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_recorded_body_is_answered_and_goes_on_after_a_call(
    agent_site: Site, program: str
) -> None:
    conversation = Conversation(program, agent_site.url, "tiny/model")
    if not conversation.has_tools:
        agent_site.generator.text = ANSWER
        answer = await asyncio.to_thread(conversation.ask)
        assert (answer.text, answer.ended) == (ANSWER, "stop")
        return
    agent_site.generator.text = CALL
    answer = await asyncio.to_thread(conversation.ask)
    (call,) = answer.calls
    assert (call["name"], call["arguments"], answer.text) == ("get_weather", '{"city": "Oslo"}', "")
    ignored = set(filter(None, answer.ignored.split(", ")))
    assert all(name in HOSTED or name.startswith("tools.") for name in ignored)
    agent_site.generator.text = f"<think>\nHm.\n</think>\n\n{ANSWER}"
    conversation.give_results(answer)
    answer = await asyncio.to_thread(conversation.ask)
    assert (answer.text, answer.calls) == (ANSWER, [])
    prompt = agent_site.tokenizer.decode(agent_site.generator.requests[-1].prompt_token_ids)
    assert WEATHER["Oslo"] in prompt and prompt.count('"role": "tool"') == 1
