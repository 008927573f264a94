"""Usage counts the tokens of the reasoning, in all APIs, streamed or not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import CHAT, Site, serve
from pdserve.common.config.router import HARMONY, ChatConfig
from pdserve.common.core.request import Timeline
from pdserve.common.core.sampling import SamplingParams
from pdserve.router.api.parsers.parser import Reasoning
from pdserve.router.api.parsers.thought_count import ThoughtCount
from pdserve.router.grpc.response import ResponseWriter
from pdserve.router.requests.generation import GenerationRequest, GenerationStats

WORDS = ["<eos>", "<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
WORDS += ["analysis", "final", " ", "a", "b", "<|tool_calls_section_begin|>"]


class Words:
    """A tokenizer of a few words, of which each is a token."""

    eos_token_ids = (0,)

    def marker(self, text: str) -> int | None:
        return WORDS.index(text) if text in WORDS and text.startswith("<") else None

    def token_text(self, token_id: int) -> str:
        return WORDS[token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return tuple(WORDS.index(word) for word in text.split("|"))


def count(family: str, words: Sequence[str], thinking: bool = False) -> int:
    counted = ThoughtCount(family, Words(), thinking)  # type: ignore[arg-type]
    for word in words:
        counted.add([WORDS.index(word)], [])
    together = ThoughtCount(family, Words(), thinking)  # type: ignore[arg-type]
    together.add([WORDS.index(word) for word in words], [])
    assert counted.tokens == together.tokens
    return counted.tokens


@pytest.mark.parametrize(
    ("family", "said", "thinking", "tokens"),
    [
        ("qwen3", "<think> a b </think> a", False, 2),
        ("qwen3", "a b </think> a b a", True, 2),
        ("qwen3", "a b", True, 2),  # cut
        ("qwen3", "a b <eos>", True, 2),
        ("qwen3", "a <think> b </think>", False, 0),  # the mark is a part of the answer
        ("qwen3", "</think> a", True, 0),
        ("kimi_k2", "a <|tool_calls_section_begin|> b", True, 1),
        (HARMONY,
         "<|channel|> analysis <|message|> a b <|end|> <|start|> a <|channel|> analysis "
         "<|message|> a <|end|> <|start|> a <|channel|> final <|message|> a b a", True, 3),
        (HARMONY, "<|channel|> final <|message|> a b", True, 0),
    ],
)  # fmt: skip
def test_tokens_between_the_marks_are_counted(
    family: str, said: str, thinking: bool, tokens: int
) -> None:
    assert count(family, said.split(" "), thinking) == tokens


def test_without_marks_the_text_is_encoded_again() -> None:
    counted = ThoughtCount("granite", Words(), False)  # type: ignore[arg-type]
    counted.add([1, 2, 3], [Reasoning("a|b"), Reasoning("|a")])
    assert counted.tokens == 3
    assert ThoughtCount(None, Words(), True).tokens == 0  # type: ignore[arg-type]


@pytest.fixture
async def thinking_site(tmp_path: Path) -> AsyncIterator[Site]:
    chat = ChatConfig(reasoning_parser="qwen3")
    async with serve(byte_level_folder(tmp_path), 2000, chat=chat) as site:
        site.generator.text = "<think>hmm</think>hello"
        yield site


def details(usage: dict[str, Any]) -> int:
    found = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    return int(found["reasoning_tokens"])


async def test_usage_has_the_reasoning_tokens(thinking_site: Site) -> None:
    chat = await thinking_site.chat(n=2)
    assert details(chat["usage"]) == 6 < chat["usage"]["completion_tokens"]
    ask: dict[str, Any] = {"messages": CHAT, "stream_options": {"include_usage": True}}
    *_, last = await thinking_site.events("/v1/chat/completions", ask)
    assert details(last["usage"]) == 3
    whole = await (await thinking_site.post("/v1/responses", {"input": "hi"})).json()
    assert details(whole["usage"]) == 3
    streamed = await thinking_site.post("/v1/responses", {"input": "hi", "stream": True})
    last = json.loads((await streamed.text()).rpartition("data: ")[2])
    assert details(last["response"]["usage"]) == 3
    message = {"messages": CHAT, "max_tokens": 90}
    whole = await (await thinking_site.post("/v1/messages", message)).json()
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    streamed = await thinking_site.post("/v1/messages", message | {"stream": True})
    delta = json.loads((await streamed.text()).split("data: ")[-2].partition("\n")[0])
    assert delta["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    thinking_site.generator.text = "hello"
    assert details((await thinking_site.chat())["usage"]) == 0
    assert "completion_tokens_details" not in (await thinking_site.complete())["usage"]


async def test_usage_over_grpc_has_the_reasoning_tokens() -> None:
    stats = GenerationStats(7, 5, 0, Timeline())
    generation = GenerationRequest("chat-1", (1,), SamplingParams())
    choices: Any = SimpleNamespace(reasoning_tokens=3)
    for counted, tokens in ((choices, 3), (None, 0)):
        writer = ResponseWriter("chat-1", generation, counted)
        (last,) = [response async for response in writer.write([(0, stats)])]
        assert last.usage.reasoning_tokens == tokens
