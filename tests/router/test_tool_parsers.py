"""Tool calls and reasoning in text: each format, whatever the model writes, however it is cut."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tool_formats import said

from pdserve.common.core.errors import ConfigError
from pdserve.router.api.parsers import harmony
from pdserve.router.api.parsers.forced import BareCallParser, NamedParser, RequiredParser
from pdserve.router.api.parsers.formats import HermesParser, Llama3JSONParser, MistralParser
from pdserve.router.api.parsers.parser import Content
from pdserve.router.api.parsers.reasoning import AnswerParser, ReasoningParser
from pdserve.router.api.parsers.tool_parser import BUILTIN, ArgumentKind, ToolParser, tool_parser
from thinned import EXAMPLES

FORMATS: list[type[ToolParser]] = [
    *dict.fromkeys(tool_parser(name) for name in BUILTIN), BareCallParser, NamedParser,
    RequiredParser,
]  # fmt: skip
KINDS = {"f": {"x": ArgumentKind.TEXT, "y": ArgumentKind.TEXT_OR_NULL}}
Said = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls


def answer(kind: type[ToolParser] | None, thinking: bool | None = None) -> AnswerParser:
    names = ["f"] if kind is NamedParser else ["f", "g"]
    return AnswerParser(
        None if thinking is None else ReasoningParser(thinking), kind and kind(names, kinds=KINDS)
    )


def parse(kind: type[ToolParser] | None, *pieces: str, thinking: bool | None = None) -> Said:
    parser = answer(kind, thinking)
    events = [event for piece in pieces for event in parser.push(piece)]
    return said(events + parser.push("", final=True))[:3]


A, B = '{"x": [1, "}", {"y": "\\"é"}]}', "{}"
F, G = ("f", A), ("g", B)


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        # -- hermes
        (HermesParser, "plain < text ", "plain < text ", []),
        (HermesParser, f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>', "", [F]),
        (
            HermesParser,
            f'Look:\n<tool_call>{{"name":"f","arguments":{A}}}</tool_call>\n'
            f'<tool_call>{{"name": "g", "arguments": {B}}}</tool_call>\n',
            "Look:",
            [F, G],
        ),
        (HermesParser, f'<tool_call>{{"arguments": {A}, "name": "f"}}', "", [F]),
        (HermesParser, '<tool_call>{"name": "g"}</tool_call>', "", [G]),
        (HermesParser, '<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [G]),
        (HermesParser, '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', "", [G]),
        (HermesParser, f'<tool_call>{{"name": "f", "arguments": {A}</tool_call>ok', "ok", [F]),
        (HermesParser, '<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        (HermesParser, "a <tool_call>{'name': 'f'}</tool_call>", None, []),
        (HermesParser, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', None, []),
        (HermesParser, '<tool_call>{"name": "f", "argum', None, []),
        (HermesParser, "<tool_call>", None, []),
        (HermesParser, '<tool_call>{"name": "\\ud800", "arguments": {}}', "", [("?", "{}")]),
        # -- llama3_json
        (Llama3JSONParser, f'{{"name": "f", "parameters": {A}}}', "", [F]),
        (
            Llama3JSONParser,
            f'<|python_tag|>{{"name": "f", "parameters": {A}}}; {{"name": "g", "arguments": {B}}}',
            "",
            [F, G],
        ),
        (Llama3JSONParser, '{"name": "Bob", "parameters": {}}', None, []),
        (Llama3JSONParser, '{"name": "f", "age": 3}', None, []),
        (Llama3JSONParser, ' Say {"name": "f", "parameters": {}}', None, []),
        (Llama3JSONParser, f'{{"name": "g", "parameters": {B}}} and more', " and more", [G]),
        # -- a call or a text, by one schema
        (BareCallParser, f' {{"name": "f", "parameters": {A}}}\n', "", [F]),
        (BareCallParser, f'{{"name":"g","parameters":{B},"note":"kept"}}', None, []),
        (BareCallParser, f'{{"note":"kept","name":"g","parameters":{B}}}', None, []),
        (BareCallParser, f'{{"name":"g","arguments":{B}}}', None, []),
        (BareCallParser, '{"name": "Bob", "parameters": {}}', None, []),
        (BareCallParser, '{"name": "f", "parameters": [1]}', None, []),
        (BareCallParser, '{"name": "f", "parameters": {"x', None, []),
        (BareCallParser, "[1]", None, []),
        # -- mistral
        (MistralParser, f'[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}]', "", [F]),
        (
            MistralParser,
            f'Hm [TOOL_CALLS][{{"name": "f", "arguments": {A}, "id": "123456789"}}, '
            f'{{"name": "g", "arguments": {B}}}]',
            "Hm",
            [F, G],
        ),
        (MistralParser, f"[TOOL_CALLS]f{A}[TOOL_CALLS]g[ARGS]{B}", "", [F, G]),
        (MistralParser, f"[TOOL_CALLS]g[CALL_ID]abc[ARGS]{B}", "", [G]),
        (MistralParser, "[TOOL_CALLS]f no", None, []),
        (MistralParser, "[TOOL_CALLS][]", None, []),
        (MistralParser, "[1] [2]", None, []),
        # -- forced
        (RequiredParser, f'[{{"name": "f", "parameters": {A}}}, {{"name": "g"}}]', "", [F, G]),
        (RequiredParser, '[{"name": "f", "param', None, []),
        (NamedParser, A, "", [F]),
        (NamedParser, '{"x": tr', "", [("f", '{"x": tr')]),
        (NamedParser, " ", "", []),
    ],
)
def test_formats(
    kind: type[ToolParser], text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    """Content None: all of the text."""
    expected = (text if content is None else content, "", calls)
    assert parse(kind, text) == expected
    assert parse(kind, *text) == expected


def test_calls_after_reasoning_are_not_those_within() -> None:
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parse(HermesParser, f"hm {call}</think>\n{call}", thinking=True) == (
        "", f"hm {call}", [G],
    )  # fmt: skip


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>",
    '{"name": "f", "arguments": ', '{"name": "f"', '"arguments"', '"parameters"', '"name"', '"f"',
    "f", "{", "}", "[", "]", '"', "\\", "\\u12", ":", ",", ";", " ", "\n", "1e5", "null", "é", "<",
    "text", "(", ")", "=", "x", "y", "'", "\\ud83d", "f(x=", "{'x': ",
]  # fmt: skip


def marks_of(kind: type[ToolParser]) -> list[str]:
    """The marks that a format names, and what else stands between them."""
    if kind is harmony.HarmonyParser:
        channels = ["final", "analysis", "commentary to=functions.f", "to=functions.f"]
        return [*harmony.MARKERS, *channels]
    named = [
        (mark,) if isinstance(mark, str) else mark
        for base in kind.mro()
        for name, mark in vars(base).items()
        if isinstance(mark, str | tuple) and not name.startswith("_")
    ]
    more = ["<escape>", '<|"|>', "call:f{x:", "[CALL_ID]", "[ARGS]", "functions.f:0"]
    return [*(mark for marks in named for mark in marks if mark), *more]


@st.composite
def answers(draw: st.DrawFn) -> tuple[type[ToolParser], str]:
    kind = draw(st.sampled_from(FORMATS))
    fragments = st.sampled_from(FRAGMENTS) | st.sampled_from(marks_of(kind)) | st.text(max_size=4)
    return kind, "".join(draw(st.lists(fragments, max_size=25)))


@settings(max_examples=4 * EXAMPLES, deadline=None)
@given(answers(), st.randoms(use_true_random=False), st.sampled_from([None, True, False]))
def test_the_cuts_do_not_matter_and_nothing_is_invented(
    answer: tuple[type[ToolParser], str], rng: random.Random, thinking: bool | None
) -> None:
    kind, text = answer
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(kind, text, thinking=thinking)
    assert parse(kind, *pieces, thinking=thinking) == whole
    assert parse(kind, *text, thinking=thinking) == whole
    content, reasoning, calls = whole
    json.dumps(calls).encode()  # every event can be sent
    assert len(content) + len(reasoning) <= len(text)
    if not calls and thinking is None and kind is not harmony.HarmonyParser:
        assert content.split() == text.split()


def test_calls_after_the_first_are_left_out_unless_parallel() -> None:
    parser = HermesParser(parallel=False)
    call = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    assert said(parser.push(call % "g" + call % "f") + parser.finish())[:3] == ("", "", [G])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "unit",
    ['"a": 1, ', "[", "{", "\\", '"', "  \n", "<tool_call>", "<", "x", '{"name": "f", ', "[1],"],
)
def test_little_waits_to_be_read_again(kind: type[ToolParser], unit: str) -> None:
    """So time grows with the text, whatever it is."""
    parser = kind(["f"])
    begins = '{"name": "f", "arguments": {'
    marks = marks_of(kind)
    for marker in ("", "<tool_call>", "[TOOL_CALLS]", "[", *marks):
        parser.push(marker + begins)
        for _ in range(50):
            parser.push(unit)
            assert len(parser.reader) <= max(map(len, marks))


def test_a_text_that_can_be_no_call_does_not_wait_for_its_end() -> None:
    parser = BareCallParser(["f"])
    assert parser.push('{"na') == []
    assert parser.push('tion": "N') == [Content('{"nation": "N')]
    assert parser.push("orway") == [Content("orway")]


def test_unknown_names_and_classes_are_refused() -> None:
    assert tool_parser("mistral") is MistralParser
    with pytest.raises(ConfigError, match=r"choose one of: deepseek_v3, .*hermes"):
        tool_parser("unknown")
    with pytest.raises(ConfigError, match=r"--tool-call-parser: .*'hermez'; did you mean hermes\?"):
        tool_parser("hermez")
    with pytest.raises(ConfigError, match="no subclass of ToolParser"):
        tool_parser("json:JSONDecoder")
