"""Grammars for structured output: compute which tokens may come next.

    StructuredOutput ─ to_grammar ─▶ grammar, as text ─ Matcher.compile ─▶ Matcher of one sequence

llguidance builds a grammar's automata lazily, while texts are matched. So compiling is cheap, and
each mask has its own limits (`LIMITS`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from pdserve.common.core import exact_json
from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.structured import (
    COMPACT_WHITESPACE,
    MAX_GRAMMAR,
    MAX_OPENING,
    ConstraintKind,
    StructuredOutput,
)
from pdserve.common.text import json_grammar, json_strings, lark_grammar
from pdserve.common.text.json_grammar import NO_TEXT
from pdserve.common.text.json_regex import without_sets

# Fuel is llguidance's measure of work. Ordinary masks take tens of microseconds, those of an object
# with 480 optional properties up to 9 ms, the worst known 50 ms and 30 MB. Compiling has no such
# limit; see `router/api/grammar_compiler.py`.
LIMITS = LLParserLimits(
    max_items_in_row=json_grammar.ROW,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,  # a token's text may span many rows
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,  # takes minutes and gigabytes for a sequence of `\w?`
    verbose_errors=False,
)
_MAX_MESSAGE = 500  # characters
_SPECIAL = re.compile(r"<[^<>\s]+>")  # the name of a special token
DIRECTIVE = "%opening "  # not allowed in clients' grammars: `common/text/opening.py`


class GrammarError(Exception):
    """A grammar cannot be compiled or exceeds its limits, or a text does not match it."""


class GrammarTokens:
    """A model's vocabulary for grammars: about 100 MB and a second for 150,000 tokens. Read-only,
    so threads can share it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_json`: content of a `tokenizer.json`. `vocab_size`: the model's, which may be
        larger than the tokenizer's.

        Raises:
            GrammarError: this tokenizer is not supported.
        """
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
        if not self.eos_token_ids:
            raise GrammarError("the model has no end token")
        try:
            self.library = LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=list(self.eos_token_ids)
            )
        except ValueError as error:
            raise GrammarError(f"its tokenizer cannot be used for grammars: {error}") from error
        # Tokens of one or two newlines.
        encoded = [self.library.tokenize_str(text) for text in ("\n", "\n\n")]
        self.newlines = frozenset(ids[0] for ids in encoded if len(ids) == 1)
        self.ends = self.bits(self.eos_token_ids)
        self.all = ((1 << vocab_size) - 1).to_bytes(len(self.ends), "little")
        self.all_but_ends = bytes(a ^ end for a, end in zip(self.all, self.ends, strict=True))

    def bits(self, token_ids: Iterable[int]) -> bytes:
        """Returns a bit mask of the given tokens over the vocabulary, in whole 32-bit words; token
        0 is the lowest bit of the first byte."""
        mask = bytearray(-(-self.vocab_size // 32) * 4)
        for token_id in token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)


class Matcher:
    """Matches one text as it is generated: which tokens may come next."""

    def __init__(self, tokens: GrammarTokens, matcher: LLMatcher) -> None:
        self._tokens = tokens
        self._matcher = matcher
        self._ended = False

    @classmethod
    def compile(cls, tokens: GrammarTokens, grammar: str) -> Matcher:
        """Compiles a grammar; the matcher is at the beginning of a text. Releases the GIL.

        Raises:
            GrammarError: `grammar` is invalid or too large.
        """
        made = cls(tokens, LLMatcher(tokens.library, grammar, log_level=0, limits=LIMITS))
        made._check()
        return made

    def copy(self) -> Matcher:
        """Returns a copy at the same position of the text. Copies share the automata built so far,
        and their size limit."""
        copied = Matcher(self._tokens, self._matcher.deep_copy())
        copied._ended = self._ended
        return copied

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow; valid after a mask."""
        return self._ended or self._matcher.is_stopped()

    @property
    def accepts(self) -> bool:
        """Whether the text so far is a complete match."""
        return self._ended or self._matcher.is_accepting()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consumes the next tokens. Everything after an end token is ignored.

        Raises:
            GrammarError: the grammar does not allow them.
        """
        for place, token_id in enumerate(token_ids):
            if token_id in self._tokens.eos_token_ids:
                token_ids, self._ended = token_ids[:place], True
                break
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            self._check()

    def mask(self) -> bytes:
        """Returns the tokens that may come next, at least one, in the format of
        `GrammarTokens.bits`.

        Raises:
            GrammarError: computing it exceeds the limits.
        """
        if self._ended:
            return self._tokens.ends
        mask = self._matcher.compute_bitmask()[: len(self._tokens.ends)]  # it may be a word longer
        self._check()
        self._ended = mask == self._tokens.ends  # also for a text that must be empty
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            message = self._matcher.get_error().removesuffix("<non-verbose/>").strip()
            raise GrammarError(NO_TEXT if "NoExtension" in message else message[:_MAX_MESSAGE])


# ---- from a client's constraint to a grammar ------------------------------------------------


def to_grammar(structured: StructuredOutput) -> str:
    """Converts the constraint to llguidance's format, which nodes get.

    Raises:
        InvalidRequest: it is invalid or not supported.
    """
    try:
        grammar = _to_grammar(structured)
        size = len(grammar.encode())
    except (ValueError, TypeError, LookupError, AssertionError, RecursionError) as error:
        raise _invalid(structured, str(error)) from error
    if size > (most := MAX_GRAMMAR - MAX_OPENING):
        raise _invalid(structured, f"its grammar has {size} bytes, more than {most}")
    if grammar.startswith(DIRECTIVE):
        raise _invalid(structured, f"{DIRECTIVE}is reserved")
    return grammar


def _to_grammar(structured: StructuredOutput) -> str:
    text = structured.text
    match structured.kind:
        case ConstraintKind.JSON:
            return _lark(json_grammar.to_lark(exact_json.loads(text), _whitespace(structured)))
        case ConstraintKind.STRUCTURAL_TAG:
            return _lark(_structural_tag(exact_json.loads(text), _whitespace(structured)))
        case ConstraintKind.REGEX:
            if (len(text) - len(text.rstrip("\\"))) % 2:
                raise ValueError("the regex ends within an escape")  # the library would drop it
            return str(LLMatcher.grammar_from_regex(without_sets(text)))
        case ConstraintKind.CHOICE:
            # A terminal, so that the lexer handles it: a rule with thousands of choices would
            # exceed `max_items_in_row`.
            choices = map(json_strings.literal, json.loads(text))
            return _lark(f"start: TEXT\nTEXT: {' | '.join(choices)}")
        case ConstraintKind.GRAMMAR:
            if text.lstrip().startswith("{"):  # the library's own format
                raise ValueError("a grammar is GBNF, EBNF or Lark, not JSON")
            return _lark(lark_grammar.with_schemas(grammar_from("grammar", text)))


def _lark(text: str) -> str:
    return str(LLMatcher.grammar_from_lark(text))


def _whitespace(structured: StructuredOutput) -> str | None:
    """Returns the regex of white space between JSON tokens."""
    pattern = structured.whitespace_pattern
    if pattern is None and structured.any_whitespace:
        return COMPACT_WHITESPACE
    return pattern


def _structural_tag(given: dict[str, Any], whitespace: str | None) -> str:
    """Returns the grammar of free text with `structures`, each beginning with a trigger."""
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("a structural tag needs a list of structures and a list of triggers")
    lines = [f"start: ({' | '.join(f'tag{i}' for i in range(len(structures)))})* rest"]
    lines += ["rest: ANY", r"ANY: /(.|\n)*/", *json_grammar.separators(whitespace)]
    for number, each in enumerate(structures):
        lines += _tag(f"tag{number}", each, [text for text in triggers if text])
    return "\n".join([*lines, ""])


def _tag(name: str, structure: Any, triggers: Sequence[Any]) -> Iterator[str]:
    match structure:
        case {"begin": str(begin), "end": str(end), "schema": dict(schema)}:
            found = [each for each in triggers if isinstance(each, str) and begin.startswith(each)]
            if not found:
                raise ValueError(f"no trigger is the beginning of {begin[:64]!r}")
            made = json_grammar.JSONGrammar(schema, f"{name}j")
            trigger = f"ANY {found[0]}"  # a special token
            if not _SPECIAL.fullmatch(found[0]):
                trigger = f"{name}_trigger"
                yield f"{trigger}[lazy]: ANY {json_strings.literal(found[0])}"
            rest = json_strings.literal(begin.removeprefix(found[0]))
            yield f"{name}: {trigger} {rest} {made.start} {json_strings.literal(end)}"
            yield from made.rules()
        case _:
            raise ValueError("a structure needs the strings begin and end, and an object schema")


def check_grammar(structured: StructuredOutput, grammar: str, tokens: GrammarTokens) -> None:
    """Compiles the grammar as nodes will, up to the first token. A hostile grammar can take
    unlimited time and memory, or crash the process.

    Raises:
        InvalidRequest: the reason.
    """
    try:
        matcher = Matcher.compile(tokens, grammar)
        if not any(matcher.mask()) or (matcher.complete and not matcher.accepts):
            raise GrammarError(NO_TEXT)
    except GrammarError as error:
        raise _invalid(structured, str(error)) from error


def _invalid(structured: StructuredOutput, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"{structured.param} cannot be compiled: {message}"[: 2 * _MAX_MESSAGE],
        param=structured.param,
    )
