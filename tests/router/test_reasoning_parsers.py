"""Each family's marks of reasoning, and which parsers a chat template asks for."""

from __future__ import annotations

from typing import Any

import pytest
from test_tool_formats import said

from pdserve.common.config.router import HARMONY, REASONING_PARSERS, ChatConfig
from pdserve.common.core.errors import ConfigError
from pdserve.router.api.parsers.detect import resolved
from pdserve.router.api.parsers.reasoning import (
    FAMILIES,
    AnswerParser,
    begins_thinking,
    may_think,
    reasoning_parser,
)
from pdserve.router.api.tools import argument_kinds

HARMONY_MARKS = "<|start|>assistant<|channel|>final<|message|>"


def test_every_name_is_known_to_the_options_and_to_the_parsers() -> None:
    assert set(REASONING_PARSERS) == set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "text", "content", "reasoning"),
    [
        ("deepseek_r1", "hm</think>\n\nyes", "yes", "hm"),
        ("deepseek_r1", "hm, </thin\nk></think>yes", "yes", "hm, </thin\nk>"),
        ("deepseek_r1", "\n<think>\nhm </think>", "", "hm"),
        ("deepseek_r1", "hm\n", "", "hm\n"),
        ("qwen3", "<think>\nhm\n\n</think>\n\nyes", "yes", "hm"),
        ("qwen3", "\n <think>hm", "", "hm"),
        ("qwen3", " <thin>k", " <thin>k", ""),
        ("qwen3", "yes <think>", "yes <think>", ""),
        ("qwen3", "yes", "yes", ""),
        ("mistral", "[THINK]hm[/THINK]yes", "yes", "hm"),
        ("granite", "Here is my thought process: hm\nHere's my response: yes", "yes", "hm"),
        ("gemma4", "<|channel>thought\nhm<channel|>yes", "yes", "hm"),
        ("gemma4", "yes", "yes", ""),
        ("seed_oss", "<seed:think>hm</seed:think>yes", "yes", "hm"),
        (
            "kimi_k2",
            "hm <|tool_calls_section_begin|>x",
            "<|tool_calls_section_begin|>x",
            "hm",
        ),
        (
            HARMONY,
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes",
            "yes",
            "hm",
        ),
        (
            HARMONY,
            "<|channel|>analysis to=browser.open code<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>final <|constrain|>json<|message|>[1]",
            "[1]",
            "{}",
        ),
    ],
)
def test_reasoning(family: str, text: str, content: str, reasoning: str) -> None:
    def parsed(*pieces: str) -> tuple[str, str]:
        parser = AnswerParser(reasoning_parser(family, FAMILIES[family].unasked), None)
        events = [event for piece in pieces for event in parser.push(piece)]
        return said(events + parser.push("", final=True))[:2]

    assert parsed(text) == (content, reasoning)
    for cut in range(len(text) + 1):
        assert parsed(text[:cut], text[cut:]) == (content, reasoning)


@pytest.mark.parametrize(
    ("family", "prompt", "continued", "thinks", "may"),
    [
        ("deepseek_r1", "assistant:", None, True, True),
        ("deepseek_r1", "assistant:</think>", None, False, False),
        ("qwen3", "assistant\n", None, False, True),
        ("qwen3", "assistant\n<think>\n", None, True, True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", None, False, False),
        ("deepseek_v3", "<｜Assistant｜><think>", None, True, True),
        ("deepseek_v3", "<｜Assistant｜></think>", None, False, False),
        ("gemma4", "model\n<|channel>thought\n<channel|>", None, False, False),
        ("minimax_m2", "]~b]ai\n<think>\n", None, True, True),
        ("mistral", "[/INST]", None, False, True),
        (HARMONY, "<|start|>assistant", None, True, True),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>So", "So", False, False),
        ("qwen3", "<think>\nso", "<think>\nso", True, True),
    ],
)
def test_the_prompt_says_whether_the_answer_begins_in_a_thought(
    family: str, prompt: str, continued: str | None, thinks: bool, may: bool
) -> None:
    assert begins_thinking(family, prompt, continued) is thinks
    assert may_think(family, prompt, continued) is may


def test_a_continued_final_message_of_harmony_has_no_header() -> None:
    parser = reasoning_parser(HARMONY, thinking=False)
    assert said(parser.push("and so on") + parser.finish())[:2] == ("and so on", "")


# ---- which parsers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>\n{{ call }}</tool_call><think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=f><parameter=a>", "qwen3_coder", None),
        ("<tool_call>f<arg_key><think>", "glm45", "glm45"),
        (HARMONY_MARKS, "openai", HARMONY),
        ("<｜tool▁calls▁begin｜>function```json</think>", "deepseek_v3", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>function```json", "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜></think>", "deepseek_v31", "deepseek_v3"),
        ("<|python_tag|>", "llama3_json", None),
        ('ipython {"name": function name, "parameters": dictionary', "llama3_json", None),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("{{ messages }}", None, None),
        ("", None, None),
        ("{# <think> and <tool_call>\n#}{{ messages }}", None, None),
        ("{# {% {{ <think", None, None),
    ],
)
def test_auto_is_the_default_and_goes_by_the_template(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    found = resolved(ChatConfig(), template)
    assert (found.calls, found.reasoning) == (tools, reasoning)
    assert resolved(found, "<tool_call><think>") == found


@pytest.mark.parametrize(
    ("given", "template", "found"),
    [
        ({"tool_call_parser": "hermes"}, HARMONY_MARKS, ("hermes", None)),
        ({"tool_call_parser": "none"}, HARMONY_MARKS, (None, HARMONY)),
        ({"reasoning_parser": "qwen3"}, HARMONY_MARKS, (None, "qwen3")),
        ({"reasoning_parser": "none"}, HARMONY_MARKS, (None, None)),
        ({"reasoning_parser": HARMONY}, "<tool_call>", ("openai", HARMONY)),
        ({"tool_call_parser": "openai"}, "<think>", ("openai", HARMONY)),
        ({"tool_call_parser": "none"}, "<tool_call><think>", (None, "qwen3")),
        ({"reasoning_parser": "none"}, "<tool_call><think>", ("hermes", None)),
    ],
)
def test_a_given_parser_stays_beside_the_found_one(
    given: dict[str, str], template: str, found: tuple[str | None, str | None]
) -> None:
    chat = resolved(ChatConfig(**given), template)
    assert (chat.calls, chat.reasoning) == found


def test_auto_warns_that_calls_stay_text(caplog: pytest.LogCaptureFixture) -> None:
    for options in (
        {"tool_call_parser": "none"},
        {"tool_call_parser": "hermes"},
        {"enable_auto_tool_choice": False},
    ):
        resolved(ChatConfig(**options), "{{ messages }}")
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    resolved(ChatConfig(), "{{ messages }}")
    (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "--tool-call-parser" in warning.message


@pytest.mark.parametrize(
    "text", ["Plain text.", "About <think> tags </think> and more.", "</think>"]
)
@pytest.mark.parametrize(
    "template",
    [
        "Never write <think>. {{ messages }}",
        "{% if '</think>' in content %}{{ content.split('</think>')[-1] }}{% endif %}",
        "<｜tool▁calls▁begin｜>```json{{ content.split('</think>')[-1] }}",
    ],
)
def test_auto_swallows_nothing_of_a_model_that_does_not_think(template: str, text: str) -> None:
    """However its template speaks of thoughts: they begin with a mark, in the prompt or the
    answer."""
    family = resolved(ChatConfig(), template).reasoning
    thinking = family is not None and begins_thinking(family, "<user>hi<assistant>")
    answer = AnswerParser(reasoning_parser(family, thinking) if family else None, None)
    assert said(answer.push(text) + answer.push("", final=True))[:2] == (text, "")


def test_harmony_has_two_names_that_go_together() -> None:
    assert ChatConfig(tool_call_parser="openai").reasoning == HARMONY
    for options in (
        {"tool_call_parser": "openai", "reasoning_parser": "qwen3"},
        {"tool_call_parser": "openai", "reasoning_parser": "none"},
        {"tool_call_parser": "hermes", "reasoning_parser": HARMONY},
    ):
        with pytest.raises(ConfigError, match="one format has both"):
            ChatConfig(**options)


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "text"),
        ({"type": ["null", "string"]}, "text_or_null"),
        ({"enum": ["a", "b"]}, "text"),
        ({"const": "a"}, "text"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text_or_null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, None),
        ({"type": "integer"}, None),
        ({"enum": ["a", 1]}, None),
        ({}, None),
        (True, None),
        ({"$ref": "#/$defs/none"}, None),
        ({"type": ["x", {}]}, None),
        ({"anyOf": [{"anyOf": [{"anyOf": []}]}]}, None),
    ],
)
def test_arguments_follow_their_schema(schema: Any, kind: str | None) -> None:
    assert argument_kinds({"properties": {"a": schema}}).get("a") == kind
    assert argument_kinds({"properties": schema}) == {} or isinstance(schema, dict)
