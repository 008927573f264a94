"""Grammars on the rank that draws: compiled beside the steps, masks within a budget, rows that are
deferred. What a sampler makes of a mask is in `test_sampler.py`."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch

from pdserve.common.core.errors import ConfigError
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.core.structured import ConstraintKind, StructuredOutput
from pdserve.common.engine.messages import NewSequence, SequenceDelta, StepDelta
from pdserve.common.text.grammar import GrammarError, GrammarTokens, Matcher, to_grammar
from pdserve.common.text.opening import AnswerMatcher
from pdserve.common.worker import grammar as rank_grammar
from pdserve.common.worker import masks
from pdserve.common.worker.grammar import MAX_COMPILED, Grammars, Mask, RowGrammar
from pdserve.common.worker.input_batch import InputBatch, StepSequence
from pdserve.common.worker.masks import MaskScheduler
from pdserve.common.worker.sampler import FailedRow, sample

VOCAB, EOS = 512, (0, 2)
LOGITS = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))


def regex(pattern: str) -> str:
    return to_grammar(StructuredOutput(ConstraintKind.REGEX, pattern))


@pytest.fixture
def grammars(tokens: GrammarTokens) -> Grammars:
    return Grammars(lambda: tokens)


def row(grammar: RowGrammar | None = None, seq_id: int = 1, **params: object) -> StepSequence:
    sampling = SamplingParams(**{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return StepSequence(seq_id, (5,), 7, (0,), sampling, grammar=grammar)


def ready(grammars: Grammars, pattern: str) -> RowGrammar:
    made = grammars.begin(regex(pattern))
    assert made.waits_for is not None
    made.waits_for.exception(timeout=120)
    return made


def text_of(tokens: GrammarTokens, token: int) -> str:
    return str(tokens.library.decode_str([token]))


# ---- a sequence's grammar ----


def test_grammars_used_last_are_kept(grammars: Grammars, tokens: GrammarTokens) -> None:
    first = grammars.get(regex("a"))
    assert grammars.get(regex("a")) is first
    for number in range(MAX_COMPILED):
        grammars.get(regex(f"b{number}"))
    assert grammars.get(regex("a")) is not first


def test_one_that_could_not_be_compiled_is_tried_again(tokens: GrammarTokens) -> None:
    answers = [ConfigError("no tokenizer here"), tokens]

    def load() -> GrammarTokens:
        answer = answers.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    grammars = Grammars(load)
    (failed,) = MaskScheduler().take([row(ready(grammars, "a"))], alone=True)[0].values()
    assert isinstance(failed, FailedRow) and "no tokenizer here" in failed.reason
    assert not failed.forbidden, "the node's fault"
    (good,) = MaskScheduler().take([row(ready(grammars, "a"))], alone=True)[0].values()
    assert isinstance(good, StepSequence)


def test_grammars_of_clients_that_left_are_not_compiled(tokens: GrammarTokens) -> None:
    """The grammars are of clients that have left: there is one thread for all."""
    at_work, go, compiled = Event(), Event(), []

    class Watched(Grammars):
        def _compile(self, grammar: str) -> AnswerMatcher:
            at_work.set()
            assert go.wait(30)
            compiled.append(grammar)
            return super()._compile(grammar)

    grammars = Watched(lambda: tokens)
    batch = InputBatch(4, VOCAB, torch.device("cpu"), samples=True, grammars=grammars)
    patterns = ["begun", "a", "b", "b", "a"]
    new = [
        NewSequence(SamplingParams(grammar=regex(each)), 1, seed=0, history=(5,))
        for each in patterns
    ]
    begin = [SequenceDelta(i, (5,), 0, (0,), ((i,),), True, each) for i, each in enumerate(new)]
    batch.apply(StepDelta(1, tuple(begin)))
    assert at_work.wait(30)  # what has begun is not taken back
    (again,) = batch.apply(
        StepDelta(2, (replace(begin[1], seq_id=9),), ended=(0, 1, 2, 4))
    ).sequences
    batch.apply(StepDelta(3, (), ended=(3,)))
    go.set()
    assert again.grammar is not None and again.grammar.waits_for is not None
    again.grammar.waits_for.result(timeout=120)
    assert compiled == [regex("begun"), regex("a")]
    grammars.close()


def test_sequences_share_what_is_compiled_but_not_where_they_are(
    grammars: Grammars, tokens: GrammarTokens
) -> None:
    one, two = ready(grammars, "ab"), ready(grammars, "ab")
    (a,) = tokens.library.tokenize_str("a")
    before = two.mask()
    one.advance([a])
    assert before is not None and (one.mask() != before).any()
    assert (two.mask() == before).all()


def test_an_evicted_grammar_is_compiled_again(
    grammars: Grammars, tokens: GrammarTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matcher of a sequence fails where one that is compiled for it alone does not."""
    a = tokens.library.tokenize_str("a")
    mine = ready(grammars, "a{3,9}")
    shared = grammars.get(regex("a{3,9}"))
    mine.advance(a)
    expected = Matcher.compile(tokens, regex("a{3,9}"))
    expected.advance(a)
    mask = Matcher.mask
    failures = iter([GrammarError("lexer error: too many states")])

    def fail_once(self: Matcher) -> bytes:
        for failure in failures:
            raise failure
        return mask(self)

    monkeypatch.setattr(Matcher, "mask", fail_once)
    assert mine.mask() is None
    assert grammars.get(regex("a{3,9}")) is not shared, "others begin anew, too"
    assert mine.waits_for is not None
    mine.waits_for.result(timeout=120)
    again = mine.mask()
    assert again is not None and again.tobytes() == mask(expected)
    assert mine.seconds > rank_grammar.RENEWAL


def test_one_that_fails_by_itself_has_failed(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ready(grammars, "a{3,9}")
    monkeypatch.setattr(Matcher, "mask", lambda self: (_ for _ in ()).throw(GrammarError("boom")))
    assert mine.mask() is None
    assert mine.waits_for is not None
    mine.waits_for.result(timeout=120)
    with pytest.raises(GrammarError, match="boom"):
        mine.mask()


def test_tokens_that_are_not_its_end_a_row(grammars: Grammars, tokens: GrammarTokens) -> None:
    """They are of a node with another tokenizer."""
    mine = ready(grammars, "ab")
    mine.advance(tokens.library.tokenize_str("x"))
    assert MaskScheduler().take([row(mine)], alone=True) == ({}, [1])
    assert mine.waits_for is not None
    mine.waits_for.exception(timeout=120)
    (failed,) = MaskScheduler().take([row(mine)], alone=True)[0].values()
    assert isinstance(failed, FailedRow) and failed.forbidden


def test_rows_that_cannot_be_deferred_are_waited_for(
    grammars: Grammars, tokens: GrammarTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is compiled, replayed in pieces, or slow, and whatever else is in the step."""
    time = itertools.count(0.0, 0.4 * rank_grammar.REPLAY)
    compiled, fresh = ready(grammars, "(ab)*"), grammars.begin(regex("cd"))
    monkeypatch.setattr(rank_grammar, "thread_time", lambda: next(time))
    a, b = tokens.library.tokenize_str("a") + tokens.library.tokenize_str("b")
    compiled.advance([a, b] * 8 * rank_grammar.PIECE + [a])
    rows = [row(seq_id=1), row(compiled, seq_id=2), row(fresh, seq_id=3)]
    done, deferred = MaskScheduler(defers=False).take(rows, alone=False)
    assert (list(done), deferred) == ([0, 1, 2], [])
    assert all(isinstance(each, StepSequence) for each in done.values())


def test_a_long_output_is_replayed_in_pieces(
    grammars: Grammars, tokens: GrammarTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is of before a preemption, or of another node: its tokens may take a millisecond
    each."""
    time = itertools.count(0.0, 0.4 * rank_grammar.REPLAY)
    monkeypatch.setattr(rank_grammar, "thread_time", lambda: next(time))
    mine, short = ready(grammars, "(ab)*"), ready(grammars, "(ab)*")
    a, b = tokens.library.tokenize_str("a") + tokens.library.tokenize_str("b")
    mine.advance([a, b] * 8 * rank_grammar.PIECE + [a])
    short.advance([a])
    deferred = 0
    while (mask := mine.mask()) is None:
        assert mine.waits_for is None and mine.last_seconds > masks.SLOW
        deferred += 1
    expected = short.mask()
    assert expected is not None and (mask == expected).all()
    assert deferred == 8, "two pieces a step"
    assert mine.seconds == pytest.approx(short.seconds), "a replay does not count"


def test_masks_have_an_allowance(grammars: Grammars) -> None:
    mine = ready(grammars, "a*")
    mine.seconds = rank_grammar.ALLOWANCE + 0.001
    with pytest.raises(GrammarError, match="too complex"):
        mine.mask()
    mine.seconds = rank_grammar.ALLOWANCE - 0.001
    assert mine.mask() is not None


# ---- a step's rows ----


def test_a_step_without_other_rows_waits_a_little(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others do not wait for what is not ready."""
    answer: Future[Matcher] = Future()
    monkeypatch.setattr(Grammars, "get", lambda *_: answer)
    waiting = grammars.begin(regex("a"))
    monkeypatch.undo()
    waits: list[object] = []

    def compiled_meanwhile(futures: list[Future[Matcher]], **options: object) -> None:
        waits.append(futures)
        answer.set_result(grammars.get(regex("a")).result())

    monkeypatch.setattr(masks, "wait", compiled_meanwhile)
    free, good = row(seq_id=1), row(ready(grammars, "b"), seq_id=3)
    done, deferred = MaskScheduler().take([free, row(waiting, seq_id=2), good], alone=True)
    assert (list(done), deferred) == ([0, 2], [2]) and done[0] is free
    assert isinstance(done[2], StepSequence) and done[2].mask is not None
    assert MaskScheduler().take([row(waiting)], alone=False)[1] == [1]
    assert not waits
    assert MaskScheduler().take([row(waiting)], alone=True)[1] == []
    assert waits == [[answer]]


class Timed(RowGrammar):
    """A grammar each of whose masks takes so many seconds; no others go by."""

    time = 0.0

    def __init__(self, seconds: float) -> None:
        self.takes = seconds
        self.seconds = self.last_seconds = 0.0
        self.masks = 0

    waits_for = None
    complete = False

    def mask(self) -> Mask:
        Timed.time += self.takes
        self.last_seconds = self.takes
        self.seconds += self.takes
        self.masks += 1
        return np.full(16, -1, np.int32)


def run_turns(grammars: list[Timed], steps: int, step_seconds: float = 0.001) -> float:
    """How long the longest step was, beside a row without a grammar."""
    turns = MaskScheduler(lambda: Timed.time)
    rows = [row(seq_id=0), *(row(each, 1 + i) for i, each in enumerate(grammars))]
    longest = 0.0
    for _ in range(steps):
        start = Timed.time
        done, deferred = turns.take(rows, alone=True)
        assert len(done) + len(deferred) == len(rows) and 0 in done
        longest = max(longest, Timed.time - start)
        Timed.time += step_seconds
    return longest


def test_dear_masks_slow_others_by_a_third_at_most() -> None:
    dear, cheap = [Timed(0.008) for _ in range(5)], [Timed(0.000_03) for _ in range(60)]
    for each in dear:
        each.last_seconds = each.takes
    begin = Timed.time
    assert run_turns([*dear, *cheap], 1000) < 0.008 + 60 * 0.000_03 + 0.000_01
    taken = [each.masks for each in dear]
    assert [each.masks for each in cheap] == [1000] * 60, "they are in every step"
    assert max(taken) - min(taken) <= 1, "they take turns"
    assert sum(each.seconds for each in dear) < (Timed.time - begin) / 4 + 0.008


def test_masks_of_many_fit_a_step_or_come_later() -> None:
    many = [Timed(0.000_9) for _ in range(30)]
    assert run_turns(many, 300) < 0.005 + 31 * 0.000_05 + 0.000_91
    assert max(each.masks for each in many) - min(each.masks for each in many) <= 1


def test_dear_ones_among_themselves_wait_for_no_turn() -> None:
    turns = MaskScheduler(lambda: Timed.time)
    rows = [row(Timed(0.008), 1), row(Timed(0.008), 2)]
    for _ in range(20):
        turns.take(rows, alone=True)
    assert [each.grammar.masks for each in rows] == [10, 10]  # type: ignore[union-attr]


# ---- the end ----


def test_min_tokens_yields_to_a_text_that_is_whole(
    grammars: Grammars, tokens: GrammarTokens
) -> None:
    mine = ready(grammars, "ab?")
    banned = replace(row(mine), banned_token_ids=EOS)
    mine.advance(tokens.library.tokenize_str("a"))
    done, _ = MaskScheduler().take([banned], alone=True)
    assert done[0] == replace(banned, mask=done[0].mask)  # type: ignore[union-attr]
    (token,) = sample(LOGITS[:1], [done[0]]).results()  # type: ignore[list-item]
    assert not isinstance(token, FailedRow) and text_of(tokens, token.token_id) == "b"
    mine.advance([token.token_id])
    done, _ = MaskScheduler().take([banned], alone=True)
    (token,) = sample(LOGITS[:1], [done[0]]).results()  # type: ignore[list-item]
    assert not isinstance(token, FailedRow) and token.token_id in EOS
