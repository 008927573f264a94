"""Steps tell what is new; ranks know the rest, or say that they do not."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import pytest
import torch

from pdserve.common.config.node import SchedulerConfig
from pdserve.common.core.errors import NodeError
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.messages import NewSequence, SequenceDelta, StepDelta
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence
from pdserve.common.worker.input_batch import BadWords, InputBatch, StepSequence

VOCAB, BLOCK_SIZE, EOS = 32, 4, 0
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}


def rank(samples: bool = True) -> InputBatch:
    return InputBatch(BLOCK_SIZE, VOCAB, torch.device("cpu"), samples)


def over_the_wire(delta: StepDelta) -> StepDelta:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=StepDelta)


# ---- what ranks make of it is what the scheduler knows ----


class Life:
    """Random arrivals and ends on a pool that is far too small; tokens are drawn at random."""

    def __init__(self, seed: str, stages: int) -> None:
        self.rng = random.Random(seed)
        self.stages = stages
        config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=8)
        self.scheduler = Scheduler(BlockPool(12, BLOCK_SIZE), config, (EOS,), stages)
        self.coming = [self._sequence(seq_id) for seq_id in range(24)]
        self.ends = {
            each.seq_id: each.num_tokens + self.rng.randrange(1, 28) for each in self.coming
        }
        self.flights: deque[StepDelta] = deque()

    def _sequence(self, seq_id: int) -> Sequence:
        rng = self.rng
        tokens = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 20))]
        penalties = PENALTIES if rng.random() < 0.5 else {}
        words = [tuple(rng.choices(range(VOCAB), k=n)) for n in (1, 2, 2, 3) for _ in range(50)]
        params = SamplingParams(
            min_tokens=rng.randrange(4), stop_token_ids=(5,), seed=rng.randrange(99), **penalties,
            bad_words_token_ids=tuple(words[50 : 50 * rng.randrange(5)]),
        )  # fmt: skip
        begun = rng.randrange(len(tokens))  # tokens that another node drew
        remote = rng.random() < 0.3
        return Sequence(seq_id, params, tokens, len(tokens) - begun, seq_id % 3, remote)

    def steps(self) -> Iterator[tuple[StepDelta, dict[int, Sequence]]]:
        """Each step as it begins, with the sequences that run then."""
        scheduler = self.scheduler
        while self.coming or scheduler.waiting or scheduler.running or scheduler.remote:
            if self.coming and self.rng.random() < 0.3:
                scheduler.add(self.coming.pop())
            scheduler.admit()
            if scheduler.remote and self.rng.random() < 0.5:
                scheduler.activate(next(iter(scheduler.remote)), self._token())
            delta = scheduler.schedule() if len(self.flights) < self.stages else None
            if delta is not None:
                self.flights.append(delta)
                yield delta, {each.seq_id: each for each in scheduler.running}
            elif self.flights:
                self._land(self.flights.popleft())
            for each in list(scheduler.running):
                if not each.in_flight and each.num_tokens >= self.ends[each.seq_id]:
                    scheduler.release(each)

    def _land(self, delta: StepDelta) -> None:
        running = {each.seq_id: each for each in self.scheduler.running}
        for entry in delta.sequences:
            if entry.samples and self.rng.random() < 0.2:
                self.scheduler.defer(running[entry.seq_id], len(entry.token_ids))
                continue
            self.scheduler.computed(running[entry.seq_id], len(entry.token_ids))
            if entry.samples:
                running[entry.seq_id].append(self._token())

    def _token(self) -> SampledToken:
        return SampledToken(self.rng.randrange(1, VOCAB))


def check(entry: StepSequence, sequence: Sequence) -> None:
    """It is what a message that names everything would say."""
    params, end = sequence.sampling, entry.start + len(entry.token_ids)
    assert list(entry.block_table) == sequence.block_table
    assert list(entry.token_ids) == sequence.token_ids[entry.start : end]
    assert entry.seed == params.seed + sequence.choice
    if end < sequence.num_tokens:
        assert entry.sampling is None and entry.banned_token_ids == ()
        return
    assert entry.sampling == params
    may_end = sequence.num_output_tokens >= params.min_tokens
    ends = () if may_end else (EOS, 5)
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    completing = completions(params.bad_words_token_ids, output)
    assert entry.banned_token_ids[: len(ends)] == ends
    assert set(entry.banned_token_ids[len(ends) :]) == completing
    assert (entry.counts is not None) == params.penalised
    if entry.counts is not None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        counted = Counter(output)
        assert entry.counts.prompt.nonzero().flatten().tolist() == sorted(set(prompt))
        assert entry.counts.output.tolist() == [counted[token] for token in range(VOCAB)]


def completions(words: tuple[tuple[int, ...], ...], output: list[int]) -> set[int]:
    """The last tokens of those words whose others the output ends with."""
    whole = tuple(output)
    return {
        w[-1]
        for w in words
        if len(w) <= len(whole) + 1 and whole[len(whole) + 1 - len(w) :] == w[:-1]
    }


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_knows_what_the_scheduler_knows(stages: int, seed: int) -> None:
    """Through admissions, preemptions, KV from elsewhere, several steps in flight and rows that are
    deferred."""
    life, known = Life(f"{seed} {stages}", stages), rank()
    for delta, running in life.steps():
        for entry in known.apply(over_the_wire(delta)).sequences:
            check(entry, running[entry.seq_id])
        assert len(known) <= len(running), "it forgets what has ended"
    assert life.scheduler.pool.num_free == 12


def test_words_are_completed_by_the_output_alone() -> None:
    words = BadWords([(1,), (2, 3), (4, 5, 6), (5, 7), (8, 8, 8)])
    assert words.banned() == (1,)
    said = [(4, {1}), (5, {1, 6, 7}), (2, {1, 3}), (8, {1}), (8, {1, 8}), (2, {1, 3})]
    for token, banned in said:
        words.add((token,))
        assert set(words.banned()) == banned
    words.add((9, 9, 4, 5))
    assert set(words.banned()) == {1, 6, 7}
    new = NewSequence(SamplingParams(bad_words_token_ids=((2, 9), (3, 4))), 2, 0, (), (1, 2, 3))
    delta = SequenceDelta(0, (1, 2, 3), 0, 0, (3,), True, new)
    assert rank().apply(StepDelta(1, (delta,))).sequences[0].banned_token_ids == (4,)


def test_only_the_rank_that_samples_counts_tokens() -> None:
    new = NewSequence(SamplingParams(**PENALTIES), 2, 0, (), (1, 2))
    delta = StepDelta(1, (SequenceDelta(0, (1, 2), 0, 0, (3,), True, new),))
    assert rank(samples=True).apply(delta).sequences[0].counts is not None
    assert rank(samples=False).apply(delta).sequences[0].counts is None


# ---- a rank that missed something ----


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_missed_a_step_knows_it(stages: int) -> None:
    deltas = [delta for delta, _ in Life(f"missed {stages}", stages).steps()]
    for missing in range(len(deltas) - 1):
        known = rank()
        for delta in deltas[:missing]:
            known.apply(delta)
        with pytest.raises(NodeError, match="missed a step") as caught:
            known.apply(deltas[missing + 1])
        assert caught.value.code == "STEP_MISSED" and caught.value.retryable


def test_a_step_that_comes_twice_is_refused() -> None:
    known = rank()
    known.apply(StepDelta(1, (FIRST,)))
    with pytest.raises(NodeError, match="step 1 came after step 1"):
        known.apply(StepDelta(1, (FIRST,)))


NEW, COUNTED = (NewSequence(SamplingParams(**given), 4, 0) for given in ({}, PENALTIES))
FIRST = SequenceDelta(0, (1, 2, 3, 4), 0, 0, (7,), True, NEW)


@pytest.mark.parametrize(
    ("wrong", "clue"),
    [
        (SequenceDelta(1, (5,), 4, 1, (8,), True), "sequence 1 was never begun"),
        (SequenceDelta(0, (5,), 5, 1, (8,), True), "begins at 5, the last ended at 4"),
        (SequenceDelta(0, (5,), 3, 1, (8,), True), "begins at 3, the last ended at 4"),
        (SequenceDelta(0, (5,), 4, 2, (8,), True), "it has 2 blocks, 1 are known"),
        (SequenceDelta(0, (5,), 4, 1, (), True), "1 blocks do not hold 5 tokens"),
        (SequenceDelta(0, (5,), 4, 0, (1, 2), True, COUNTED), "came without it"),
    ],
)
def test_what_does_not_continue_is_refused(wrong: SequenceDelta, clue: str) -> None:
    known = rank()
    known.apply(StepDelta(1, (FIRST,)))
    with pytest.raises(NodeError, match=clue) as caught:
        known.apply(StepDelta(2, (wrong,)))
    assert caught.value.code == "STEP_MISSED"


def test_a_step_goes_on_where_drafts_were_right_and_no_further() -> None:
    for start, good in ((5, True), (7, True), (4, False), (8, False)):
        known = rank()
        known.apply(StepDelta(1, (FIRST,)))
        guessed = SequenceDelta(0, (5,), 4, 1, (8, 9), True, drafts=(6, 7), num_drafts=2)
        (verified,) = known.apply(StepDelta(2, (guessed,))).sequences
        assert [row.token_ids for row in verified.rows] == [(5,), (5, 6), (5, 6, 7)]
        assert [row.drafts for row in verified.rows] == [(6, 7), (7,), ()]
        with nullcontext() if good else pytest.raises(NodeError, match="the last ended at 5"):
            known.apply(StepDelta(3, (SequenceDelta(0, (9,), start, 3, (), True),)))


def test_what_has_ended_is_not_continued() -> None:
    known = rank()
    known.apply(StepDelta(1, (FIRST,)))
    with pytest.raises(NodeError, match="never begun"):
        known.apply(StepDelta(2, (SequenceDelta(0, (5,), 4, 1, (8,), True),), ended=(0,)))
    assert len(known) == 0


# ---- what a step costs ----


def test_a_step_s_message_is_as_large_as_what_is_new() -> None:
    """16 sequences of 128k tokens, with penalties: first all that ranks must know, then a few
    bytes a token."""
    length = 128 * 1024
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)
    scheduler = Scheduler(BlockPool(16 * (length // 16 + 2), 16, False), config, (EOS,))
    for seq_id in range(16):
        params = SamplingParams(
            **PENALTIES, min_tokens=99, logit_bias=dict.fromkeys(range(300), 1.0),
            allowed_token_ids=tuple(range(300)), bad_words_token_ids=((7, 8, 9),) * 256,
        )  # fmt: skip
        sequence = Sequence(seq_id, params, [7] * length, length, remote=True)
        scheduler.add(sequence)
        scheduler.admit()
        scheduler.activate(sequence, SampledToken(7))
    sizes = []
    for _ in range(20):
        delta = scheduler.schedule()
        assert delta is not None and len(delta.sequences) == 16
        sizes.append(len(msgspec.msgpack.encode(delta)))
        for sequence in scheduler.running:
            scheduler.computed(sequence, 1)
            sequence.append(SampledToken(7))
    assert sizes[0] > 16 * length
    assert max(sizes[1:]) < 16 * 128
