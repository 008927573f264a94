"""Steps tell what is new; ranks know the rest (`engine/test_engine_walks.py` compares them with the
engine), or say that they do not."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest
import torch

from one_group import one_group
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.core.errors import NodeError
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.messages import NewSequence, SequenceDelta, StepDelta
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence
from pdserve.common.worker.input_batch import BadWords, InputBatch

VOCAB, BLOCK_SIZE, EOS = 32, 4, 0
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1}


def rank(samples: bool = True) -> InputBatch:
    return InputBatch(BLOCK_SIZE, VOCAB, torch.device("cpu"), samples)


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
    delta = SequenceDelta(0, (1, 2, 3), 0, (0,), ((3,),), True, new)
    assert rank().apply(StepDelta(1, (delta,))).sequences[0].banned_token_ids == (4,)


def test_only_the_rank_that_samples_counts_tokens() -> None:
    new = NewSequence(SamplingParams(**PENALTIES), 2, 0, (), (1, 2))
    delta = StepDelta(1, (SequenceDelta(0, (1, 2), 0, (0,), ((3,),), True, new),))
    assert rank(samples=True).apply(delta).sequences[0].counts is not None
    assert rank(samples=False).apply(delta).sequences[0].counts is None


# ---- a rank that missed something ----


@pytest.mark.parametrize("number", [1, 3])
def test_a_rank_that_missed_a_step_or_got_one_twice_knows_it(number: int) -> None:
    known = rank()
    known.apply(StepDelta(1, (FIRST,)))
    with pytest.raises(
        NodeError, match=f"missed a step: step {number} came after step 1"
    ) as caught:
        known.apply(StepDelta(number, (FIRST,)))
    assert caught.value.code == "STEP_MISSED" and caught.value.retryable


NEW, COUNTED = (NewSequence(SamplingParams(**given), 4, 0) for given in ({}, PENALTIES))
FIRST = SequenceDelta(0, (1, 2, 3, 4), 0, (0,), ((7,),), True, NEW)


@pytest.mark.parametrize(
    ("wrong", "clue"),
    [
        (SequenceDelta(1, (5,), 4, (1,), ((8,),), True), "sequence 1 was never begun"),
        (SequenceDelta(0, (5,), 5, (1,), ((8,),), True), "begins at 5, the last ended at 4"),
        (SequenceDelta(0, (5,), 3, (1,), ((8,),), True), "begins at 3, the last ended at 4"),
        (SequenceDelta(0, (5,), 4, (2,), ((8,),), True), "it has 2 blocks, 1 are known"),
        (SequenceDelta(0, (5,), 4, (1,), ((),), True), "1 blocks do not hold 5 tokens"),
        (SequenceDelta(0, (5,), 4, (0,), ((1, 2),), True, COUNTED), "came without it"),
    ],
)
def test_steps_that_do_not_continue_are_refused(wrong: SequenceDelta, clue: str) -> None:
    known = rank()
    known.apply(StepDelta(1, (FIRST,)))
    with pytest.raises(NodeError, match=clue) as caught:
        known.apply(StepDelta(2, (wrong,)))
    assert caught.value.code == "STEP_MISSED"


def test_a_step_goes_on_where_drafts_were_right_and_no_further() -> None:
    for start, good in ((5, True), (7, True), (4, False), (8, False)):
        known = rank()
        known.apply(StepDelta(1, (FIRST,)))
        guessed = SequenceDelta(0, (5,), 4, (1,), ((8, 9),), True, drafts=(6, 7), num_drafts=2)
        (verified,) = known.apply(StepDelta(2, (guessed,))).sequences
        assert [row.token_ids for row in verified.rows] == [(5,), (5, 6), (5, 6, 7)]
        assert [row.drafts for row in verified.rows] == [(6, 7), (7,), ()]
        with nullcontext() if good else pytest.raises(NodeError, match="the last ended at 5"):
            known.apply(StepDelta(3, (SequenceDelta(0, (9,), start, (3,), ((),), True),)))


def test_an_ended_sequence_is_not_continued() -> None:
    known = rank()
    known.apply(StepDelta(1, (FIRST,)))
    with pytest.raises(NodeError, match="never begun"):
        known.apply(StepDelta(2, (SequenceDelta(0, (5,), 4, (1,), ((8,),), True),), ended=(0,)))
    assert len(known) == 0


# ---- what a step costs ----


def test_a_step_s_message_is_as_large_as_what_is_new() -> None:
    """16 sequences of 128k tokens, with penalties: first all that ranks must know, then a few
    bytes a token."""
    length = 128 * 1024
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)
    scheduler = Scheduler(one_group(16 * (length // 16 + 2), 16, False), config, (EOS,))
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
