"""Patterns of schemas mean what ECMAScript says, in strings and in keys; what ECMAScript and Python
read differently is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.common.text.grammar import GrammarTokens, Matcher, to_grammar
from schema_fuzz import Walker

# Patterns, texts that match them and texts that do not.
READ_OTHERWISE_IN_RUST = [
    ("^[a&&b]$", ["a", "b", "&"], ["&&", ""]),
    ("^[a~~b]$", ["~", "a"], ["c"]),
    ("^[[a]b]$", ["[b]", "ab]"], ["a", "b", "["]),
    ("^[[:alpha:]]$", ["a]", ":]"], ["a", "z"]),
    ("^[!-/:-@[-`{-~]$", ["[", "!", "`", "~"], ["a", "0"]),
    (r"^[^[\]]+$", ["ab"], ["a[", "]"]),
    (r"^[\d-x]$", ["5", "-", "x"], ["a"]),
    (r"^[\w.-]+$", ["a.b-c"], ["a b"]),
    (r"^\s$", [" ", "\u00a0", "\ufeff"], ["\x85", "a"]),
    (r"^[^\S]$", [" "], ["a", "\x85"]),
    (r"^[\s\S]$", ["a", "\u2028"], ["ab"]),
    ("^.$", ["a", "😀"], ["\u2028", "aa"]),
    (r"^\cJ\0$", ["\n\0"], ["J0"]),
    (r"^[\b]$", ["\b"], ["b"]),
    (r"^\ud83d\ude00\u{1F600}\u0041\x41$", ["😀😀AA"], ["A"]),
    (r"^\<\$\/\-$", ["</-".replace("/", "$/")], ["<"]),
    (r"^\W\D$", ["é-"], ["a1"]),
    (r"^(?<year>\d{4})$|^(?:x)??$", ["2024", "", "x"], ["20"]),
    ("(?i)^abc$", ["ABC"], ["ab"]),
]
REFUSED = [
    "\\", r"\z", r"\A", r"\a", r"\h", r"\Qa\E", r"\x{41}", r"(a)\1", "^(?=a)", "(?!a)", "(?<!a)b",
    "(?x)a b", "(?s).", "(?#c)a", "a++", "a**", "*a", "a{,3}", "a{b}", "[]a]", "[^]", "[a", "[b-a]",
    r"[\d--]]&&[", "(", ")", "a|*", r"\ud83d", "[a--b]",
]  # fmt: skip


@pytest.fixture(scope="module")
def walker(tokens: GrammarTokens) -> Walker:
    return Walker(tokens)


def accepts(walker: Walker, schema: Any, value: Any) -> bool:
    matcher = walker.begin(json.dumps(schema))._matcher.deep_copy()
    text = json.dumps(value, ensure_ascii=False)
    tokens = walker.tokens.library.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(("pattern", "yes", "no"), READ_OTHERWISE_IN_RUST)
def test_a_pattern_means_what_ecmascript_says(
    walker: Walker, pattern: str, yes: list[str], no: list[str]
) -> None:
    for text in [*yes, *no]:
        matches = text in yes
        assert accepts(walker, {"type": "string", "pattern": pattern}, text) == matches, text
        listed = {"type": "string", "pattern": pattern, "enum": [text, "\u0001 other"]}
        assert not matches or accepts(walker, listed, text), text
        if not pattern.startswith("(?i)"):
            keys = {"properties": {text: {}}, "patternProperties": {pattern: {"type": "null"}}}
            assert accepts(walker, {"type": "object", **keys}, {text: 1}) != matches, text


def test_a_key_ignores_no_case(walker: Walker) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        walker.begin(json.dumps({"type": "object", "patternProperties": {"(?i)a|b": {}}}))


@pytest.mark.parametrize("pattern", REFUSED)
def test_other_dialects_are_refused(walker: Walker, pattern: str) -> None:
    for schema in (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {}}},
        {"type": "object", "propertyNames": {"pattern": pattern}},
    ):
        with pytest.raises(InvalidRequest) as caught:
            walker.begin(json.dumps(schema))
        assert caught.value.param == "field"


@pytest.mark.parametrize(
    ("names", "yes", "no"),
    [
        ({"type": "string"}, {"a": 1}, {"a": "x"}),
        ({"enum": ["a", "b", 3]}, {"b": 1}, {"c": 1}),
        ({"$ref": "#/$defs/color"}, {"red": 1}, {"blue": 1}),
        ({"pattern": "^x-", "maxLength": 3}, {"x-1": 1}, {"x-12": 1}),
        ({"format": "date"}, {"2024-02-29": 1}, {"2023-02-29": 1}),
        ({"minLength": 2}, {"declared": 1, "ab": 2}, {"a": 1}),
        ({"maxLength": 2}, {"ab": 1}, {"declared": 1}),
        (False, {}, {"a": 1}),
        ({"type": "integer"}, {}, {"a": 1}),
        ({"$ref": "#/propertyNames"}, {}, {"a": 1}),
    ],
)
def test_property_names(walker: Walker, names: Any, yes: Any, no: Any) -> None:
    """Pydantic writes them for dictionaries, and zod for records."""
    schema = {
        "type": "object",
        "properties": {"declared": {"type": "integer"}},
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
        "$defs": {"color": {"type": "string", "enum": ["red", "green"]}},
    }
    assert accepts(walker, schema, yes)
    assert not accepts(walker, schema, no)


@pytest.mark.parametrize("names", [5, {"pattern": 5}, {"anyOf": [{}, {}]}, {"minLength": -1}])
def test_wrong_property_names_are_refused(walker: Walker, names: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        walker.begin(json.dumps({"type": "object", "propertyNames": names}))
    assert caught.value.param == "field"


def test_names_within_data_are_no_names_of_schemas(walker: Walker) -> None:
    schema = {
        "default": {"$anchor": "a", "$id": "#b"},
        "examples": [{"$anchor": "a"}],
        "$defs": {"const": {"$anchor": "a", "const": 5}},
        "$ref": "#a",
    }
    assert accepts(walker, schema, 5) and not accepts(walker, schema, 6)


def test_formats_that_json_schema_does_not_define_are_annotations(walker: Walker) -> None:
    assert accepts(walker, {"type": "string", "format": "password"}, "any")
    for wrong in ("regex", "uri-reference", 5):
        with pytest.raises(InvalidRequest):
            walker.begin(json.dumps({"type": "string", "format": wrong}))


@pytest.mark.parametrize(
    ("regex", "yes", "no"),
    [
        ("[[a]b]", "[b]", "a"),
        ("[a&&b]", "&", "ab"),
        ("[:;]", ":", "a"),
        (r"[^[]\[x]", "a[x]", "[[x]"),
        (r"[!-/:-@[-`{-~]", "[", "a"),
        (r"[]\]a~~]+\[\\\[", r"]~a[\[", "a"),
    ],
)
def test_brackets_of_a_regex_are_pythons(walker: Walker, regex: str, yes: str, no: str) -> None:
    structured = StructuredOutput(ConstraintKind.REGEX, regex, "field")
    for text in (yes, no):
        matcher = Matcher.compile(walker.tokens, to_grammar(structured))._matcher
        tokens = walker.tokens.library.tokenize_str(text)
        matches = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert matches == (text == yes) == bool(re.fullmatch(regex, text))
    with pytest.raises(InvalidRequest, match="not supported"):
        to_grammar(StructuredOutput(ConstraintKind.REGEX, "[[:alpha:]]", "field"))
