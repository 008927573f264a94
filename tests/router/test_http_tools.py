"""Tools and reasoning over HTTP: what a model is told of them, what clients see of its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from fakes_pipeline import byte_level_folder
from http_site import Site, check_error, check_refused, serve
from pdserve.common.config.router import ChatConfig
from pdserve.router.api.parsers.formats import HarmonyParser, HermesParser, Llama3JSONParser
from pdserve.router.api.parsers.harmony import MARKERS
from pdserve.router.api.parsers.tool_parser import ToolParser
from pdserve.router.api.schema import ChatBody
from pdserve.router.api.tools import forced_calls, plan_tools

TEMPLATE = (
    "{{ {'m': messages, 't': tools, 'd': documents, 'x': x | default(0), "
    "'g': add_generation_prompt} | tojson }}"
)
ASK = [{"role": "user", "content": "ask"}]


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f", type="object", properties={"x": {"type": "integer"}}), tool("g")]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    chat = ChatConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    folder = byte_level_folder(tmp_path)
    async with serve(folder, 2000, chat=chat, tool_parser=HermesParser) as site:
        yield site


async def ask(site: Site, says: str, **fields: Any) -> dict[str, Any]:
    """The only choice, ids left out."""
    site.generator.text = says
    body = await site.chat(**{"messages": ASK, "max_tokens": 300, **fields})
    choice = body["choices"][0]
    for call in choice["message"].get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return choice


async def prompt_of(site: Site, **fields: Any) -> dict[str, Any]:
    """Returns what the template was given."""
    await ask(site, "ok", **{"max_tokens": 1, **fields})
    tokens = site.generator.requests[-1].prompt_token_ids
    return json.loads(site.tokenizer.decode(tokens))


def function(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# ---- the prompt ---------------------------------------------------------------------------


@pytest.fixture
async def open_site(tmp_path: Path) -> AsyncIterator[Site]:
    chat = ChatConfig(
        tool_call_parser="hermes",
        chat_template_content_format="openai",
    )
    folder = byte_level_folder(tmp_path)
    async with serve(folder, 2000, chat=chat, tool_parser=HermesParser) as site:
        site.generator.tokenizer.use_chat_template(TEMPLATE)
        yield site


async def test_templates_get_all_there_is(open_site: Site) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "1", **function("f", '{"x": [1]}')},
                {"id": "2", **function("g", "")},
                {"id": "3", **function("g", "{broken")},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    strict = tool("g") | {"function": tool("g")["function"] | {"strict": True, "extra": 1}}
    given = await prompt_of(
        open_site,
        messages=messages,
        tools=[TOOLS[0], strict, {"type": "function", "function": {"name": "h"}}],
        documents=[{"title": "t", "text": "d"}],
        chat_template_kwargs={"x": 7},
        add_generation_prompt=False,
    )
    given["m"][1].pop("thinking", None)  # the same once more, by transformers
    assert given["m"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}},
                {"id": "3", "type": "function", "function": {"name": "g", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "r"}]},
    ]
    extra = {"name": "g", "parameters": {}, "extra": 1}
    none = {"name": "h", "parameters": {"type": "object", "properties": {}}}
    others = [{"type": "function", "function": each} for each in (extra, none)]
    assert given["t"] == [TOOLS[0], *others]
    assert given["d"] == [{"title": "t", "text": "d"}]
    assert (given["x"], given["g"]) == (7, False)


# ---- the answer ---------------------------------------------------------------------------


async def test_calls(site: Site) -> None:
    choice = await ask(site, f"Hm.\n{CALL}\n{CALL}", tools=TOOLS)
    call = function("f", '{"x": 1}')
    assert choice["message"] == {"role": "assistant", "content": "Hm.", "tool_calls": [call, call]}
    assert choice["finish_reason"] == "tool_calls"
    choice = await ask(site, f"{CALL}\n{CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [call]}
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {}, {"tools": []}):
        choice = await ask(site, CALL, **fields)
        assert choice["message"] == {"role": "assistant", "content": CALL}
        assert choice["finish_reason"] == "stop"


async def test_reasoning(site: Site) -> None:
    choice = await ask(site, f"<think>\nhm\n</think>\n\n{CALL}", tools=TOOLS)
    message = choice["message"]
    assert (message["reasoning_content"], message["reasoning"]) == ("hm", "hm")
    assert message["content"] is None and len(message["tool_calls"]) == 1
    choice = await ask(site, "<think>abc", max_tokens=9)
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"].startswith("a")


async def test_a_thought_that_the_prompt_begins(site: Site) -> None:
    site.tokenizer.use_chat_template("a<think>\n")
    choice = await ask(site, "hm</think>yes", chat_template_kwargs={"enable_thinking": True})
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


def streamed(events: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    choices = [event["choices"][0] for event in events if event["choices"]]
    return [choice for choice in choices if choice["index"] == index]


async def test_stream_of_calls(site: Site) -> None:
    site.generator.text = f"<think>hm</think>ok {CALL}\n{CALL}"
    body = {"messages": ASK, "tools": TOOLS, "n": 2, "logprobs": True}
    events = await site.events("/v1/chat/completions", body)
    for index in range(2):
        choices = streamed(events, index)
        deltas = [choice["delta"] for choice in choices]
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "ok"
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        begins = [call for call in calls if "id" in call]
        assert [(call["index"], call["type"], call["function"]) for call in begins] == [
            (i, "function", {"name": "f", "arguments": ""}) for i in range(2)
        ]
        assert len({call["id"] for call in begins}) == 2
        for i in range(2):
            pieces = [call["function"]["arguments"] for call in calls if call["index"] == i]
            assert "".join(pieces) == '{"x": 1}' and len(pieces) > 3
        assert choices[-1]["finish_reason"] == "tool_calls"
        tokens = [
            entry["token"]
            for choice in choices
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert "".join(tokens).startswith(site.generator.text)


@pytest.mark.parametrize(
    ("fields", "reason", "arguments"),
    [
        ({"max_tokens": 43}, "length", '{"x'),
        ({"stop": "x"}, "stop", '{"'),
        ({"stop": "\n</"}, "tool_calls", '{"x": 1}'),
    ],
)
async def test_a_call_that_is_cut(
    site: Site, fields: dict[str, Any], reason: str, arguments: str
) -> None:
    choice = await ask(site, CALL, tools=TOOLS, **fields)
    assert choice["finish_reason"] == reason
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith(arguments)


async def test_markers_that_are_special_tokens_are_seen(site: Site) -> None:
    await ask(site, "a", tools=TOOLS)
    await ask(site, "a", tools=TOOLS, skip_special_tokens=True)
    await ask(site, "a", tools=TOOLS, tool_choice="none")
    assert [r.skip_special_tokens for r in site.generator.requests] == [False, True, True]


class Shouting(ToolParser):
    """A format of a plugin: `!name` calls a tool."""

    def parse(self) -> Any:
        if (yield from self.reader.literal("!")):
            self.begin((yield from self.reader.string()) or "?")
            self.arguments("{}")


async def test_a_parser_of_ones_own(tmp_path: Path) -> None:
    chat = ChatConfig(tool_call_parser="mine:Shouting")
    async with serve(byte_level_folder(tmp_path), 400, chat=chat, tool_parser=Shouting) as site:
        choice = await ask(site, '!"f" it', tools=TOOLS)
    assert choice["message"]["tool_calls"] == [function("f", "{}")]
    assert choice["message"]["content"] == " it"


HARMONY_TEMPLATE = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
    "{{ raise_exception('both') }}{% endif %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


async def test_harmony(tmp_path: Path) -> None:
    """One parser for reasoning, content and calls, whether or not there are tools."""
    chat = ChatConfig(tool_call_parser="openai")
    file = str(byte_level_folder(tmp_path) / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.save(file)
    async with serve(tmp_path, 2000, chat=chat, tool_parser=HarmonyParser) as site:
        site.generator.tokenizer.use_chat_template(HARMONY_TEMPLATE)
        thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        called = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
        choice = await ask(site, thought + called, tools=TOOLS)
        assert choice["message"]["reasoning_content"] == "hm"
        assert choice["message"]["tool_calls"] == [function("f", "{}")]
        assert choice["finish_reason"] == "tool_calls"
        stops = site.generator.requests[-1].sampling.stop_token_ids
        assert {site.tokenizer.token_text(each) for each in stops} == {"<|call|>", "<|return|>"}
        final = "<|channel|>final<|message|>yes"
        for tools in ([], TOOLS):
            message = (await ask(site, thought + final, tools=tools))["message"]
            assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        continued = {"add_generation_prompt": False, "continue_final_message": True}
        begun = [*ASK, {"role": "assistant", "content": "ye"}]
        message = (await ask(site, "s", messages=begun, **continued))["message"]
        assert message["content"] == "s" and "reasoning" not in message
        forced = final.replace("yes", '[{"name": "g", "parameters": {}}]')
        required = {"tools": TOOLS, "tool_choice": "required"}
        message = (await ask(site, thought + forced, **required))["message"]
        assert message["tool_calls"] == [function("g", "{}")]
        calls = [{"id": "1", **function("f", "{}")}]
        earlier = {"role": "assistant", "content": "I look", "reasoning": "hm", "tool_calls": calls}
        await ask(site, final, messages=[*ASK, earlier, {"role": "tool", "content": "r"}])


# ---- calls that are insisted on -----------------------------------------------------------


F_NAMED = {"type": "function", "function": {"name": "f"}}


def test_a_required_call_has_the_tool_s_schema() -> None:
    """Schemas are moved with all that they refer to; values that look like schemas are not."""
    value = {"$ref": "#/y"}
    refers = {
        "$id": "https://a/schema",  # its parts are found by their place from now on
        "$defs": {"y": {"type": "null"}},
        "properties": {
            "$id": {"type": "null"},
            "$ref": {"$ref": "#/$defs/y"},
            "const": {"$ref": "#/$defs/y"},
            "x": {"const": value, "enum": [value], "default": value},
        },
    }
    tools = [TOOLS[0], tool("h", **refers, anyOf=[{"$ref": "#"}, {"$ref": "https://a/#b"}])]
    body = ChatBody(messages=[], tools=tools, tool_choice="required", parallel_tool_calls=False)
    plan = plan_tools(body, ChatConfig())
    forced = forced_calls(body, plan)
    assert forced and (forced.kind, forced.param) == ("json", "tools")
    schema = json.loads(forced.text)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    names = [call["properties"]["name"] for call in schema["items"]["anyOf"]]
    assert names == [{"const": "f"}, {"const": "h"}]
    assert schema["$defs"]["0"] == TOOLS[0]["function"]["parameters"]
    assert schema["$defs"]["1"] == {
        "type": "object",
        "$defs": {"y": {"type": "null"}},
        "properties": {
            "$id": {"type": "null"},
            "$ref": {"$ref": "#/$defs/1/$defs/y"},
            "const": {"$ref": "#/$defs/1/$defs/y"},
            "x": {"const": value, "enum": [value], "default": value},
        },
        "anyOf": [{"$ref": "#/$defs/1"}, {"$ref": "https://a/#b"}],
    }


async def test_required_and_named_calls(site: Site) -> None:
    says = '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]'
    choice = await ask(site, says, tools=TOOLS, tool_choice="required")
    calls = [function("f", '{"x": 1}'), function("g", "{}")]
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == (calls, "tool_calls")
    choice = await ask(site, '{"x": 1}', tools=TOOLS, tool_choice=F_NAMED)
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == (calls[:1], "stop")
    assert choice["message"]["content"] is None
    # As OpenAI and vLLM have it: what a text would have to be says nothing of calls.
    await ask(site, "{}", tools=TOOLS, tool_choice=F_NAMED, response_format={"type": "json_object"})
    first, *others = [request.sampling.grammar for request in site.generator.requests[1:]]
    assert first and others == [first]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_tool_is_used_for_anthropics_clients(site: Site, stream: bool) -> None:
    site.generator.text = '{"x": 1}'
    body = {
        "messages": ASK,
        "max_tokens": 20,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "stream": stream,
    }
    said = await (await site.post("/v1/messages", body)).text()
    assert '"stop_reason":"tool_use"' in said and '"name":"f"' in said


# ---- refusals -----------------------------------------------------------------------------


def wrong(changed: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [TOOLS[0], TOOLS[1] | changed]}


BAD = [
    ({"tools": 1}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    (wrong({"type": ["custom"]}), "tools[1].type"),
    (wrong({"function": {}}), "tools[1].function.name"),
    (wrong({"function": {"name": ""}}), "tools[1].function.name"),
    (wrong({"function": {"name": "a b"}}), "tools[1].function.name"),
    (wrong({"function": {"name": "x" * 129}}), "tools[1].function.name"),
    (wrong({"function": {"name": "f"}}), "tools[1].function.name"),
    (wrong({"function": {"name": "h", "parameters": []}}), "tools[1].function.parameters"),
    (wrong(tool("h", type="array")), "tools[1].function.parameters"),
    (wrong({"function": {"name": "h", "description": 1}}), "tools[1].function.description"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}},
        "tool_choice",
    ),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [tool("h", properties={"x": {"type": "y"}})], "tool_choice": "required"}, "tools"),
    (
        {"tools": [tool("h", **{"$defs": {"a": {"$anchor": "b"}}})], "tool_choice": "required"},
        "tools",
    ),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"documents": [1]}, "documents[0]"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [function("f", 1)]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]  # fmt: skip


async def test_bad_tools(site: Site) -> None:
    await check_refused(site, "/v1/chat/completions", {"messages": ASK}, BAD)


async def test_constraints_that_tools_exclude_are_refused(tmp_path: Path) -> None:
    """It is sent as text: a body that is nested so deeply is refused before."""
    chat = ChatConfig(tool_call_parser="llama3_json")
    deep = '{"anyOf":[' * 900 + "{}" + "]}" * 900
    folder = byte_level_folder(tmp_path)
    async with serve(folder, chat=chat, tool_parser=Llama3JSONParser) as site:
        body = {"messages": ASK, "tools": TOOLS, "guided_json": deep}
        await check_error(await site.post("/v1/chat/completions", body), 400, "guided_json")


async def test_auto_is_none_where_no_parser_reads_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`required` and a named tool need no parser: a grammar enforces them."""
    named = {"type": "function", "function": {"name": "f"}}
    async with serve(byte_level_folder(tmp_path), 2000) as site:
        for choice in ({}, {"tool_choice": "auto"}):
            answer = await ask(site, CALL, tools=TOOLS, **choice)
            assert answer["message"] == {"role": "assistant", "content": CALL}
            assert answer["finish_reason"] == "stop"
        (warning,) = [each for each in caplog.records if "--tool-call-parser" in each.message]
        assert warning.levelname == "WARNING"
        answer = await ask(site, '{"x": 1}', tools=TOOLS, tool_choice=named)
        assert answer["message"]["tool_calls"] == [function("f", '{"x": 1}')]


async def test_auto_can_be_switched_off(tmp_path: Path) -> None:
    chat = ChatConfig(enable_auto_tool_choice=False, tool_call_parser="hermes")
    async with serve(byte_level_folder(tmp_path), chat=chat, tool_parser=HermesParser) as site:
        body = {"messages": ASK, "tools": TOOLS}
        error = await check_error(await site.post("/v1/chat/completions", body), 400, "tool_choice")
        assert "--no-enable-auto-tool-choice" in error["message"]
