"""Schemas over HTTP: what cannot be kept is a 400 with its field before a node is asked, and what
is kept reaches the nodes exactly as the client wrote it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakes_pipeline import byte_level_folder
from http_site import Site, check_refused, serve
from pdserve.common.config.router import ChatConfig
from pdserve.router.api.parsers.formats import HermesParser

ASK = [{"role": "user", "content": "ask"}]
LOOP = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
EXACT = ("9007199254740993", "0.1000000000000000055", "1e400")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    chat = ChatConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    folder = byte_level_folder(tmp_path)
    async with serve(folder, 2000, chat=chat, tool_parser=HermesParser) as site:
        yield site


def tools(schema: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def tag(schema: Any) -> dict[str, Any]:
    structures = [{"begin": "<f>", "schema": schema, "end": "</f>"}]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}


def fields_of(schema: Any) -> list[tuple[dict[str, Any], str]]:
    """Returns the ways to send a schema, each with its `param`."""
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = json.dumps(schema)
    return [
        ({"response_format": wrapped}, "response_format.json_schema.schema"),
        ({"response_format": tag(schema)}, "response_format"),
        ({"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": text}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": tag(schema)}},
         "structured_outputs.structural_tag"),
        ({"guided_json": schema}, "guided_json"),
        ({"guided_grammar": f'start: "a" %json {text}'}, "guided_grammar"),
        (tools(schema), "tools"),
        ({**tools(schema), "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tools"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        LOOP,
        {"type": "object", "properties": {"a": {"not": {}}}},
        {"type": "object", "minProperties": 2},
        {"type": "object", "properties": {"a": {"type": "string", "format": "idn-email"}}},
        {
            "type": "object",
            "x-guidance": {"lenient": True},
            "properties": {"a": {"type": "array", "uniqueItems": True}},
        },
    ],
)
async def test_a_schema_that_cannot_be_kept_is_refused(site: Site, schema: Any) -> None:
    await check_refused(site, "/v1/chat/completions", {"messages": ASK}, fields_of(schema))


async def test_a_grammar_without_a_text_is_refused(site: Site) -> None:
    cases = [
        ({"structured_outputs": {"grammar": text}}, "structured_outputs.grammar")
        for text in (
            "start: a\na: b\nb: a",
            'start: "x" a\na: "y" a',
            'start: "x" T\nT: /a/ & /b/',
            'root ::= "x" a\na ::= "y" a',
            'start: "x" | a b\na: "y"\nb: b "z" | T b\nT: "t"',
        )
    ]
    await check_refused(site, "/v1/completions", {"prompt": "x"}, cases)


async def test_numbers_reach_the_nodes_as_they_are(site: Site) -> None:
    """In each field, though the body's parser has floats."""
    marks = {f"number {i}": number for i, number in enumerate(EXACT)}
    values = {"enum": list(marks)}
    schema = {"type": "object", "properties": {"id": values}, "required": ["id"]}
    for fields, _ in fields_of(schema):
        raw = json.dumps({"messages": ASK, "max_tokens": 5, **fields})
        for mark, number in marks.items():
            raw = raw.replace(rf"\"{mark}\"", number).replace(f'"{mark}"', number)
        response = await site.post("/v1/chat/completions", raw.encode())
        assert response.status == 200, (await response.text(), raw)
    grammars = [request.sampling.grammar for request in site.generator.requests]
    assert len(grammars) == len(fields_of(schema))
    for grammar in grammars:
        assert all(f'"{number}"' in grammar for number in EXACT), grammar


async def test_choices_of_odd_characters(site: Site) -> None:
    for text in ("\u007f", "\u0000", '"', "\\", ""):
        body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": [text]}}
        assert (await site.post("/v1/completions", body)).status == 200, repr(text)
    raw = r'{"prompt": "x", "guided_choice": ["\ud800"]}'
    response = await site.post("/v1/completions", raw.encode())
    assert response.status == 400
