"""Guesses: whose turn it is to be guessed, how much, where they go, and what becomes of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from one_group import one_group
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.config.sources import parse
from pdserve.common.config.speculation import Speculation
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.block_pool import BlockPool
from pdserve.common.engine.draft_model import DraftModel
from pdserve.common.engine.messages import SequenceDelta
from pdserve.common.engine.ngram import INDEXED_AT_ONCE, NGramIndex, PromptLookup
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence

# ---- the option ----


def parsed(**given: Any) -> WorkerNodeConfig:
    argv = ["--speculative-config", json.dumps(given)]
    return parse(WorkerNodeConfig, prog="pdserve test", argv=argv, environ={})


NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_defaults_are_as_in_vllm(given: dict[str, Any], found: tuple[int, int]) -> None:
    speculation = parsed(**NGRAM, **given).engine.speculation.speculation
    assert speculation is not None
    assert (speculation.prompt_lookup_min, speculation.prompt_lookup_max) == found


@pytest.mark.parametrize(
    ("given", "clue"),
    [
        ({"num_speculative_tokens": 4}, "method must be one of ngram, draft_model"),
        (NGRAM | {"method": "eagle"}, "method must be one of"),
        (NGRAM | {"method": ["ngram"]}, "method must be one of"),
        ({"method": "ngram"}, "num_speculative_tokens must be a whole number"),
        (NGRAM | {"num_speculative_tokens": 0}, "from 1 to 32"),
        (NGRAM | {"num_speculative_tokens": True}, "from 1 to 32"),
        (NGRAM | {"num_speculative_tokens": 1e9}, "from 1 to 32"),
        (NGRAM | {"num_speculative_token": 3}, "did you mean num_speculative_tokens"),
        (NGRAM | {"model": "x"}, "has no model"),
        (
            NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min 5 is more than prompt_lookup_max 4",
        ),
        (NGRAM | {"method": "draft_model"}, "needs a model"),
        (
            {"model": "x", "num_speculative_tokens": 3, "prompt_lookup_min": 5},
            "is for method ngram",
        ),
    ],
)
def test_invalid_configs_are_refused(
    given: dict[str, Any], clue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(**given)
    assert ended.value.code == 2
    assert clue in capsys.readouterr().err


# ---- n-grams ----


def longest_match(tokens: list[int], shortest: int, longest: int) -> int | None:
    """The place behind it, looked for one by one."""
    found: tuple[int, int] | None = None
    for place in range(shortest, len(tokens)):
        for length in range(longest, shortest - 1, -1):
            if length <= place and tokens[place - length : place] == tokens[-length:]:
                found = max(found or (0, 0), (length, place))
                break
    return found and found[1]


def test_the_longest_match_is_found_and_of_equal_ones_the_latest() -> None:
    chance = random.Random(3)
    found = 0
    for _ in range(300):
        tokens = chance.choices(range(5), k=chance.randrange(1, 40))
        index = NGramIndex(2, 4)
        for end in range(1, len(tokens) + 1):
            index.extend(tokens[:end])
        guess = index.continuation(tokens, 3)
        place = longest_match(tokens, 2, 4)
        if place is None:
            assert guess == ()
        else:
            assert guess == tuple((tokens[place:] * 3)[:3])
            found += 1
    assert found > 100


def test_a_long_prompt_is_indexed_in_several_steps_and_a_table_that_grows_anew() -> None:
    tokens = list(range(3 * INDEXED_AT_ONCE))
    index = NGramIndex(2, 2)
    guesses = []
    for _ in range(4):
        index.extend([*tokens, 100, 101])
        guesses.append(index.continuation([*tokens, 100, 101], 2))
    assert guesses == [(102, 103)] * 4, "it is in what is indexed first"
    late = [*tokens, len(tokens) - 9, len(tokens) - 8]
    index = NGramIndex(2, 2)
    guesses = []
    for _ in range(4):
        index.extend(late)
        guesses.append(index.continuation(late, 1))
    assert guesses == [()] * 2 + [(len(tokens) - 7,)] * 2
    more = late + list(range(10**6, 10**6 + 2 * len(late))) + late[-2:]
    for _ in range(12):
        index.extend(more)
    assert index.continuation(more, 1) == (10**6,)


# ---- the scheduler ----

LOOP = [1, 2, 3, 4] * 3


def make(num_blocks: int = 32, tokens: int = 64, seqs: int = 4, **speculation: Any) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    values = {**NGRAM, "prompt_lookup_min": 2, **speculation}
    speculator = PromptLookup(Speculation.read(values), max_model_len=64)
    return Scheduler(one_group(num_blocks, 4), config, (0,), speculator=speculator)


def add(scheduler: Scheduler, seq_id: int = 0, prompt: list[int] = LOOP, **sampling: Any) -> Any:
    """A sequence that has computed its prompt and drawn its next token."""
    params = SamplingParams(**{"max_tokens": 50, **sampling})
    sequence = Sequence(seq_id, params, list(prompt), len(prompt))
    scheduler.add(sequence)
    assert scheduler.admit() == [sequence]
    batch = scheduler.schedule()
    assert batch is not None and not any(entry.drafts for entry in batch.sequences)
    scheduler.computed(sequence, sequence.num_pending)
    sequence.append(SampledToken(1))
    return sequence


def only(scheduler: Scheduler) -> SequenceDelta:
    batch = scheduler.schedule()
    assert batch is not None
    (entry,) = batch.sequences
    return entry


def land(scheduler: Scheduler, sequence: Sequence, entry: SequenceDelta, *drawn: int) -> None:
    """The ranks have drawn these tokens; all but the last were guesses."""
    scheduler.computed(sequence, len(entry.token_ids))
    for token in drawn:
        sequence.append(SampledToken(token))
    scheduler.drawn(sequence, len(drawn), len(entry.drafts), len(drawn) - 1)


def test_guesses_follow_the_pending_token_and_steps_go_on_where_they_were_right() -> None:
    scheduler = make()
    sequence = add(scheduler)
    entry = only(scheduler)
    assert (entry.token_ids, entry.start, entry.drafts) == ((1,), 12, (2, 3, 4, 1))
    assert len(sequence.block_tables[0]) * 4 >= sequence.num_tokens + 4
    land(scheduler, sequence, entry, 2, 3, 9)
    assert (sequence.num_computed, sequence.num_scheduled, sequence.num_tokens) == (15, 15, 16)
    entry = only(scheduler)
    assert (entry.token_ids, entry.start, entry.drafts) == ((9,), 15, ())
    shape = scheduler.computed_steps
    assert (shape.tokens, shape.sampled) == (12 + 5 + 1, 1 + 5 + 1)
    speculator = scheduler.speculator
    assert speculator is not None
    assert (speculator.num_drafts, speculator.num_draft_tokens) == (1, 4)
    assert speculator.num_accepted_per_pos == [1, 1, 0, 0]
    assert speculator.num_accepted_tokens == 2 and scheduler.generation_tokens == 3


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        ({"max_tokens": 2}, 0),  # one is left, which the step draws anyhow
        ({"max_tokens": 4}, 2),
        ({"frequency_penalty": 0.5}, 0),
        ({"bad_words_token_ids": ((5,),)}, 0),
        ({"min_tokens": 40, "temperature": 0.0, "logit_bias": {3: 1.0}}, 4),
        ({"prompt": LOOP * 5}, 2),  # no guess goes beyond the context window
    ],
)
def test_so_much_is_guessed(sampling: dict[str, Any], most: int) -> None:
    scheduler = make()
    add(scheduler, **sampling)
    assert len(only(scheduler).drafts) == most


@pytest.mark.parametrize(("limit", "most"), [(1, 0), (2, 4)])
def test_nothing_is_guessed_with_more_sequences_than_it_pays_for(limit: int, most: int) -> None:
    scheduler = make(disable_by_batch_size=limit)
    add(scheduler)
    scheduler.add(Sequence(1, SamplingParams(), [9, *LOOP], 13))
    scheduler.admit()
    batch = scheduler.schedule()
    assert batch is not None and [len(entry.drafts) for entry in batch.sequences] == [most, 0]


def test_guesses_take_no_block_that_a_running_sequence_may_need() -> None:
    scheduler = make(num_blocks=4)
    sequence = add(scheduler)  # 13 tokens, for which it gets its fourth block now
    entry = only(scheduler)
    assert len(entry.drafts) == 3 and len(sequence.block_tables[0]) == 4
    land(scheduler, sequence, entry, 9)
    assert sequence.num_tokens == 14 and scheduler.num_preemptions == 0


def test_prompts_that_wait_have_half_of_a_step() -> None:
    scheduler = make(tokens=12, num_speculative_tokens=8)
    first = add(scheduler)
    land(scheduler, first, only(scheduler), 2)
    scheduler.add(Sequence(1, SamplingParams(), list(range(50, 80)), 30))
    scheduler.admit()
    batch = scheduler.schedule()
    assert batch is not None
    decode, prompt = batch.sequences
    assert len(decode.drafts) == 5 and len(prompt.token_ids) == 6


# ---- the draft model ----


def drafted(num_blocks: int = 32, window: int = 64, chunk: int = 8) -> Scheduler:
    speculation = Speculation.read({"model": "x", "num_speculative_tokens": 3})
    speculator = DraftModel(speculation, window, BlockPool(num_blocks, 4), chunk)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    return Scheduler(one_group(32, 4), config, (0,), speculator=speculator)


def step(scheduler: Scheduler, sequence: Sequence, *drawn: int) -> tuple[int, SequenceDelta | None]:
    """How many guesses a step verifies, and what the draft model does for it."""
    batch = scheduler.schedule()
    assert batch is not None
    (entry,), drafting = batch.sequences, batch.drafting
    assert not entry.drafts, "the ranks know them, not the scheduler"
    scheduler.computed(sequence, 1)
    for token in drawn:
        sequence.append(SampledToken(token))
    scheduler.drawn(sequence, len(drawn), entry.num_drafts, len(drawn) - 1)
    return entry.num_drafts, drafting[0] if drafting else None


def test_a_draft_model_computes_the_prompt_itself_in_chunks_and_then_guesses() -> None:
    scheduler = drafted()
    sequence = add(scheduler, prompt=list(range(1, 18)))
    num, chunk = step(scheduler, sequence, 30)
    assert num == 0 and chunk is not None
    assert (chunk.token_ids, chunk.start, chunk.samples) == (tuple(range(1, 9)), 0, False)
    assert chunk.new is not None and chunk.new_block_ids == ((0, 1),)
    num, chunk = step(scheduler, sequence, 31)
    assert num == 0 and chunk is not None and chunk.start == 8 and chunk.new is None
    num, last = step(scheduler, sequence, 32, 33, 34, 35)  # all right
    assert num == 3 and last is not None and last.samples and last.num_drafts == 3
    assert (last.token_ids, last.start) == ((17, 1, 30, 31), 16)
    # What it computes next: after all were wrong, after one was right, after none was.
    for drawn, tokens, start in (((40,), (34, 35), 22), ((41, 42), (40,), 24), ((43,), (42,), 26)):
        _, one = step(scheduler, sequence, *drawn)
        assert one is not None and (one.token_ids, one.start) == (tokens, start)


def test_a_draft_model_finds_prefixes_it_has_computed() -> None:
    scheduler = drafted(chunk=64)
    first = add(scheduler, prompt=list(range(1, 18)))
    for _ in range(2):
        step(scheduler, first, 30)
    scheduler.release(first)
    second = add(scheduler, 1, prompt=list(range(1, 18)))
    num, delta = step(scheduler, second, 30)
    assert num == 3 and delta is not None and delta.start == 16 and len(delta.token_ids) == 2


def test_without_blocks_or_beyond_its_window_a_draft_model_guesses_nothing() -> None:
    scheduler = drafted(num_blocks=4, chunk=64)
    sequence = add(scheduler, prompt=list(range(1, 18)))
    assert step(scheduler, sequence, 30) == (0, None)
    assert scheduler.num_preemptions == 0 and sequence.num_tokens == 19
    scheduler = drafted(window=21, chunk=64)
    sequence = add(scheduler, prompt=list(range(1, 18)))
    assert [step(scheduler, sequence, 30)[0] for _ in range(4)] == [2, 1, 0, 0]
