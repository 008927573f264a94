"""Grammars: which tokens may come next, so that a text becomes what its client wants it to be.

    StructuredOutput ─ to_grammar ─▶ grammar, a text ─ Grammar.compile ─▶ Matcher, of one sequence

llguidance compiles lazily: what is needed of a grammar's automata is made as its texts go on. So
compiling is cheap, and each mask has a bound of its own (`LIMITS`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import (
    COMPACT_WHITESPACE,
    MAX_GRAMMAR,
    MAX_OPENING,
    ConstraintKind,
    StructuredOutput,
)
from pdserve.common.text.json_schema import ROW, check_width, embedded, explained

# Fuel is llguidance's measure of work. Ordinary masks take tens of microseconds, those of an object
# with 480 optional properties up to 9 ms, the worst found 50 ms and 30 MB. Compiling has no such
# bound: `router/api/grammar_compiler.py`.
LIMITS = LLParserLimits(
    max_items_in_row=ROW,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,  # a token's text may pass through many rows
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,  # minutes and gigabytes, for a row of `\w?`
    verbose_errors=False,
)
_MAX_MESSAGE = 500  # characters
_NO_TEXT = "no text matches it"
_OPTIONS = "x-guidance"  # llguidance's, in a schema
DIRECTIVE = "%opening "  # which no grammar of a client's has: `common/text/opening.py`


class GrammarError(Exception):
    """A grammar that cannot be compiled, or went too far; or a text that is not its."""


class GrammarTokens:
    """A model's vocabulary, as grammars need it: some 100 MB and a second for 150 000 tokens.
    Read-only, so threads may share it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Of the content of a `tokenizer.json`. `vocab_size` is the model's, which may be larger
        than the tokenizer's.

        Raises:
            GrammarError: texts of this tokenizer cannot be constrained.
        """
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
        if not self.eos_token_ids:
            raise GrammarError("the model has no token that ends a text")
        try:
            self.library = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(self.eos_token_ids)
            )
        except ValueError as error:
            raise GrammarError(f"its tokenizer cannot be used for grammars: {error}") from error
        # Tokens that are one newline or two.
        encoded = [self.library.tokenize_str(text) for text in ("\n", "\n\n")]
        self.newlines = frozenset(ids[0] for ids in encoded if len(ids) == 1)
        self.ends = self.bits(self.eos_token_ids)
        self.all = ((1 << vocab_size) - 1).to_bytes(len(self.ends), "little")
        self.all_but_ends = bytes(a ^ end for a, end in zip(self.all, self.ends, strict=True))

    def bits(self, token_ids: Iterable[int]) -> bytes:
        """A bit for each token of the vocabulary, that of token 0 the lowest of the first byte, in
        whole words of 32 bits: whether it is one of these."""
        mask = bytearray(-(-self.vocab_size // 32) * 4)
        for token_id in token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)


class Matcher:
    """One text in the making: which token may come next, given those so far."""

    def __init__(self, tokens: GrammarTokens, matcher: LLMatcher) -> None:
        self._tokens = tokens
        self._matcher = matcher
        self._ended = False

    @classmethod
    def compile(cls, tokens: GrammarTokens, grammar: str) -> Matcher:
        """At the beginning of a text. Leaves other threads the interpreter meanwhile.

        Raises:
            GrammarError: `grammar` is none, or too large.
        """
        made = cls(tokens, LLMatcher(tokens.library, grammar, log_level=0, limits=LIMITS))
        made._check()
        return made

    def copy(self) -> Matcher:
        """Another text, where this one is now. They share what has been made of the automata, and
        the limit of it."""
        copied = Matcher(self._tokens, self._matcher.deep_copy())
        copied._ended = self._ended
        return copied

    @property
    def complete(self) -> bool:
        """Nothing but an end token may come. Known once there is a mask."""
        return self._ended or self._matcher.is_stopped()

    @property
    def accepts(self) -> bool:
        """What is there may be the whole text."""
        return self._ended or self._matcher.is_accepting()

    def advance(self, token_ids: Sequence[int]) -> None:
        """These have come next. After an end token, which an engine may ignore, nothing counts.

        Raises:
            GrammarError: they are not what the grammar allows.
        """
        for place, token_id in enumerate(token_ids):
            if token_id in self._tokens.eos_token_ids:
                token_ids, self._ended = token_ids[:place], True
                break
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            self._check()

    def mask(self) -> bytes:
        """Which tokens may come next, as `GrammarTokens.bits` has them; one at least.

        Raises:
            GrammarError: finding out takes too much work or memory.
        """
        if self._ended:
            return self._tokens.ends
        mask = self._matcher.compute_bitmask()[: len(self._tokens.ends)]  # some have a word more
        self._check()
        self._ended = mask == self._tokens.ends  # as a text that must be empty, at its beginning
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error().removesuffix("<non-verbose/>").strip()
            raise GrammarError(_NO_TEXT if "NoExtension" in message else message[:_MAX_MESSAGE])


# ---- from what a client wants to a grammar --------------------------------------------------


def to_grammar(structured: StructuredOutput) -> str:
    """The constraint in llguidance's own words, as nodes are told it.

    Raises:
        InvalidRequest: it cannot be said in them.
    """
    try:
        grammar = _to_grammar(structured)
        size = len(grammar.encode())
    except (ValueError, TypeError, LookupError, AssertionError, RecursionError) as error:
        raise _invalid(structured, str(error)) from error
    if size > (most := MAX_GRAMMAR - MAX_OPENING):
        raise _invalid(structured, f"it becomes {size} bytes, more than {most}")
    if grammar.startswith(DIRECTIVE):
        raise _invalid(structured, f"{DIRECTIVE}is not for clients")
    return grammar


def _to_grammar(structured: StructuredOutput) -> str:
    text = structured.text
    match structured.kind:
        case ConstraintKind.JSON:
            check_width(json.loads(text))
            options = _whitespace(structured)
            return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
        case ConstraintKind.STRUCTURAL_TAG:
            return _structural_tag(json.loads(text), _whitespace(structured))
        case ConstraintKind.REGEX:
            if (len(text) - len(text.rstrip("\\"))) % 2:
                raise ValueError("the regex ends within an escape")  # which the library drops
            return str(LLMatcher.grammar_from_regex(text))
        case ConstraintKind.CHOICE:
            # A terminal, for its lexer: a rule of thousands of choices exceeds `max_items_in_row`.
            choices = [json.dumps(each, ensure_ascii=False) for each in json.loads(text)]
            return str(LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {' | '.join(choices)}"))
        case ConstraintKind.GRAMMAR:
            for schema in embedded(text):
                check_width(schema)
            return str(grammar_from("grammar", text))


def _whitespace(structured: StructuredOutput) -> Any:
    """llguidance's options: which white space may stand, once, between tokens of JSON."""
    pattern = structured.whitespace_pattern
    if pattern is None and structured.any_whitespace:
        pattern = COMPACT_WHITESPACE
    options = {"whitespace_flexible": structured.any_whitespace}
    return options if pattern is None else {**options, "whitespace_pattern": pattern}


def _structural_tag(given: dict[str, Any], whitespace: Any) -> str:
    """Of `structures`, each begins with one of the `triggers`; around them is any text."""
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("a structural tag has a list of structures and one of triggers")
    tags = [_tag(each, [text for text in triggers if text], whitespace) for each in structures]
    return str(LLMatcher.grammar_from_lark(StructTag.to_grammar(tags)))


def _tag(structure: Any, triggers: Sequence[Any], whitespace: Any) -> StructTag:
    match structure:
        case {"begin": str(begin), "end": str(end), "schema": dict(schema)}:
            for trigger in triggers:
                if isinstance(trigger, str) and begin.startswith(trigger):
                    check_width(schema)
                    schema = {**schema, _OPTIONS: {**schema.get(_OPTIONS, {}), **whitespace}}
                    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)
            raise ValueError(f"no trigger begins {begin[:64]!r}")
        case _:
            raise ValueError("a structure has the texts begin and end, and an object schema")


def check_grammar(structured: StructuredOutput, grammar: str, tokens: GrammarTokens) -> None:
    """Compiles it as nodes will, as far as the first token. A hostile one takes any time and memory
    there is, or ends the process.

    Raises:
        InvalidRequest: why it cannot be, and where.
    """
    try:
        matcher = Matcher.compile(tokens, grammar)
        if not any(matcher.mask()) or (matcher.complete and not matcher.accepts):
            raise GrammarError(_NO_TEXT)
    except GrammarError as error:
        message = str(error)
        if structured.kind is ConstraintKind.JSON:
            message = explained(json.loads(structured.text), message)
        raise _invalid(structured, message) from error


def _invalid(structured: StructuredOutput, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"{structured.param} cannot be compiled: {message}"[: 2 * _MAX_MESSAGE],
        param=structured.param,
    )
