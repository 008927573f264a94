"""Allows reasoning before the text of a grammar, or tool calls instead of it.

      ┌─── reasoning begins ───┐
    THOUGHT ── it ends ──▶ TEXT ── a call begins ──▶ CALL
                     (only before the text's first token)

Single tokens mark the transitions, as in vLLM; the grammar applies to the text after them. Where a
header says whether a message is reasoning, as in Harmony, the token that ends the header counts
only after the header's first tokens. Newlines between reasoning and text, which models usually
generate, are allowed and belong to neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum, auto

import msgspec

from pdserve.common.core.structured import Opening
from pdserve.common.text.grammar import DIRECTIVE, GrammarError, GrammarTokens, Matcher

_openings = msgspec.json.Decoder(Opening)


def opened(grammar: str, opening: Opening) -> str:
    """Returns the grammar of an answer with this opening, whose text matches `grammar`."""
    if opening == Opening():
        return grammar
    return f"{DIRECTIVE}{msgspec.json.encode(asdict(opening)).decode()}\n{grammar}"


def _split(grammar: str) -> tuple[Opening, str]:
    if not grammar.startswith(DIRECTIVE):
        return Opening(), grammar
    first, _, rest = grammar.removeprefix(DIRECTIVE).partition("\n")
    try:
        return _openings.decode(first), rest
    except msgspec.DecodeError as error:
        raise GrammarError(f"not an opening: {error}") from error


MAX_NEWLINES = 2  # tokens, each of one or two newlines


class _Stage(Enum):
    THOUGHT = auto()
    CALL = auto()
    TEXT = auto()


class AnswerMatcher:
    """Like `Matcher`, for an answer with an opening."""

    def __init__(self, tokens: GrammarTokens, text: Matcher, opening: Opening) -> None:
        self._tokens = tokens
        self._text = text
        self._opening = opening
        self._stage = _Stage.THOUGHT if opening.thinking else _Stage.TEXT
        self._begins = {} if opening.call is None else {opening.call: _Stage.CALL}
        if opening.thought is not None and not opening.thinking:
            self._begins[opening.thought[0]] = _Stage.THOUGHT
        self._newlines = 0  # newline tokens that may follow
        self._headed = 0  # tokens of the heading seen so far

    @classmethod
    def compile(cls, tokens: GrammarTokens, grammar: str) -> AnswerMatcher:
        """Compiles a grammar of `opened`; raises like `Matcher.compile`."""
        opening, grammar = _split(grammar)
        call = [] if opening.call is None else [opening.call]
        named = [*(opening.thought or ()), *opening.heading, *call]
        if not all(0 <= token < tokens.vocab_size for token in named):
            raise GrammarError("its opening has a token outside the vocabulary")
        return cls(tokens, Matcher.compile(tokens, grammar), opening)

    def copy(self) -> AnswerMatcher:
        """Like `Matcher.copy`."""
        copied = AnswerMatcher(self._tokens, self._text.copy(), self._opening)
        copied._stage, copied._begins = self._stage, dict(self._begins)
        copied._newlines, copied._headed = self._newlines, self._headed
        return copied

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow; valid after a mask."""
        return self._stage is _Stage.TEXT and not self._begins and self._text.complete

    def advance(self, token_ids: Sequence[int]) -> None:
        """Like `Matcher.advance`."""
        for place, token_id in enumerate(token_ids):
            if not self._opens(token_id):
                self._stage, self._begins, self._newlines = _Stage.TEXT, {}, 0
                self._text.advance(token_ids[place:])
                return

    def _opens(self, token_id: int) -> bool:
        """Consumes the token if it is part of the opening; returns whether it was."""
        if token_id in self._tokens.eos_token_ids:
            return False
        if self._stage is _Stage.THOUGHT:
            if self._ends_thought(token_id):
                self._stage, self._newlines = _Stage.TEXT, MAX_NEWLINES
        elif self._stage is _Stage.TEXT:
            if self._newlines and token_id in self._tokens.newlines:
                self._newlines -= 1
            elif token_id in self._begins:
                self._stage = self._begins.pop(token_id)
            else:
                return False
        return True

    def _ends_thought(self, token_id: int) -> bool:
        opening, headed = self._opening, self._headed
        heading = opening.heading
        if headed < len(heading):
            self._headed = headed + 1 if token_id == heading[headed] else 0
        if heading and token_id == heading[0]:
            self._headed = 1
        whole = headed == len(heading)
        return opening.thought is not None and token_id == opening.thought[1] and whole

    def mask(self) -> bytes:
        """Like `Matcher.mask`. Reasoning must end before the answer does."""
        if self._stage is _Stage.THOUGHT:
            return self._tokens.all_but_ends
        if self._stage is _Stage.CALL:
            return self._tokens.all
        mask = self._text.mask()
        others = [*self._begins, *(self._tokens.newlines if self._newlines else ())]
        if not others:
            return mask
        begins = int.from_bytes(self._tokens.bits(others), "little")
        return (int.from_bytes(mask, "little") | begins).to_bytes(len(mask), "little")
