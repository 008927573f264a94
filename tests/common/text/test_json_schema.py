"""Schemas keep their word: an answer that ends is one of the schema, and each can end. The oracle
is jsonschema, with exact numbers."""

from __future__ import annotations

import json
import random
import re
from time import process_time
from typing import Any

import pytest

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.exact_json import dumps, loads
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.common.text.grammar import GrammarTokens, Matcher, check_grammar, to_grammar
from schema_fuzz import Schemas, Walker, check

LOOP = {"$ref": "#/$defs/loop"}
DEFS = {"$defs": {"loop": {"$ref": "#/$defs/again"}, "again": {"$ref": "#/$defs/loop"}}}
CHAIN = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


@pytest.fixture(scope="module")
def walker(tokens: GrammarTokens) -> Walker:
    return Walker(tokens)


def begin(walker: Walker, schema: Any, **options: Any) -> Matcher:
    return walker.begin(schema if isinstance(schema, str) else json.dumps(schema), **options)


def accepts(walker: Walker, schema: Any, text: str) -> bool:
    """Returns whether an answer may be this text, byte by byte."""
    matcher = begin(walker, schema)._matcher.deep_copy()
    tokens = walker.tokens.library.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def refused(walker: Walker, schema: Any, kind: str = "json") -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    structured = StructuredOutput(ConstraintKind(kind), text, "field")
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(structured, to_grammar(structured), walker.tokens)
    assert caught.value.param == "field"
    return caught.value.message


# ---- random schemas ----


def fuzz(walker: Walker, seeds: range) -> None:
    outcomes = [check(walker, Schemas(seed).text(), seed) for seed in seeds]
    kept = [endless for verdict, endless in outcomes if verdict == "kept"]
    assert len(kept) > 0.6 * len(outcomes), "most are supported"
    assert sum(kept) <= 0.05 * 3 * len(kept), "walks end"


def test_random_schemas_are_kept_or_refused(walker: Walker) -> None:
    fuzz(walker, range(50))


@pytest.mark.slow
def test_a_thousand_random_schemas_are_kept_or_refused(walker: Walker) -> None:
    fuzz(walker, range(1000, 2000))


# ---- a rule without a finite text ----


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        LOOP,
        {"type": "object", "properties": {"a": LOOP}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"properties": {"b": LOOP}, "required": ["b"],
                                                "type": "object"}}, "required": ["a"]},
        {"prefixItems": [{"type": "null"}, LOOP], "minItems": 2, "type": "array"},
        {"type": "array", "items": LOOP, "minItems": 1},
        {"anyOf": [LOOP, {"allOf": [LOOP]}]},
        {"oneOf": [LOOP]},
        {"type": "object", "required": ["x"], "additionalProperties": LOOP},
        {"type": "object", "minProperties": 1, "additionalProperties": LOOP},
        CHAIN,
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$ref": "#/$defs/loop", "type": "object"},
    ],
)  # fmt: skip
def test_a_schema_without_a_finite_text_is_refused(walker: Walker, schema: Any) -> None:
    assert "no text matches" in refused(walker, {**schema, **DEFS})


@pytest.mark.parametrize(
    ("schema", "text", "never"),
    [
        ({"type": "object", "properties": {"a": LOOP, "b": True}}, '{"b":1}', '{"a":1}'),
        ({"type": "array", "items": LOOP}, "[]", "[1]"),
        ({"type": "array", "prefixItems": [True, LOOP]}, "[1]", "[1,1]"),
        ({"anyOf": [LOOP, {"type": "null"}]}, "null", "1"),
        ({"type": "object", "additionalProperties": LOOP}, "{}", '{"a":1}'),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "null", "1"),
        ({"properties": {"next": {"anyOf": [CHAIN, {"$ref": "#"}]}}, "type": "object"},
         '{"next":{"next":{}}}', '{"next":1}'),
    ],
)  # fmt: skip
def test_parts_without_a_finite_text_are_left_out(
    walker: Walker, schema: Any, text: str, never: str
) -> None:
    whole = {**schema, **DEFS}
    assert accepts(walker, whole, text)
    assert not accepts(walker, whole, never)


def test_the_place_of_an_impossible_property_is_named(walker: Walker) -> None:
    inner = {"type": "object", "properties": {"b": {"enum": []}}, "required": ["b"]}
    outer = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    assert "(at $.properties.a.properties.b)" in refused(walker, outer)


# ---- keys ----


@pytest.mark.parametrize(
    "pattern", ["^a$", "^[ab]$", '^"$', "^(a|b)$", "^(?:a)$"], ids=lambda each: str(each)
)
def test_no_comma_comes_before_an_impossible_key(walker: Walker, pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "patternProperties": {pattern: True},
        "additionalProperties": False,
    }
    assert accepts(walker, schema, '{"a": null, "b": null}')
    assert not accepts(walker, schema, '{"a": null, "a": null}')
    of = begin(walker, schema)
    of.advance(walker.tokens.library.tokenize_str('{"b": null'))
    assert b"," not in walker.allowed(of)


def test_a_free_key_is_no_declared_one(walker: Walker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    assert accepts(walker, schema, '{"a": null, "b": 1}')
    for key in ("a", r"\u0061", r"\u0001"):
        assert not accepts(walker, schema, f'{{"a": null, "{key}": 1}}'), "no escapes, either"


def test_repeated_keys_count_once(walker: Walker) -> None:
    """Free keys may be equal, so that only one of them counts towards minProperties."""
    one = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}}
    assert accepts(walker, one, '{"x":null}') and not accepts(walker, one, "{}")
    assert "no text" in refused(walker, {**one, "minProperties": 2})
    declared = {**one, "minProperties": 3, "properties": {n: {"type": "null"} for n in "abc"}}
    assert accepts(walker, declared, '{"a":null,"c":null,"x":null}')
    assert not accepts(walker, declared, '{"a":null,"x":null,"y":null}')
    most = {**declared, "minProperties": 0, "maxProperties": 2}
    assert accepts(walker, most, '{"a":null,"x":null}')
    assert not accepts(walker, most, '{"a":null,"b":null,"x":null}')


# ---- numbers and formats ----

BIG = ["9007199254740993", "-9007199254740993", "18446744073709551617", "0.1000000000000000055",
       "1e400", "123456789012345678901234567890.5"]  # fmt: skip


@pytest.mark.parametrize("number", BIG)
def test_numbers_beyond_a_float_are_exact(walker: Walker, number: str) -> None:
    other = number[:-1] + str((int(number[-1]) + 1) % 10)
    for schema in (f'{{"const": {number}}}', f'{{"enum": [{number}, "x"]}}'):
        assert accepts(walker, schema, number)
        assert not accepts(walker, schema, other)
    if "e" not in number:
        schema = f'{{"type": "number", "minimum": {number}, "maximum": {number}}}'
        assert accepts(walker, schema, number) and not accepts(walker, schema, other)
    assert dumps(loads(number)) == number


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ('{"type": "integer", "minimum": 9007199254740993}', "9007199254740993",
         "9007199254740992"),
        ('{"type": "number", "exclusiveMaximum": 0.1000000000000000055}', "0.1",
         "0.1000000000000000056"),
        ('{"type": "number", "minimum": -0.5, "maximum": 2.25}', "2.250", "2.2501"),
        ('{"type": "number", "exclusiveMinimum": 0}', "0.001", "0.000"),
        ('{"type": "number", "exclusiveMaximum": 0}', "-0.1", "0"),
        ('{"type": "integer", "multipleOf": 0.5}', "3", "3.5"),
        ('{"type": "number", "multipleOf": 0.25, "minimum": 1}', "1.75", "1.7"),
        ('{"type": "number", "multipleOf": 0.01}', "12.34", "12.345"),
        ('{"type": "integer", "multipleOf": 7}', "-21", "22"),
        ('{"type": "integer", "minimum": 1.5, "maximum": 3.2}', "2", "1"),
    ],
)  # fmt: skip
def test_bounds_of_numbers_are_exact(walker: Walker, schema: str, yes: str, no: str) -> None:
    assert accepts(walker, schema, yes)
    assert not accepts(walker, schema, no)


def test_random_ranges_of_numbers(walker: Walker) -> None:
    rng = random.Random(7)
    for _ in range(25):
        low, high = sorted(rng.choice([rng.uniform(-2, 2), rng.uniform(-1e6, 1e6)]) for _ in "ab")
        places = rng.choice([0, 1, 3])
        low, high = round(low, places), round(high, places)
        strict = rng.random() < 0.5 and low < high
        names = ("exclusiveMinimum", "exclusiveMaximum") if strict else ("minimum", "maximum")
        of = {"type": "number", **dict(zip(names, (low, high), strict=True))}
        for _ in range(8):
            value = rng.choice([low, high, 0.0, rng.uniform(2 * low - high, 2 * high - low)])
            text = f"{value:.{rng.choice([1, 4])}f}"
            exact = float(text)
            inside = low < exact < high if strict else low <= exact <= high
            assert accepts(walker, of, text) == inside or text.startswith("-0.0"), (of, text)


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": "integer"}, {}, {"minimum": 1e30},
                                    {"type": "number", "multipleOf": 0.3}])  # fmt: skip
def test_a_number_is_of_bounded_length(walker: Walker, schema: Any) -> None:
    """Whatever digits a model prefers, the number ends."""
    for digits in (b"1234567890", b"9", b"0.0", b"1.00", b"1e0"):
        of, text = begin(walker, schema), b""
        while len(text) < 100:
            allowed = {each: i for i, each in walker.tokens_allowed(of).items() if len(each) == 1}
            wanted = [bytes([each]) for each in digits[len(text) :] + b"0123456789"]
            following = next((each for each in wanted if each in allowed), None)
            if following is None:
                break
            of.advance([allowed[following]])
            text += following
        assert len(text) < 60


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        ("time", "23:59:59.123456789Z", "23:59:60Z"),
        ("time", "00:00:00+01:00", "00:00:00.1234567890Z"),
        ("date-time", "2024-02-29T10:00:00Z", "2023-02-29T10:00:00Z"),
        ("date-time", "2024-12-31T23:59:59Z", "2024-12-31T23:59:60Z"),
        ("date", "2000-02-29", "1900-02-29"),
        ("duration", "P1Y2M3DT4H5M6S", "P" + "1" * 10 + "Y"),
        ("ipv6", "::1", "1::2::3"),
        ("ipv4", "255.0.10.1", "256.0.0.1"),
        ("uri", "https://example.org:80/a?b=c#d", "https//x y"),
        ("email", "a.b@example.org", "a@"),
    ],
)
def test_formats(walker: Walker, form: str, yes: str, no: str) -> None:
    schema = {"type": "string", "format": form}
    assert accepts(walker, schema, f'"{yes}"')
    assert not accepts(walker, schema, f'"{no}"')


# ---- the library's own keyword ----


def test_x_guidance_changes_nothing(walker: Walker) -> None:
    options = {"x-guidance": {"key_separator": " = ", "lenient": True, "coerce_one_of": True,
                              "whitespace_pattern": "x"}}  # fmt: skip
    inner = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
             "additionalProperties": False}  # fmt: skip
    for schema in ({**inner, **options}, {"allOf": [{**inner, **options}]}):
        assert accepts(walker, schema, '{"a": null}')
        assert not accepts(walker, schema, '{"a" = null}')
    assert "not is not supported" in refused(walker, {**options, "not": {}})
    tag = {"structures": [{"begin": "<f>", "schema": {**options, "not": {}}, "end": "</f>"}],
           "triggers": ["<f"]}  # fmt: skip
    assert "not is not supported" in refused(walker, tag, "structural_tag")
    lark = f'start: "x %json {{" %json {json.dumps({**inner, **options})}'
    grammar = to_grammar(StructuredOutput(ConstraintKind.GRAMMAR, lark, "field"))
    assert "x-guidance" not in grammar
    matcher = Matcher.compile(walker.tokens, grammar)
    matcher.advance(walker.tokens.library.tokenize_str('x %json {{"a":null}'))
    assert matcher.accepts
    own = '{"grammars": [{"json_schema": {"x-guidance": {}}, "lark_grammar": "start: x"}]}'
    assert "not JSON" in refused(walker, own, "grammar")


# ---- choices ----


def test_choices_of_every_odd_character(walker: Walker) -> None:
    odd = [*map(chr, range(0x21)), *map(chr, range(0x7F, 0xA1)), '"', "\\", "\\n", "/", "\u2028",
           "\ufeff", "\U0010ffff", "{", "a\\", '\\"', "%json", "//", "#"]  # fmt: skip
    for text in [*odd, ""]:
        structured = StructuredOutput.of_json(ConstraintKind.CHOICE, [text], "field")
        grammar = to_grammar(structured)
        check_grammar(structured, grammar, walker.tokens)
        of = Matcher.compile(walker.tokens, grammar)
        of.advance(walker.tokens.library.tokenize_str(text))
        assert of.accepts, repr(text)
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        StructuredOutput.of_json(ConstraintKind.CHOICE, ["\ud800"], "field")
    assert caught.value.param == "field"


# ---- hostile schemas ----


def nested(levels: int) -> str:
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


def chain(count: int) -> str:
    links = [f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}}' for i in range(count)]
    return f'{{"$ref":"#/$defs/d0","$defs":{{{",".join(links)},"d{count}":{{}}}}}}'


HOSTILE = {
    "nested": nested(900),
    "nested too deeply": nested(2000),
    "refs": chain(1500),
    "refs of one": '{"anyOf":[' + ",".join(['{"$ref":"#"}'] * 4000) + ',{"type":"null"}]}',
    "anyOf": '{"anyOf":[' + ",".join(f'{{"const":{i}}}' for i in range(4000)) + "]}",
    "products": json.dumps({"allOf": [{"anyOf": [{"minimum": i * 10 + j} for j in range(10)]}
                                      for i in range(12)]}),
    "oneOf": '{"oneOf":[' + ",".join(f'{{"const":{i}}}' for i in range(4000)) + "]}",
    "items": '{"type":"array","minItems":1000000000}',
    "counted": json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(600)},
                           "minProperties": 300}),
    "digits": '{"minimum":1e999999999}',
    "exponent": '{"multipleOf":1e-399}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_take_bounded_time(walker: Walker, name: str) -> None:
    """A process with bounds compiles them; but few should need those."""
    start = process_time()
    try:
        to_grammar(StructuredOutput(ConstraintKind.JSON, HOSTILE[name], "field"))
    except InvalidRequest as error:
        assert error.param == "field" and not re.search("Traceback|object at", error.message)
    assert process_time() - start < 5


def test_a_hundred_tools_fit_into_a_grammar(walker: Walker) -> None:
    """A grammar's size is bounded, and each tool's is larger than its schema."""
    names = [f"parameter_{i}" for i in range(8)]
    tool = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    calls = [
        {"type": "object", "properties": {"name": {"const": f"t{i}"}, "arguments": tool},
         "required": ["name", "arguments"], "additionalProperties": False}
        for i in range(100)
    ]  # fmt: skip
    schema = {"type": "array", "items": {"anyOf": calls}}
    assert len(json.dumps(schema)) > 40_000
    text = '[{"name": "t99", "arguments": {"parameter_7": "x"}}]'
    assert accepts(walker, schema, text)
