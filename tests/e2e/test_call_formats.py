"""Formats of calls and of reasoning through a real cluster. The model is `tool-caller`, which
writes as Hermes models do; other formats it writes because its tokens have other texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from test_tools import ASK, GET_WEATHER

from paths import MODELS
from thinned import thinned
from warm import WarmCluster

THINK = 510  # a token
OWN_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@contextmanager
def serving(model: str | Path, **router: str) -> Iterator[openai.OpenAI]:
    with WarmCluster(model, router=router) as cluster:
        url = f"{cluster.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client
        cluster.wait_idle()


def ask(client: openai.OpenAI, stream: bool, **options: Any) -> list[Any]:
    """The choices, by OpenAI's own assembly of them if streamed."""
    (served,) = client.models.list().data
    options = {"model": served.id, "messages": [ASK], "temperature": 0, **options}
    if not stream:
        return client.chat.completions.create(**options).choices
    with client.chat.completions.stream(**options) as events:
        return events.get_final_completion().choices


def renamed(folder: Path, marks: tuple[str, ...], special: bool = False) -> Path:
    """The same weights; the model's marks are these."""
    folder.mkdir()
    for file in (MODELS / "tool-caller").iterdir():
        text = file.read_text() if file.suffix == ".json" else ""
        if "<think>" not in text:
            (folder / file.name).symlink_to(file)
            continue
        content = json.loads(text)
        for token in content.get("added_tokens", ()):
            if token["content"] in OWN_MARKS:
                token["content"] = marks[OWN_MARKS.index(token["content"])]
                token["special"] = special
        (folder / file.name).write_text(json.dumps(content))
    return folder


def thoughtful(choices: list[Any]) -> list[Any]:
    """The messages with a thought, which is about the question."""
    messages = [each.message for each in choices if hasattr(each.message, "reasoning")]
    assert all(each.reasoning.strip().startswith("The user") for each in messages)
    return messages


HARMONY = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "<|call|>",
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)


def drawn(client: Any, stream: bool) -> list[Any]:
    """Sixteen sampled answers' messages; some have reasoning, each in the model's own words."""
    choices = ask(client, stream, tools=[GET_WEATHER], temperature=1.0, seed=1, n=16)
    messages = [each.message for each in choices]
    thoughts = [each.reasoning for each in messages if hasattr(each, "reasoning")]
    assert thoughts and all(each.strip().startswith("The user") for each in thoughts)
    return messages


def test_harmony(tmp_path: Path) -> None:
    folder = renamed(tmp_path / "gpt-oss", HARMONY)
    with serving(folder, tool_call_parser="openai") as client:
        (choice,) = ask(client, False, tools=[GET_WEATHER], logit_bias={THINK: -100})
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls  # its end is a stop token of the format
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["arguments"] == {"city": "Oslo"}
        for stream in (False, True):
            choices = drawn(client, stream)
            assert any(each.tool_calls for each in choices if hasattr(each, "reasoning"))


def test_reasoning_between_special_tokens(tmp_path: Path) -> None:
    marks = ("<tool_call>", "</tool_call>", "[THINK]", "[/THINK]")
    folder = renamed(tmp_path / "magistral", marks, special=True)
    router = {"tool_call_parser": "hermes", "reasoning_parser": "mistral"}
    with serving(folder, **router) as client:
        for stream in (False, True):
            choices = drawn(client, stream)
            assert not any("THINK" in (each.content or "") for each in choices)


WHOLE = {"name": "get_weather", "arguments": {"city": "Oslo"}}  # what it writes between its marks


@pytest.mark.parametrize(
    ("parser", "begin", "end", "arguments"),
    thinned([
        ("granite", "<|tool_call|>[", "\n]", {"city": "Oslo"}),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
            WHOLE,
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=all>",
            "</parameter></function></tool_call>",
            {"all": WHOLE},
        ),
        ("glm45", "<tool_call>get_weather<arg_key>all</arg_key><arg_value>",
         "</arg_value></tool_call>", {"all": WHOLE}),
        ("pythonic", "[get_weather(all=", ")]", {"all": WHOLE}),
        ("functiongemma", "<start_function_call>call:get_weather{all:<escape>",
         "<escape>}<end_function_call>", {"all": f"\n{json.dumps(WHOLE)}\n"}),
    ], 3),
)  # fmt: skip
def test_each_way_of_writing_calls(
    tmp_path: Path, parser: str, begin: str, end: str, arguments: dict[str, Any]
) -> None:
    folder = renamed(tmp_path / "model", (begin, end, "<think>", "</think>"))
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    with serving(folder, tool_call_parser=parser) as client:
        for stream in (False, True):
            (choice,) = ask(client, stream, messages=[question], tools=[GET_WEATHER])
            (call,) = choice.message.tool_calls
            assert call.function.name == "get_weather"
            assert json.loads(call.function.arguments) == arguments
            assert (choice.message.content or "", choice.finish_reason) == ("", "tool_calls")
            assert parser != "kimi_k2" or call.id == "functions.get_weather:0"


def test_flags_switch_calls_and_reasoning_off() -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    router = {"tool_call_parser": "none", "reasoning_parser": "none"}
    with serving("tool-caller", **router) as client:
        (choice,) = ask(client, True, tools=[GET_WEATHER], extra_body=thinking)
        assert not choice.message.tool_calls and not hasattr(choice.message, "reasoning")
        assert "</think>" in choice.message.content and "<tool_call>" in choice.message.content
