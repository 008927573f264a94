"""Grammars: what becomes of constraints, which tokens may come next, and those that cannot be."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from paths import MODELS
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import MAX_CONSTRAINT, ConstraintKind, StructuredOutput
from pdserve.common.text import json_grammar
from pdserve.common.text.grammar import (
    GrammarError,
    GrammarTokens,
    Matcher,
    check_grammar,
    to_grammar,
)
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.common.text.tokenizer_file import byte_tokenizer, read_tokenizer_json

VOCAB = 512
EOS = (0, 2)
JSON, REGEX, CHOICE = ConstraintKind.JSON, ConstraintKind.REGEX, ConstraintKind.CHOICE
GRAMMAR, TAG = ConstraintKind.GRAMMAR, ConstraintKind.STRUCTURAL_TAG
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["dogs", "cats", 7, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(MODELS / "qwen3")


def want(kind: ConstraintKind, value: Any, **options: Any) -> StructuredOutput:
    if isinstance(value, str):
        return StructuredOutput(kind, value, "field", **options)
    return StructuredOutput.of_json(kind, value, "field", **options)


def matcher(tokens: GrammarTokens, kind: ConstraintKind, value: Any, **options: Any) -> Matcher:
    structured = want(kind, value, **options)
    grammar = to_grammar(structured)
    check_grammar(structured, grammar, tokens)
    return Matcher.compile(tokens, grammar)


def allowed(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(8 * len(mask)) if bits >> token & 1]


def walk(of: Matcher, seed: int, most: int = 200) -> list[int] | None:
    """Random tokens until the end; None: it did not come."""
    rng, drawn = random.Random(seed), []
    while len(drawn) < most:
        choices = allowed(of.mask())
        token = rng.choice([*choices, *(set(choices) & set(EOS))])
        of.advance([token])
        if token in EOS:
            return drawn
        drawn.append(token)
    return None


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        (REGEX, r"[0-9]{3}-(a|é🐶)+", r"[0-9]{3}-(a|é🐶)+"),
        (CHOICE, ["yes", "no", "né\n\"\\'🐶"], "yes|no|né\n\"\\\\'🐶"),
        (GRAMMAR, 'root ::= "a" [0-9]+ tail\ntail ::= "b" | "c"', "a[0-9]+[bc]"),
        (GRAMMAR, 'start: "a" /[0-9]+/ tail\ntail: "b" | "c"', "a[0-9]+[bc]"),
        (
            TAG,
            {"structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}],
             "triggers": ["<f"]},
            r"((?!<f).|\n|<f>1</f>)*",
        ),
    ],
)  # fmt: skip
def test_a_random_walk_is_a_text_of_the_grammar(
    tokens: GrammarTokens, tokenizer: Tokenizer, kind: ConstraintKind, value: Any, pattern: str
) -> None:
    begin = matcher(tokens, kind, value)
    walks = [walk(begin.copy(), seed) for seed in range(6)]
    texts = [tokenizer.decode(drawn) for drawn in walks if drawn is not None]
    assert texts
    assert all(re.fullmatch(pattern, text, re.DOTALL) for text in texts), texts


def test_a_random_walk_validates(tokens: GrammarTokens, tokenizer: Tokenizer) -> None:
    begin = matcher(tokens, JSON, PERSON, any_whitespace=False)
    for seed in range(20):
        drawn = walk(begin.copy(), seed)
        assert drawn is not None
        value = json.loads(text := tokenizer.decode(drawn))
        jsonschema.validate(value, PERSON)
        assert json.dumps(value, separators=(",", ":"), ensure_ascii=False) == text or "\\" in text


VERDICT = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "days": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["ok", "days"],
    "additionalProperties": False,
}
TAGGED = {"structures": [{"begin": "<f>", "schema": VERDICT, "end": "</f>"}], "triggers": ["<f"]}


def blank_walk(of: Matcher, tokens: GrammarTokens, text: str, end: str, most: int = 100) -> str:
    """Plays a model that writes white space wherever it may, from `text` to its first `end`."""

    def bytes_of(token: int) -> bytes:
        return bytes(tokens.library.decode_bytes([token]))

    of.advance(tokens.library.tokenize_str(text))
    for _ in range(most):
        if text.endswith(end):
            return text
        choices = set(allowed(of.mask())) - set(EOS)
        token = min(choices, key=lambda each: (bytes_of(each).strip() != b"", bytes_of(each)))
        of.advance([token])
        text += bytes_of(token).decode()
    raise AssertionError(f"no end: {text!r}")


@pytest.mark.parametrize("kind", [JSON, TAG])
@pytest.mark.parametrize(
    ("options", "blanks"),
    [
        ({}, {" "}),
        ({"any_whitespace": False}, set()),
        ({"whitespace_pattern": "\n {0,3}| "}, {"\n   "}),
    ],
)
def test_white_space_of_json_is_bounded(
    tokens: GrammarTokens, kind: ConstraintKind, options: Any, blanks: set[str]
) -> None:
    value, begin, end = (VERDICT, "{", "}") if kind is JSON else (TAGGED, "<f>{", "}</f>")
    text = blank_walk(matcher(tokens, kind, value, **options), tokens, begin, end)
    assert set(re.findall(r"\s+", text)) == blanks
    jsonschema.validate(json.loads(text.removeprefix("<f>").removesuffix("</f>")), VERDICT)


@pytest.mark.parametrize("text", ['{"ok": true, "days": [1, 2]}', '{"ok":true,"days":[1,2]}'])
def test_compact_json_is_allowed(tokens: GrammarTokens, text: str) -> None:
    of = matcher(tokens, JSON, VERDICT)
    of.advance(tokens.library.tokenize_str(text))
    assert of.complete and allowed(of.mask()) == list(EOS), "nor is there white space after it"


def test_the_end_comes_when_the_text_is_whole_and_nothing_after_it(tokens: GrammarTokens) -> None:
    of = matcher(tokens, REGEX, "a(b)?")
    begin = of.copy()
    assert not set(EOS) & set(allowed(of.mask()))
    of.advance([token_of(tokens, "a")])
    assert set(EOS) < set(allowed(of.mask())) and not of.complete and of.accepts
    early = of.copy()
    of.advance([token_of(tokens, "b")])
    early.advance([EOS[1], 77])  # ignored by the engine: whatever follows, it is over
    for each in (of, early):
        assert each.complete and allowed(each.mask()) == list(EOS)
    assert len(of.mask()) == len(begin.mask()) == VOCAB // 8, "a step stacks them"
    assert early.copy().complete
    with pytest.raises(GrammarError):
        of.advance([token_of(tokens, "b")])


def token_of(tokens: GrammarTokens, text: str) -> int:
    (token,) = tokens.library.tokenize_str(text)
    return int(token)


# ---- vocabularies ----


def sentencepiece_like() -> str:
    """Metaspace and byte fallback, as Llama 2 has them."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "é", "ab"]
    model = models.BPE(
        {word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    made = tokenizers.Tokenizer(model)
    made.add_special_tokens(["<unk>", "</s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return str(made.to_str())


@pytest.mark.parametrize(
    "text",
    [
        *(read_tokenizer_json(str(MODELS / name), None, None) for name in ("llama-gqa", "mistral")),
        str(byte_tokenizer(300).to_str()),
        sentencepiece_like(),
    ],
    ids=["llama", "mistral", "bytes", "fallback"],
)
def test_tokens_are_the_bytes_that_the_router_makes_of_them(text: str) -> None:
    ours = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(text)))
    made = GrammarTokens(text, ours.vocab_size + 9, (1,))  # some rows are only padding
    for token in range(ours.vocab_size):
        # Special ones are no text; nor is 0xFF, which llguidance has a use for.
        if token not in ours.special and ours.token_bytes(token) != b"\xff":
            assert made.library.decode_bytes([token]) == ours.token_bytes(token), token
    of = Matcher.compile(made, to_grammar(want(CHOICE, ["é the ab"])))
    drawn = walk_with(of, 1)
    assert ours.decode(drawn) == "é the ab"


def walk_with(of: Matcher, eos: int) -> list[int]:
    drawn: list[int] = []
    while (choices := allowed(of.mask())) != [eos]:
        drawn.append(max(choices))
        of.advance(drawn[-1:])
    return drawn


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="no end token"):
        GrammarTokens(str(byte_tokenizer(300).to_str()), 300, ())


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (JSON, {"type": "banana"}, r"Invalid type: banana \(at \$\)"),
        (
            JSON,
            {"properties": {"a": {"anyOf": [{}, {"uniqueItems": True}]}}},
            r"uniqueItems.*\(at \$\.properties\.a\.anyOf\[1\]\)",
        ),
        (JSON, {"$ref": "#"}, "no text matches"),
        (
            JSON,
            {"properties": {"a": {"oneOf": [{}, {"type": "null"}]}}},
            r"use anyOf, .* \(at \$\.properties\.a\)",
        ),
        (JSON, {"oneOf": [{"oneOf": [{}, {"type": "null"}]}]}, r"use anyOf, .*\$\.oneOf\[0\]"),
        (JSON, {"$ref": "file:///etc/passwd"}, r"names no schema of this document \(at \$\)"),
        (JSON, {"type": "integer", "minimum": 5, "maximum": 4}, "no text matches"),
        (REGEX, "(a", "unclosed group"),
        (REGEX, "[b-a]", "range"),
        (REGEX, "ab\\", "ends within an escape"),
        (GRAMMAR, "start: foo", 'unknown name: "foo"'),
        (GRAMMAR, "root ::= (", "GBNF"),
        (GRAMMAR, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        (GRAMMAR, 'start: %json {"type"', "delimiter"),
        (CHOICE, '["a"', "delimiter|JSON"),
        (TAG, {"structures": [], "triggers": []}, "list of structures"),
        (TAG, {"structures": [{"begin": "x", "end": "", "schema": {}}], "triggers": ["y"]},
         "no trigger is the beginning of 'x'"),
        (TAG, {"structures": [7], "triggers": ["y"]}, "structure needs"),
        (JSON, {"const": "\ud800"}, "unpaired surrogate"),
    ],
)  # fmt: skip
def test_invalid_constraints_name_reason_and_field(
    tokens: GrammarTokens, kind: ConstraintKind, value: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        matcher(tokens, kind, value)
    assert caught.value.param == "field"
    assert len(caught.value.message) <= 1100


def optional(count: int) -> dict[str, Any]:
    return {f"p{number}": {} for number in range(count)}


def before(count: int) -> Any:
    return {"type": "object", "properties": {**optional(count), "x": {}}, "required": ["x"]}


def after(count: int) -> Any:
    return {"type": "object", "properties": {"x": {}, **optional(count)}, "required": ["x"]}


def union(count: int) -> Any:
    branches = [{"type": "object", "properties": optional(10)} for _ in range(count)]
    return {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": branches}}}


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        (lambda count: {"type": "object", "properties": optional(count)}, 663),
        (before, 663),
        (after, 663),
        (union, 50),
    ],
)
def test_constraints_that_would_fail_within_an_answer_are_refused(
    tokens: GrammarTokens, schema: Any, most: int
) -> None:
    """And little that would not: the library follows as many properties at once."""

    def go_on(count: int) -> None:
        inner = schema(count)
        outer = {"type": "object", "properties": {"o": inner}, "$defs": inner.get("$defs", {})}
        begin = matcher(tokens, JSON, outer)
        for text in ('{"o": {', f'"{"x" if schema is after else "p0"}": {{"a": [1, "b"]}}, "'):
            begin.advance(tokens.library.tokenize_str(text))
            begin.mask()

    go_on(most)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_grammar, "ROW", 10**6)
        with pytest.raises(GrammarError, match="items"):
            go_on(most * 13 // 10 if schema is union else most + 350 * (schema is before) + 5)
    tag = {"begin": "<", "end": ">", "schema": schema(most + 1)}
    lark = f'start: %json {json.dumps(PERSON)} | x\nx: "x" %json{json.dumps(schema(most + 1))}'
    structures = {"structures": [tag], "triggers": ["<"]}
    for kind, value in ((JSON, schema(most + 1)), (TAG, structures), (GRAMMAR, lark)):
        with pytest.raises(InvalidRequest, match=r"too many optional properties \(at \$"):
            matcher(tokens, kind, value)


def test_a_constraint_has_a_bound() -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CONSTRAINT}"):
        want(REGEX, "é" * (MAX_CONSTRAINT // 2 + 1))


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (REGEX, "((a{1,1000}){1,1000}){1,1000}", "aaaa" * 9),
        (REGEX, "|".join(f".*a.{{{n}}}" for n in range(1500)), "a banana a a b b b c"),
        (REGEX, r"\w?" * 300, "abc"),
        (GRAMMAR, "start: A\nA: " + " & ".join(f"/.*a.{{{n}}}.*/" for n in range(3, 9)), "ab" * 9),
        (JSON, {"anyOf": [{"pattern": f".*a.{{{n}}}b"} for n in range(500)]}, '"abababa'),
    ],
    ids=["repeats", "tails", "nullable", "intersections", "patterns"],
)  # fmt: skip
def test_a_bomb_goes_off_in_its_own_matcher(
    tokens: GrammarTokens, kind: ConstraintKind, value: Any, text: str
) -> None:
    """With an error, before it has cost much: the limits hold in the middle of a text, too."""
    with pytest.raises((GrammarError, InvalidRequest)):
        of = matcher(tokens, kind, value)
        for token in tokens.library.tokenize_str(text):
            of.advance([token])
            of.mask()
