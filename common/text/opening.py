"""What may come before the text that a grammar is of, or instead of it: a thought, or tool calls.

      ┌─── a thought begins ───┐
    THOUGHT ── it ends ──▶ TEXT ── a call begins ──▶ CALL
                     (only before the text's first token)

Single tokens tell them apart, as in vLLM: a text of the grammar is what stands after them. Between
thought and text there may be the newlines that models are used to; they are part of neither.
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
    """The grammar of an answer whose text, if there is one, is of this one."""
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


MAX_NEWLINES = 2  # tokens of one or two


class _Stage(Enum):
    THOUGHT = auto()
    CALL = auto()
    TEXT = auto()


class AnswerMatcher:
    """An answer in the making, as `Matcher` is its text."""

    def __init__(self, tokens: GrammarTokens, text: Matcher, opening: Opening) -> None:
        self._tokens = tokens
        self._text = text
        self._opening = opening
        self._stage = _Stage.THOUGHT if opening.thinking else _Stage.TEXT
        self._begins = {} if opening.call is None else {opening.call: _Stage.CALL}
        if opening.thought is not None and not opening.thinking:
            self._begins[opening.thought[0]] = _Stage.THOUGHT
        self._newlines = 0  # that may come

    @classmethod
    def compile(cls, tokens: GrammarTokens, grammar: str) -> AnswerMatcher:
        """Of what `opened` says, at its beginning; raises as `Matcher.compile`."""
        opening, grammar = _split(grammar)
        named = [*(opening.thought or ()), *([] if opening.call is None else [opening.call])]
        if not all(0 <= token < tokens.vocab_size for token in named):
            raise GrammarError("its opening names a token that the model does not have")
        return cls(tokens, Matcher.compile(tokens, grammar), opening)

    def copy(self) -> AnswerMatcher:
        """Another answer, where this one is now; as `Matcher.copy`."""
        copied = AnswerMatcher(self._tokens, self._text.copy(), self._opening)
        copied._stage, copied._begins = self._stage, dict(self._begins)
        copied._newlines = self._newlines
        return copied

    @property
    def complete(self) -> bool:
        """Nothing but an end token may come. Known once there is a mask."""
        return self._stage is _Stage.TEXT and not self._begins and self._text.complete

    def advance(self, token_ids: Sequence[int]) -> None:
        """As `Matcher.advance`."""
        for place, token_id in enumerate(token_ids):
            if not self._opens(token_id):
                self._stage, self._begins, self._newlines = _Stage.TEXT, {}, 0
                self._text.advance(token_ids[place:])
                return

    def _opens(self, token_id: int) -> bool:
        """Whether it is still part of the opening, as which it then counts."""
        if token_id in self._tokens.eos_token_ids:
            return False
        if self._stage is _Stage.THOUGHT:
            if self._opening.thought is not None and token_id == self._opening.thought[1]:
                self._stage, self._newlines = _Stage.TEXT, MAX_NEWLINES
        elif self._stage is _Stage.TEXT:
            if self._newlines and token_id in self._tokens.newlines:
                self._newlines -= 1
            elif token_id in self._begins:
                self._stage = self._begins.pop(token_id)
            else:
                return False
        return True

    def mask(self) -> bytes:
        """As `Matcher.mask`. A thought ends before the answer does."""
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
