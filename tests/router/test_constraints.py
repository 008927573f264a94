"""Constraints as clients write them; a hostile one does not harm other requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from paths import MODELS
from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.router import ChatConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.router.api.grammar_compiler import MAX_KNOWN, Compiled, GrammarCompiler
from pdserve.router.api.preprocess_worker import Spec
from pdserve.router.api.preprocess_workers import PreprocessWorkers
from pdserve.router.api.schema import CompletionBody
from pdserve.router.api.structured import from_structured_outputs, structured_of
from pdserve.router.grpc.chat import structured_fields
from processes import descendants
from waiting import unless_busy

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


def of(**fields: Any) -> StructuredOutput | None:
    return structured_of(CompletionBody(prompt="x", **fields))


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}',
         "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "strict": True, "schema": SCHEMA}}}, "json", TEXT,
         "response_format.json_schema.schema"),
        ({"response_format": TAG}, "structural_tag", json.dumps(TAG, separators=(",", ":")),
         "response_format"),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json", TEXT,
         "structured_outputs.json"),
        ({"structured_outputs": {"json": " {} "}}, "json", " {} ", "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json", '{"type":"object"}',
         "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["é", ""], "json_object": False}}, "choice",
         '["é",""]', "structured_outputs.choice"),
        ({"guided_json": SCHEMA}, "json", TEXT, "guided_json"),
        ({"guided_json": TEXT}, "json", TEXT, "guided_json"),
        ({"guided_regex": "a|b"}, "regex", "a|b", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
        ({"guided_grammar": "start: /a/", "guided_decoding_backend": "auto"}, "grammar",
         "start: /a/", "guided_grammar"),
    ],
)  # fmt: skip
def test_one_constraint_in_many_words(
    fields: dict[str, Any], kind: str, text: str, param: str
) -> None:
    assert of(**fields) == StructuredOutput(ConstraintKind(kind), text, param)


def test_none_and_options() -> None:
    assert of() is None
    assert of(response_format={"type": "text"}, guided_json=None) is None
    options = {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " ?"}
    made = of(structured_outputs={**options, "disable_fallback": True})
    assert made == StructuredOutput(
        ConstraintKind.JSON, TEXT, "structured_outputs.json", False, " ?"
    )
    made = of(guided_json=SCHEMA, guided_whitespace_pattern="")
    assert made is not None and made.whitespace_pattern == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 9999}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": 1}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": "no"}},
         "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_regex": "a" * 2**16 + "a"}, "guided_regex"),
        ({"guided_json": {"enum": ["é" * 2**15]}}, "guided_json"),
    ],
)  # fmt: skip
def test_invalid_constraints_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        of(**fields)
    assert caught.value.param == param


def test_over_grpc() -> None:
    for message, kind, text in (
        (pb.StructuredOutputs(json=TEXT, disable_any_whitespace=True), "json", TEXT),
        (pb.StructuredOutputs(choice=pb.Choices(texts=["a", "b"])), "choice", '["a","b"]'),
        (pb.StructuredOutputs(json_object=True), "json", '{"type":"object"}'),
        (pb.StructuredOutputs(grammar="start: /a/"), "grammar", "start: /a/"),
    ):
        made = from_structured_outputs(structured_fields(message))
        assert (made.kind, made.text) == (kind, text)
        assert made.any_whitespace is not message.disable_any_whitespace
    for wrong in (
        pb.StructuredOutputs(),
        pb.StructuredOutputs(regex=""),
        pb.StructuredOutputs(choice=pb.Choices()),
        pb.StructuredOutputs(json="{"),
        pb.StructuredOutputs(json_object=False),
    ):
        with pytest.raises(InvalidRequest, match="structured_outputs"):
            from_structured_outputs(structured_fields(wrong))


# ---- compiled apart -------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers() -> AsyncIterator[PreprocessWorkers]:
    config = ModelConfig(model=str(MODELS / "llama-gqa"))
    made = PreprocessWorkers(
        Spec(asdict(config), asdict(LogConfig()), asdict(ChatConfig())), size=1
    )
    yield made
    await made.close()


GOOD = StructuredOutput(ConstraintKind.REGEX, "(a|b)+", "guided_regex")
DEEP = '{"type":"array","items":' * 2000 + "{}" + "}" * 2000
BOMBS = {
    "time": replace(GOOD, text=r"(\w+x)?" * 5000),
    "memory": replace(GOOD, text=r"\w?" * 20_000),
    "intersections": replace(
        GOOD, kind=ConstraintKind.GRAMMAR,
        text="start: A\nA: " + " & ".join(f"/.*a.{{{n}}}.*/" for n in range(9, 40)),
    ),
    "nested": replace(GOOD, text="(" * 30_000 + ")" * 30_000),
    "nested schema": StructuredOutput(ConstraintKind.JSON, DEEP, "guided_regex"),
    "nested GBNF": StructuredOutput(
        ConstraintKind.GRAMMAR, "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, "guided_regex"
    ),
}  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_ends_in_an_error_and_its_process_goes_on(
    workers: PreprocessWorkers, name: str
) -> None:
    assert (await workers.compile(GOOD)).grammar
    before = descendants()
    compiled = await unless_busy(partial(workers.compile, BOMBS[name]))
    assert compiled.error.startswith("guided_regex cannot be compiled: ") and not compiled.grammar
    assert len(compiled.error) < 1100
    assert compiled.seconds < 5, "of CPU: its limit is 0.5"
    assert (await workers.compile(GOOD)).grammar
    assert descendants() == before, "the worker lives, its child is gone"


async def test_verdicts_are_remembered_but_not_for_ever() -> None:
    asked: list[str] = []
    seconds: list[float] = []

    async def compile(structured: StructuredOutput, client: str) -> Compiled:
        asked.append(structured.text)
        return Compiled(seconds=1.5, **({"error": "bad"} if structured.text == "x" else {}))

    compiler = GrammarCompiler(compile, seconds.append)
    for _ in range(2):
        await compiler(GOOD, "me")
        with pytest.raises(InvalidRequest, match="bad") as caught:
            await compiler(replace(GOOD, text="x"), "me")
        assert caught.value.param == "guided_regex"
    assert (asked, seconds) == ([GOOD.text, "x"], [1.5, 1.5])
    for number in range(MAX_KNOWN):
        await compiler(replace(GOOD, text=str(number)), "me")
    await compiler(GOOD, "me")
    assert asked.count(GOOD.text) == 2


async def test_equal_constraints_are_compiled_once() -> None:
    """If who asked for it leaves, the next one asks."""
    asked: list[str] = []
    go = asyncio.Event()

    async def compile(structured: StructuredOutput, client: str) -> Compiled:
        asked.append(client)
        await go.wait()
        return Compiled("it")

    compiler = GrammarCompiler(compile, lambda seconds: None)
    first, *others = [asyncio.create_task(compiler(GOOD, "a")) for _ in range(4)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    others += [asyncio.create_task(compiler(replace(GOOD, text="x"), "a"))]
    others += [asyncio.create_task(compiler(GOOD, "b")) for _ in range(4)]  # has its own turn
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*others) == ["it"] * 8
    assert asked == ["a", "a", "a", "b"]
