"""Each family's format of tool calls, as its chat template renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.common.config.router import TOOL_PARSERS, ChatConfig
from pdserve.router.api.parsers.parser import CallArguments, CallStart, Content, Event
from pdserve.router.api.parsers.tool_parser import BUILTIN, ToolParser, tool_parser
from pdserve.router.api.schema import ChatBody
from pdserve.router.api.tools import argument_kinds, plan_tools

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "$defs": {"mood": {"enum": ["good", "bad"]}},
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": ["string", "null"]},
        "mood": {"$ref": "#/$defs/mood"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "deep": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "any": {},
    },
}
KINDS = {"get_weather": argument_kinds(PARAMETERS)}
NAMES = ("get_weather", "now")
Call = tuple[str, Any]


def parser_of(name: str, **options: Any) -> ToolParser:
    return tool_parser(name)(NAMES, kinds=KINDS, **options)


def said(events: list[Event]) -> tuple[str, str, list[tuple[str, str]], list[str]]:
    """Content, reasoning, calls with the text of their arguments, ids."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    for event in events:
        match event:
            case CallStart(index, call_id, name):
                assert index == len(calls)
                calls.append((name, ""))
                ids.append(call_id)
            case CallArguments(index, text):
                assert index == len(calls) - 1 and text
                calls[index] = (calls[index][0], calls[index][1] + text)
            case Content(text):
                content += text
            case _:
                reasoning += event.text
    return content, reasoning, calls, ids


def parse(name: str, *pieces: str) -> tuple[str, str, list[tuple[str, str]], list[str]]:
    parser = parser_of(name)
    events = [event for piece in pieces for event in parser.push(piece)]
    return said(events + parser.finish())


OSLO = {"city": "Osl\u00f6 \U0001f642", "days": 2}
OSLO_JSON = json.dumps(OSLO, ensure_ascii=False)
MANY: dict[str, Any] = {
    "city": ' a "b"\n<c> ', "days": -1, "units": None, "mood": "good",
    "tags": ["x", "y"], "deep": {"k": [True, None, 1.5]}, "any": "free text",
}  # fmt: skip

Case = tuple[str, str, str, list[Call]]  # parser, text, content, calls
WEATHER: Call = ("get_weather", OSLO)
NOW: Call = ("now", {})
OF_JSON: list[Case] = [
    (
        "deepseek_v3",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{OSLO_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        [WEATHER, NOW],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{OSLO_JSON}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>Done",
        "Done",
        [WEATHER, NOW],
    ),
    (
        "kimi_k2",
        "I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3"
        f"<|tool_call_argument_begin|>{OSLO_JSON}<|tool_call_end|><|tool_call_begin|>"
        "functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I look.",
        [WEATHER, NOW],
    ),
    (
        "mistral",
        f"Ok[TOOL_CALLS]get_weather[ARGS]{OSLO_JSON}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}",
        "Ok",
        [WEATHER, NOW],
    ),
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {OSLO_JSON}}}]',
        "",
        [WEATHER],
    ),
    (
        "granite",
        f'<tool_call> [{{"name": "get_weather", "arguments": {OSLO_JSON}}}, {{"name": "now"}}]',
        "",
        [WEATHER, NOW],
    ),
    (
        "phi4_mini_json",
        f'Sure: functools[{{"name": "get_weather", "arguments": {OSLO_JSON}}}]',
        "Sure:",
        [WEATHER],
    ),
    ("phi4_mini_json", "functools is a module", "functools is a module", []),
    (
        "openai",
        "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{OSLO_JSON}<|call|>",
        "I look. ",
        [WEATHER],
    ),
    (
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{OSLO_JSON}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>",
        "",
        [WEATHER, NOW],
    ),
    ("openai", "<|channel|>final<|message|>Hello <b>\n", "Hello <b>\n", []),
    ("openai", "No channel at all", "No channel at all", []),
    ("openai", "<|channel|>fin", "", []),
    ("llama4_json", f'{{"name": "get_weather", "parameters": {OSLO_JSON}}}', "", [WEATHER]),
]
OTHERS: list[Case] = [
    (
        "qwen3_coder",
        "Look:\n<tool_call>\n<function=get_weather>\n"
        '<parameter=city>\n a "b"\n<c> \n</parameter>\n'
        "<parameter=days>\n-1\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=mood>\ngood\n</parameter>\n<parameter=tags>\n["x", "y"]\n</parameter>\n'
        "<parameter=deep>\n{'k': [True, None, 1.5]}\n</parameter>\n"
        "<parameter=any>\nfree text\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Look:",
        [("get_weather", MANY), NOW],
    ),
    (
        "qwen3_coder",  # of the newlines around a value one is not its own
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\nx\n\n\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("get_weather", {"city": "\nx\n\n"})],
    ),
    ("qwen3_xml", "<function=now></function>", "", [NOW]),
    ("qwen3_coder", "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [("get_weather", {"days": 3})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">1</parameter>\n'
        '<parameter name="days">1</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [("get_weather", {"city": "1", "days": 1}), NOW],
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="any" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">7</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [("get_weather", {"any": "7", "days": 7})],
    ),
    (
        "glm45",
        "Hi\n<tool_call>get_weather\n"
        '<arg_key>city</arg_key>\n<arg_value> a "b"\n<c> </arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>-1</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>",
        "Hi",
        [("get_weather", {"city": MANY["city"], "days": -1}), NOW],
    ),
    (
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>bye",
        "bye",
        [("get_weather", {"city": "Oslo"})],
    ),
    (
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>a "b", {c}<escape>,days:2,'
        "tags:[<escape>x<escape>,<escape>y<escape>],deep:{k:[true,null,1.5]}}<end_function_call>",
        "",
        [
            (
                "get_weather",
                {"city": 'a "b", {c}', "days": 2, "tags": ["x", "y"], "deep": MANY["deep"]},
            )
        ],
    ),
    (
        "gemma4",
        'So <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:now{}'
        "<tool_call|>",
        "So",
        [("get_weather", {"city": "Oslo"}), NOW],
    ),
    (
        "pythonic",
        '[get_weather(city=\' a "b"\\n<c> \', days=-1, units=None, mood="good", '
        "tags=['x', 'y',], deep={'k': [True, None, 1.5]}, any='''free text'''), now()]",
        "",
        [("get_weather", MANY), NOW],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='\\u00e9\\x41\\ud83d\\ude42\\q', days=0x10)]"
        "<|python_end|>",
        "",
        [("get_weather", {"city": "\u00e9A\U0001f642\\q", "days": 16})],
    ),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[later(x=1)]", "[later(x=1)]", []),
    ("pythonic", "[get_weather(1)]", "[get_weather(1)]", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), OF_JSON + OTHERS)
def test_formats_however_they_are_cut(
    name: str, text: str, content: str, calls: list[Call]
) -> None:
    whole = parse(name, text)
    assert whole[0] == content and not whole[1]
    assert [(called, json.loads(given)) for called, given in whole[2]] == calls
    assert parse(name, *text)[:3] == whole[:3]
    for cut in range(len(text) + 1):
        assert parse(name, text[:cut], text[cut:])[:3] == whole[:3]


@pytest.mark.parametrize(("name", "text", "content", "calls"), OF_JSON)
def test_arguments_that_are_json_are_handed_on_as_they_are(
    name: str, text: str, content: str, calls: list[Call]
) -> None:
    assert [given for _, given in parse(name, text)[2]] == [
        OSLO_JSON if given else "{}" for _, given in calls
    ]


@pytest.mark.parametrize(("name", "text", "content", "calls"), OF_JSON + OTHERS)
def test_calls_come_before_their_end(name: str, text: str, content: str, calls: list[Call]) -> None:
    """The name, and something of the arguments, at half of the text after the name."""
    if not calls or not calls[0][1]:
        return
    begun = text.index(calls[0][0]) + len(calls[0][0])
    parser = parser_of(name)
    events = parser.push(text[: begun + (len(text) - begun) * 3 // 4])
    ((called, given), *_) = said(events)[2]
    assert called == calls[0][0] and given


def test_a_text_argument_is_streamed() -> None:
    for name, begin in (
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>\n"),
        ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>"),
        ("pythonic", "[get_weather(city='"),
        ("functiongemma", "<start_function_call>call:get_weather{city:<escape>"),
    ):
        parser = parser_of(name)
        parser.push(begin)
        (event,) = parser.push("Os")
        assert isinstance(event, CallArguments) and event.text.endswith("Os")


def test_ids_have_their_familys_form() -> None:
    kimi = parse("kimi_k2", next(text for name, text, *_ in OF_JSON if name == "kimi_k2"))[3]
    assert kimi == ["functions.get_weather:3", "functions.now:4"]
    unnumbered = parser_of("kimi_k2", first=5)
    events = unnumbered.push("<|tool_call_begin|>now<|tool_call_argument_begin|>{}")
    assert said(events)[3] == ["functions.now:5"]
    mistral = parse("mistral", "[TOOL_CALLS]now{}")[3]
    assert len(mistral[0]) == 9 and mistral[0].isalnum()
    assert parse("hermes", '<tool_call>{"name": "now"}')[3][0].startswith("call_")


@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_that_are_insisted_on_have_such_ids_as_well(choice: str) -> None:
    """The model's template may refuse others in the next turn."""
    tool: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
    earlier = [{"id": "functions.now:0", "function": {"name": "now", "arguments": "{}"}}]
    body = ChatBody.model_validate(
        {
            "messages": [{"role": "assistant", "tool_calls": earlier}],
            "tools": [tool],
            "tool_choice": tool if choice == "named" else choice,
        }
    )
    plan = plan_tools(body, ChatConfig())
    text = "{}" if choice == "named" else '[{"name": "now", "parameters": {}}]'
    kimi, mistral, plain = (
        said(plan.parser(parser and tool_parser(parser)).push(text, final=True))[3]
        for parser in ("kimi_k2", "mistral", None)
    )
    assert kimi == ["functions.now:1"] and len(mistral[0]) == 9 and plain[0].startswith("call_")


def test_every_name_is_known_to_the_options_and_to_the_parsers() -> None:
    assert set(TOOL_PARSERS) == set(BUILTIN)
    for name in TOOL_PARSERS:
        assert issubclass(tool_parser(name), ToolParser)
