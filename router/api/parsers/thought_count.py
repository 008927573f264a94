"""Counts the tokens of an answer's thought, for its usage.

The marks of a thought are mostly tokens of their own: then the tokens between them are counted, as
the model drew them, without the marks. Otherwise the text of the thought is encoded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.common.config.router import HARMONY
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.parsers.harmony import CALL, CHANNEL, END, MESSAGE, RETURN, START
from pdserve.router.api.parsers.parser import Event, Reasoning
from pdserve.router.api.parsers.reasoning import FAMILIES


@dataclass(frozen=True, slots=True)
class _Marks:
    begins: tuple[tuple[int, ...], ...]  # any of these runs of tokens begins a thought
    ends: frozenset[int]
    again: bool  # there may be several thoughts


def _marks(family: str, tokenizer: Tokenizer) -> _Marks | None:
    """Returns the tokens around a thought; None: its end is no token."""
    if family == HARMONY:
        words = tokenizer.encode("analysis", add_special_tokens=False)
        begin = (tokenizer.marker(CHANNEL), *words, tokenizer.marker(MESSAGE))
        begins: list[tuple[int | None, ...]] = [begin]
        ends: tuple[str, ...] = (END, RETURN, CALL, START, CHANNEL)
    else:
        thought = FAMILIES[family]
        begins = [(tokenizer.marker(mark.strip()),) for mark in thought.begins]
        ends = (*thought.ends, *thought.ended_by)
    found = frozenset(token for mark in ends if (token := tokenizer.marker(mark)) is not None)
    runs = tuple(tuple(x for x in run if x is not None) for run in begins if None not in run)
    eos = frozenset(tokenizer.eos_token_ids)
    return _Marks(runs, found | eos, family == HARMONY) if found else None


class ThoughtCount:
    """Counts one choice's tokens."""

    def __init__(self, family: str | None, tokenizer: Tokenizer, thinking: bool) -> None:
        """`family`: None: it has no thought. `thinking`: it begins within one."""
        self._tokenizer = tokenizer
        self._marks = None if family is None else _marks(family, tokenizer)
        self._inside = thinking and family != HARMONY
        self._ended = False
        self._last: tuple[int, ...] = ()  # tokens that may begin a thought
        self._count = 0
        self._text: list[str] = []  # of the thought, if it has no marks

    @property
    def tokens(self) -> int:
        if self._marks is None and self._text:
            return len(self._tokenizer.encode("".join(self._text), add_special_tokens=False))
        return self._count

    def add(self, token_ids: Iterable[int], events: Iterable[Event]) -> None:
        """Takes the tokens of a delta, and the events that were parsed from its text."""
        if self._marks is None:
            self._text += [event.text for event in events if isinstance(event, Reasoning)]
            return
        for token_id in token_ids:
            if self._ended:
                return
            self._step(self._marks, token_id)

    def _step(self, marks: _Marks, token_id: int) -> None:
        if self._inside:
            self._inside = token_id not in marks.ends
            self._count += self._inside
            self._ended = not (self._inside or marks.again)
            return
        self._last = (*self._last, token_id)[-8:]
        if any(self._last[-len(run) :] == run for run in marks.begins):
            self._inside, self._last = True, ()
        elif not marks.again:  # a thought comes first, or not at all
            self._ended = bool(self._tokenizer.token_text(token_id).strip())
