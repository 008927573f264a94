"""Deltas that are held back, and when they are not."""

from __future__ import annotations

import pytest

from pdserve.common.core.request import FinishReason
from pdserve.common.core.sampling import SampledToken
from pdserve.router.requests.generation import Replayed, TextDelta, Update
from pdserve.router.requests.spacing import spaced


def delta(text: str, choice: int = 0, last: bool = False) -> TextDelta:
    reason = FinishReason.LENGTH if last else None
    return TextDelta(choice, text, tuple(SampledToken(1) for _ in text), reason)


def texts(updates: list[Update]) -> list[str]:
    return [each.text for each in updates if isinstance(each, TextDelta)]


def test_the_first_token_comes_at_once_then_as_many_as_the_interval_then_the_last() -> None:
    got: list[Update] = []
    with spaced(got.append, 3) as put:
        put(Replayed(()))
        for letter in "abcdefghi":
            put(delta(letter))
        put(delta("j", last=True))
    assert isinstance(got[0], Replayed) and texts(got) == ["a", "bcd", "efg", "hij"]
    last = got[-1]
    assert isinstance(last, TextDelta) and last.finish_reason is FinishReason.LENGTH


def test_choices_wait_each_for_themselves_and_large_deltas_not_at_all() -> None:
    got: list[Update] = []
    with spaced(got.append, 3) as put:
        for text, choice in (("a", 0), ("x", 1), ("b", 0), ("yzw", 1), ("cd", 0)):
            put(delta(text, choice))
        put(delta("", 0, last=True))
        put(delta("v", 1, last=True))
    assert texts(got) == ["a", "x", "yzw", "bcd", "", "v"]


def test_a_failure_comes_after_the_tokens_before_it() -> None:
    got: list[Update] = []
    with pytest.raises(ValueError), spaced(got.append, 100) as put:
        put(delta("a"))
        put(delta("b"))
        raise ValueError
    assert texts(got) == ["a", "b"]
