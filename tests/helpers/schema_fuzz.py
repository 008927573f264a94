"""Random JSON schemas, and random walks over what a grammar allows of them."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.exact_json import loads
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.common.text.grammar import GrammarTokens, Matcher, check_grammar, to_grammar

NAMES = ["a", "b", "c", "x-1", 'q"', "\\", "é", "\u007f", "", "long name"]
PATTERNS = ["^a", "b$", "^[ab]$", "^x-", "[0-9]", "^(c|d)+$", ".", "^[a-z]{1,3}$", '^q"$', "z|^y"]
NUMBERS = [
    "0", "1", "-1", "3", "7", "10", "-5", "0.1", "0.5", "1.5", "-2.25", "1e3", "100", "12.0",
    "9007199254740993", "-9007199254740993", "18446744073709551616", "0.1000000000000000055",
    "123456789012345678901234567890", "1e-7", "1e25", "0.3", "-0.0", "99.99",
]  # fmt: skip
STEPS = ["1", "2", "5", "7", "10", "0.1", "0.5", "0.25", "0.01", "1.5", "0.3", "3", "100"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname",
           "duration", "banana"]  # fmt: skip
STRINGS = ["", "a", "ab", "é🐶", '"', "\\", "\n", "\u007f", "\u2028", "a/b", "null", "0"]


class Number:
    """A number by its text, which `dump` writes."""

    def __init__(self, text: str) -> None:
        self.text = text


def dump(value: Any) -> str:
    if isinstance(value, Number):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


class Schemas:
    """A source of random schemas: `text` returns the next one."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._refs: list[str] = []

    def text(self) -> str:
        rng = self._rng
        count = rng.choice([0, 0, 1, 2, 3])
        self._refs = ["#", *(f"#/$defs/d{i}" for i in range(count))] if count else ["#"]
        schema = self._schema(rng.choice([1, 2, 3]))
        if not isinstance(schema, dict):
            schema = {"items": schema}
        if count:
            schema["$defs"] = {f"d{i}": self._schema(rng.choice([0, 1, 2])) for i in range(count)}
        return dump(schema)

    def _some(self, of: list[Any], most: int) -> list[Any]:
        return self._rng.sample(of, self._rng.randint(0, min(most, len(of))))

    def _schema(self, depth: int) -> Any:
        rng = self._rng
        kinds = [
            self._number, self._string, self._string, self._listed, self._boolean, self._typed,
        ]  # fmt: skip
        if depth:
            kinds += [self._object] * 5 + [self._array] * 3 + [self._choice] * 3 + [self._ref]
        made = rng.choice(kinds)(depth - 1)
        if isinstance(made, dict) and rng.random() < 0.12 and depth:
            extra = rng.choice([self._object, self._array, self._choice, self._number])(depth - 1)
            made = {**made, **{key: each for key, each in extra.items() if key not in made}}
        if isinstance(made, dict) and rng.random() < 0.02:
            made["x-guidance"] = {
                "whitespace_flexible": True,
                "key_separator": "=",
                "lenient": True,
            }
        return made

    def _boolean(self, depth: int) -> Any:
        return self._rng.choice([True, False, {}, {"type": "boolean"}, {"type": "null"}])

    def _typed(self, depth: int) -> Any:
        types = ["null", "boolean", "integer", "number", "string", "array", "object"]
        return {"type": self._rng.choice([self._rng.choice(types), self._some(types, 3) or "null"])}

    def _number(self, depth: int) -> Any:
        rng = self._rng
        made: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if rng.random() < 0.3:
                made[key] = Number(rng.choice(NUMBERS))
        if rng.random() < 0.25:
            made["multipleOf"] = Number(rng.choice(STEPS))
        return made

    def _string(self, depth: int) -> Any:
        rng = self._rng
        made: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.4:
            made["minLength"] = rng.randint(0, 4)
        if rng.random() < 0.6:
            made["maxLength"] = rng.randint(0, 9)
        if rng.random() < 0.3:
            made["pattern"] = rng.choice(PATTERNS)
        elif rng.random() < 0.3:
            made["format"] = rng.choice(FORMATS)
        return made

    def _value(self, depth: int) -> Any:
        rng = self._rng
        if depth > 0 and rng.random() < 0.3:
            items = [self._value(depth - 1) for _ in range(rng.randint(0, 2))]
            return items if rng.random() < 0.5 else dict(zip(NAMES, items, strict=False))
        return rng.choice([Number(rng.choice(NUMBERS)), rng.choice(STRINGS), True, False, None])

    def _listed(self, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.5:
            return {"const": self._value(2)}
        made: dict[str, Any] = {"enum": [self._value(1) for _ in range(rng.randint(1, 4))]}
        if rng.random() < 0.3:
            made["type"] = rng.choice(["string", "number", "integer"])
        return made

    def _object(self, depth: int) -> Any:
        rng = self._rng
        names = self._some(NAMES, 4)
        made: dict[str, Any] = {"type": "object"}
        if rng.random() < 0.85:
            made["properties"] = {name: self._schema(depth) for name in names}
        if rng.random() < 0.6:
            made["required"] = self._some([*names, "undeclared"], 3)
        if rng.random() < 0.25:
            patterns = self._some(PATTERNS, 2)
            made["patternProperties"] = {each: self._schema(depth) for each in patterns}
        if rng.random() < 0.55:
            made["additionalProperties"] = rng.choice([False, False, self._schema(depth)])
        if rng.random() < 0.15:
            made["minProperties"] = rng.randint(0, 3)
        if rng.random() < 0.15:
            made["maxProperties"] = rng.randint(0, 4)
        if rng.random() < 0.02:
            made["dependentSchemas"] = {"a": self._schema(0)}
        return made

    def _array(self, depth: int) -> Any:
        rng = self._rng
        made: dict[str, Any] = {"type": "array"}
        if rng.random() < 0.7:
            made["items"] = self._schema(depth)
        if rng.random() < 0.35:
            made["prefixItems"] = [self._schema(depth) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            made["minItems"] = rng.randint(0, 3)
        if rng.random() < 0.5:
            made["maxItems"] = rng.randint(0, 4)
        if rng.random() < 0.02:
            made["uniqueItems"] = rng.choice([True, False])
        return made

    def _choice(self, depth: int) -> Any:
        rng = self._rng
        if rng.random() < 0.03:
            return {"if": self._schema(0), "then": self._schema(0)}
        key = rng.choice(["anyOf", "anyOf", "oneOf", "allOf"])
        return {key: [self._schema(depth) for _ in range(rng.randint(1, 3))]}

    def _ref(self, depth: int) -> Any:
        return {"$ref": self._rng.choice(self._refs)}


# ---- walks -----------------------------------------------------------------------------------


class Broken(AssertionError):
    """An answer breaks its schema, or ends in an error."""


def validator(schema: str) -> Any:
    """The oracle, with exact numbers."""
    given = json.loads(schema, parse_float=Decimal)
    kind = jsonschema.Draft202012Validator

    def is_integer(checker: Any, value: Any) -> bool:
        whole = isinstance(value, Decimal) and value == value.to_integral_value()
        return whole or (isinstance(value, int) and not isinstance(value, bool))

    exact = jsonschema.validators.extend(
        kind, type_checker=kind.TYPE_CHECKER.redefine("integer", is_integer)
    )
    return exact(given, format_checker=kind.FORMAT_CHECKER)


class Walker:
    """Random walks that prefer to end: tokens that close come more often as the text grows."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._bytes = [bytes(tokens.library.decode_bytes([i])) for i in range(tokens.vocab_size)]

    def tokens_allowed(self, of: Matcher) -> dict[int, bytes]:
        mask = int.from_bytes(of.mask(), "little")
        return {i: each for i, each in enumerate(self._bytes) if mask >> i & 1}

    def allowed(self, of: Matcher) -> set[bytes]:
        """Returns the first bytes of the tokens that may come next."""
        return {each[:1] for each in self.tokens_allowed(of).values()}

    def begin(self, schema: str, **options: Any) -> Matcher:
        """Raises InvalidRequest: the schema is refused."""
        structured = StructuredOutput(ConstraintKind.JSON, schema, "field", **options)
        grammar = to_grammar(structured)
        check_grammar(structured, grammar, self.tokens)
        return Matcher.compile(self.tokens, grammar)

    def walk(self, of: Matcher, rng: random.Random, most: int = 400) -> str | None:
        """Returns the text; None: there was no end. Raises GrammarError: a dead end."""
        text = b""
        while len(text) < most:
            mask = int.from_bytes(of.mask(), "little")
            allowed = [i for i in range(self.tokens.vocab_size) if mask >> i & 1]
            ends = [i for i in allowed if i in self.tokens.eos_token_ids]
            if ends and (len(allowed) == len(ends) or rng.random() < 0.5):
                return text.decode()
            allowed = [i for i in allowed if i not in ends]
            token = rng.choice(allowed)
            if rng.random() < min(0.9, 0.3 + len(text) / 200):
                closing = [i for i in allowed if self._bytes[i][:1] in (b'"', b"}", b"]")]
                if not closing:
                    closing = [i for i in allowed if self._bytes[i][:1] in b',:0123456789"nt']
                token = rng.choice(closing or allowed)
            of.advance([token])
            text += self._bytes[token]
        return None


def check(walker: Walker, schema: str, seed: int, walks: int = 3) -> tuple[str, int]:
    """Returns "refused" or "kept", and the walks that did not end. Raises Broken."""
    try:
        begin = walker.begin(schema)
    except InvalidRequest as error:
        if error.param != "field":
            raise Broken(f"no param: {schema}") from error
        return "refused", 0
    oracle, endless = validator(schema), 0
    for number in range(walks):
        rng = random.Random(seed * 1000 + number)
        try:
            text = walker.walk(begin.copy(), rng)
        except Exception as error:
            raise Broken(f"{error!r} for {schema}") from error
        if text is None:
            endless += 1
            continue
        try:
            value = json.loads(text, parse_float=Decimal)
            loads(text)
            oracle.validate(value)
        except RecursionError:  # the oracle's, for a schema that is only itself again
            continue
        except (ValueError, jsonschema.ValidationError) as error:
            raise Broken(f"{text!r} breaks {schema}: {error}") from error
    return "kept", endless
