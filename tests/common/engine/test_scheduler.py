"""The scheduler's policy, with plain numbers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from one_group import one_group
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.fair_queue import share_budget
from pdserve.common.engine.messages import StepDelta
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence, Status, Times


def make(num_blocks=16, block_size=4, seqs=4, tokens=16, caching=True, stages=1) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    pool = one_group(num_blocks, block_size, caching)
    return Scheduler(pool, config, eos_token_ids=(0,), micro_batches=stages)


def sequence(seq_id, prompt, **kwargs) -> Sequence:
    tokens = list(prompt) if not isinstance(prompt, int) else list(range(1, prompt + 1))
    params = SamplingParams(**kwargs.pop("sampling", {}))
    return Sequence(seq_id, params, tokens, len(tokens), **kwargs)


def run_step(scheduler: Scheduler) -> dict[int, int]:
    """One step in which every sampled token is 7; returns tokens computed per sequence."""
    batch = scheduler.schedule()
    assert batch is not None
    land(scheduler, batch)
    return {entry.seq_id: len(entry.token_ids) for entry in batch.sequences}


def land(scheduler: Scheduler, batch: StepDelta) -> None:
    """The ranks have computed a step."""
    by_id = {s.seq_id: s for s in scheduler.running}
    for entry in batch.sequences:
        scheduler.computed(by_id[entry.seq_id], len(entry.token_ids))
        if entry.samples:
            by_id[entry.seq_id].append(SampledToken(7))


def test_decodes_come_first_and_prompts_fill_the_budget_in_order():
    scheduler = make(tokens=10)
    for i, length in enumerate((4, 12, 12)):
        scheduler.add(sequence(i, range(100 * i + 1, 100 * i + 1 + length)))
    assert [s.seq_id for s in scheduler.admit()] == [0, 1, 2]
    assert run_step(scheduler) == {0: 4, 1: 6}
    assert run_step(scheduler) == {0: 1, 1: 6, 2: 3}
    assert run_step(scheduler) == {0: 1, 1: 1, 2: 8}


def test_admission_waits_for_blocks_and_keeps_the_order():
    scheduler = make(num_blocks=4)
    big, small = sequence(0, 16), sequence(1, range(50, 54))
    scheduler.add(big)
    scheduler.add(small)
    assert scheduler.admit() == [big]
    scheduler.release(big)
    assert scheduler.admit() == [small]


def test_a_sequence_that_still_waits_is_released():
    """Its client has left; it has no blocks, and no table of them."""
    scheduler = make(num_blocks=4)
    first, second = sequence(1, range(10)), sequence(2, range(20, 30))
    for each in (first, second):
        scheduler.add(each)
    scheduler.admit()
    assert second.status is Status.WAITING
    scheduler.release(second)
    scheduler.release(first)
    assert scheduler.pool.num_free == 4 and not scheduler.waiting


def test_a_lone_sequence_that_cannot_grow_preempts_itself_and_loses_nothing():
    scheduler = make(num_blocks=3, block_size=2, caching=False)
    lone, remote = sequence(0, [1]), sequence(1, [2, 3, 4, 5], remote=True)
    scheduler.add(lone)
    scheduler.admit()
    run_step(scheduler)
    run_step(scheduler)  # 3 tokens, 1 block: the next step needs another
    scheduler.pool.pools[0].allocate(2)
    scheduler.add(remote)
    assert scheduler.schedule() is None
    assert [s.seq_id for s in scheduler.waiting] == [0, 1]
    assert lone.token_ids == [1, 7, 7]


def test_a_cached_prompt_computes_its_last_token_but_a_remote_one_may_be_cached_whole():
    scheduler = make()
    prompt = list(range(1, 9))
    scheduler.add(sequence(0, prompt))
    scheduler.admit()
    run_step(scheduler)
    local, remote = sequence(1, prompt), sequence(2, prompt, remote=True)
    scheduler.add(local)
    scheduler.add(remote)
    scheduler.admit()
    assert (local.num_cached, remote.num_cached) == (4, 8)
    assert remote.block_tables[0] == scheduler.running[0].block_tables[0][:2]
    assert (scheduler.cache_queries, scheduler.cache_hits) == (24, 12)


@pytest.mark.parametrize("apart", [{"cache_salt": "its own"}, {"adapter": "a" * 32}])
def test_a_prompt_with_another_salt_or_adapter_finds_nothing_cached(apart: dict[str, str]) -> None:
    scheduler = make()
    for seq_id, kwargs in enumerate(({}, apart, apart)):
        scheduler.add(one := sequence(seq_id, 9, **kwargs))
        scheduler.admit()
        run_step(scheduler)
        assert one.num_cached == (8 if seq_id == 2 else 0)
        scheduler.release(one)


def test_sequences_of_which_a_step_takes_only_some_take_turns() -> None:
    scheduler = make(num_blocks=32, seqs=4)
    for seq_id, client in enumerate("aabbc"):
        scheduler.add(sequence(seq_id, 4, client=client))
    assert len(scheduler.admit()) == 5
    while any(not each.num_output_tokens for each in scheduler.running):
        run_step(scheduler)
    taken = Counter(seq_id for _ in range(10) for seq_id in run_step(scheduler))
    assert taken == dict.fromkeys(range(5), 8)


# ---- priorities ----


def test_the_queue_is_by_priority_then_what_has_begun_elsewhere_then_first_come():
    scheduler, begun = make(seqs=1), (4, 5, 6)
    for i, priority in enumerate((1, 0, 1, -1, 0, 1, 0)):
        one = sequence(i, 4, priority=priority)
        if i in begun:
            one.append(SampledToken(7))
        scheduler.add(one)
    assert [each.seq_id for each in scheduler.waiting] == [3, 4, 6, 1, 5, 0, 2]


@pytest.mark.parametrize("urgent", [0, 1, 2])
def test_the_least_urgent_is_preempted_and_waits_behind_the_more_urgent(urgent: int):
    scheduler = make(num_blocks=6, block_size=2, caching=False)
    some = [sequence(i, [3 * i + 1], priority=1) for i in range(3)]
    some[urgent].priority = 0
    for each in some:
        scheduler.add(each)
    scheduler.admit()
    later = sequence(9, 12, priority=0)  # does not fit
    scheduler.add(later)
    while not scheduler.num_preemptions:
        run_step(scheduler)
        assert not scheduler.admit()
    victim = max(i for i in range(3) if i != urgent)
    assert list(scheduler.waiting) == [later, some[victim]]
    assert some[urgent].status is Status.RUNNING


def test_the_urgent_finds_a_block_before_the_step_takes_the_others():
    scheduler = make(num_blocks=3, block_size=8, caching=False)
    older, urgent = sequence(0, 1, priority=1), sequence(1, 7)
    for each in (older, urgent):
        scheduler.add(each)
        assert scheduler.admit() == [each]
    scheduler.pool.pools[0].allocate(scheduler.pool.num_free)
    while urgent.num_output_tokens < 3:
        assert urgent.seq_id in run_step(scheduler)
    assert scheduler.num_preemptions == 1 and older.status is Status.WAITING


def test_the_time_preempted_ends_with_the_next_token():
    times = Times()
    times.step(0.0, 1.0, samples=True)
    times.preempt(2.0)
    times.preempt(3.0)  # once more, before it has got a token
    times.step(4.0, 5.0, samples=False)
    assert (times.in_steps, times.preempted) == (1.0, 0.0)
    times.step(5.0, 6.0, samples=True)
    times.step(6.0, 6.5, samples=True)
    assert (times.in_steps, times.preempted) == (1.5, 4.0)


# ---- long prompts beside short ones ----


@pytest.mark.parametrize(
    ("left", "shares"),
    [
        ([], []),
        ([5000], [10]),
        ([5000, 3], [7, 3]),  # what the short one leaves is the long one's
        ([5000, 40, 3], [5, 2, 3]),  # the shortest first
        ([5000, 3, 3, 3], [5, 3, 2, 0]),  # then in order of age
        ([40, 5000, 40], [10, 0, 0]),  # longer or equal ones wait
        ([4, 12, 12], [4, 6, 0]),
    ],
)
def test_a_step_is_shared_between_the_oldest_prompt_and_shorter_ones(
    left: list[int], shares: list[int]
):
    assert share_budget(left, 10) == shares


def test_a_budget_of_one_token_goes_to_either_in_turn():
    assert [share_budget([9, 2], 1, turn) for turn in range(3)] == [[0, 1], [1, 0], [0, 1]]
    assert share_budget([9, 2], 0) == [0, 0]


def steps_until_computed(lengths: list[int], budget: int, arrivals: list[int]) -> list[int]:
    """Steps each prompt takes from its arrival, when nothing else is computed."""
    left, took, step = dict(enumerate(lengths)), [0] * len(lengths), 0
    while left:
        present = [i for i in sorted(left, key=lambda i: arrivals[i]) if arrivals[i] <= step]
        for i, tokens in zip(
            present, share_budget([left[i] for i in present], budget, step), strict=True
        ):
            left[i] -= tokens
            if not left[i]:
                took[i] = step + 1 - arrivals[i]
                del left[i]
        step += 1
    return took


def test_short_prompts_get_through_beside_a_huge_one_and_do_not_starve_it():
    huge, *short = steps_until_computed([131072, 200, 256, 100], 512, [0, 10, 50, 51])
    assert short == [1, 1, 1]
    assert huge <= 131072 // 512 + 3
    # Two prompts of half a step's tokens come with each step: more than the node can do.
    many, alone = 600, 131072 // 512
    took = steps_until_computed([131072, *[256] * many], 512, [0, *[i // 2 for i in range(many)]])
    assert took[0] <= 2 * alone


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_takes_more_than_twice_the_steps_of_all_that_came_before(seed: int):
    rng = random.Random(seed)
    lengths = [rng.choice([1, 30, 200, 3000]) * rng.randrange(1, 9) for _ in range(30)]
    arrivals = sorted(rng.randrange(60) for _ in lengths)
    took = steps_until_computed(lengths, 64, arrivals)
    for i, steps in enumerate(took):
        assert steps <= 2 * sum(lengths[: i + 1]) / 64 + 2


def test_fitting_sequences_overtake_one_that_does_not_fit_until_its_turn():
    """Blocks for 8: one runs and needs 5, the next one needs 6. Those behind it may have as many
    as it needs, then the rest is kept for it."""
    scheduler = make(num_blocks=8, seqs=16, caching=False)
    running, long = sequence(0, 20), sequence(1, 24)
    scheduler.add(running)
    scheduler.add(long)
    for seq_id in range(2, 12):
        scheduler.add(sequence(seq_id, 4))
    passed = []
    for _ in range(12):
        admitted = scheduler.admit()
        assert long not in admitted
        passed += [each.seq_id for each in admitted]
        for each in admitted:
            if each is not running:
                scheduler.release(each)
    assert passed == [0, *range(2, 8)]
    scheduler.release(running)
    assert scheduler.admit()[0] is long


def test_a_sequence_that_has_begun_is_not_overtaken():
    scheduler = make(num_blocks=4, caching=False)
    scheduler.add(sequence(0, 8))
    begun = sequence(1, 11)
    begun.append(SampledToken(7))
    scheduler.admit()
    for each in (begun, sequence(2, 4)):
        scheduler.add(each)
    assert scheduler.admit() == []


# ---- several steps in flight: the stages of a pipeline ----


def shares(batch: StepDelta | None) -> dict[int, tuple[int, int]]:
    """Each sequence's tokens in a step: (start, count)."""
    entries = batch.sequences if batch else ()
    return {entry.seq_id: (entry.start, len(entry.token_ids)) for entry in entries}


def test_a_prompt_is_cut_so_that_every_stage_has_a_chunk():
    scheduler = make(num_blocks=64, tokens=512, stages=2)
    scheduler.add(sequence(0, 200))
    scheduler.admit()
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (shares(first), shares(second)) == ({0: (0, 100)}, {0: (100, 100)})
    assert not first.sequences[0].samples and second.sequences[0].samples
    for step in (first, second):
        assert scheduler.schedule() is None  # its next token is not known yet
        land(scheduler, step)
    assert shares(scheduler.schedule()) == {0: (200, 1)}
    scheduler = make(num_blocks=64, tokens=512, stages=4)
    scheduler.add(sequence(0, 80))
    scheduler.admit()
    pieces = [shares(scheduler.schedule()) for _ in range(2)]
    assert pieces == [{0: (0, 64)}, {0: (64, 16)}], "not into smaller ones than pay"


def test_sequences_that_decode_are_shared_out_over_the_stages():
    scheduler = make(seqs=8, stages=2)
    for i in range(5):
        scheduler.add(sequence(i, range(10 * i + 1, 10 * i + 4)))
    scheduler.admit()
    run_step(scheduler)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (list(shares(first)), list(shares(second))) == ([0, 1, 2], [3, 4])
    land(scheduler, first)
    assert list(shares(scheduler.schedule())) == [0, 1, 2]


def test_sequences_in_flight_are_not_preempted():
    scheduler = make(stages=2)
    scheduler.add(sequence(0, 7))
    scheduler.add(sequence(1, range(10, 15)))
    scheduler.admit()
    run_step(scheduler)
    scheduler.pool.pools[0].allocate(scheduler.pool.num_free)  # others hold the rest
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (list(shares(first)), list(shares(second))) == ([0], [1])
    land(scheduler, first)  # the older one needs a block now, and the younger one is in flight
    assert scheduler.schedule() is None and scheduler.num_preemptions == 0
    land(scheduler, second)
    assert list(shares(scheduler.schedule())) == [0] and scheduler.num_preemptions == 1


def test_a_sequence_without_a_block_waits_for_what_is_in_flight():
    scheduler = make(num_blocks=5, seqs=4, stages=2)
    for i in range(2):
        scheduler.add(sequence(i, range(10 * i + 1, 10 * i + 9)))
    scheduler.admit()
    run_step(scheduler)
    first = scheduler.schedule()
    assert list(shares(first)) == [0]  # has taken the last free block
    assert scheduler.schedule() is None and scheduler.num_preemptions == 0
    land(scheduler, first)
    oldest = scheduler.running[0]
    scheduler.release(oldest)
    assert list(shares(scheduler.schedule())) == [1]
