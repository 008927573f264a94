"""The scheduler's policy, with plain numbers."""

from common.config.schema import SchedulerConfig
from common.core.sampling import SampledToken, SamplingParams
from common.engine.block_pool import BlockPool
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence, Status


def make(num_blocks=16, block_size=4, seqs=4, tokens=16, caching=True) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return Scheduler(BlockPool(num_blocks, block_size, caching), config, eos_token_ids=(0,))


def sequence(seq_id, prompt, **kwargs) -> Sequence:
    tokens = list(prompt) if not isinstance(prompt, int) else list(range(1, prompt + 1))
    params = SamplingParams(**kwargs.pop("sampling", {}))
    return Sequence(seq_id, params, tokens, len(tokens), **kwargs)


def run_step(scheduler: Scheduler) -> dict[int, int]:
    """One step in which every sampled token is 7; returns tokens computed per sequence."""
    batch = scheduler.schedule()
    assert batch is not None
    by_id = {s.seq_id: s for s in scheduler.running}
    for entry in batch.sequences:
        scheduler.computed(by_id[entry.seq_id], len(entry.token_ids))
        if entry.sampling is not None:
            by_id[entry.seq_id].append(SampledToken(7))
    return {entry.seq_id: len(entry.token_ids) for entry in batch.sequences}


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


def test_the_youngest_is_preempted_and_computes_its_tokens_again():
    scheduler = make(num_blocks=5, block_size=2, caching=False)
    old, young = sequence(0, [1, 2, 3]), sequence(1, [4, 5])
    scheduler.add(old)
    scheduler.admit()
    run_step(scheduler)  # `old` has 4 tokens, 2 blocks
    scheduler.add(young)
    assert scheduler.admit() == [young]
    run_step(scheduler)
    for _ in range(10):
        if scheduler.num_preemptions:
            break
        run_step(scheduler)
    assert young.status is Status.WAITING and young.num_computed == 0 and not young.block_table
    assert scheduler.waiting[0] is young and young.num_output_tokens > 0
    scheduler.release(old)
    assert scheduler.admit() == [young]
    assert run_step(scheduler) == {1: young.num_tokens - 1}
    scheduler.release(young)
    assert scheduler.pool.num_free == 5


def test_a_lone_sequence_that_cannot_grow_preempts_itself_and_loses_nothing():
    scheduler = make(num_blocks=3, block_size=2, caching=False)
    lone, remote = sequence(0, [1]), sequence(1, [2, 3, 4, 5], remote=True)
    scheduler.add(lone)
    scheduler.admit()
    run_step(scheduler)
    run_step(scheduler)  # 3 tokens, 1 block: the next step needs another
    scheduler.pool.allocate(2)
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
    assert remote.block_table == scheduler.running[0].block_table[:2]
    assert (scheduler.cache_queries, scheduler.cache_hits) == (24, 12)


def test_a_remote_sequence_is_not_computed_until_it_is_activated():
    scheduler = make()
    remote = sequence(0, 6, remote=True)
    scheduler.add(remote)
    assert scheduler.admit() == [remote] and scheduler.schedule() is None
    scheduler.activate(remote, SampledToken(9))
    batch = scheduler.schedule()
    assert batch is not None and batch.sequences[0].token_ids == (9,)
    assert batch.sequences[0].start == 6


def test_min_tokens_bans_whatever_could_end_the_sequence():
    scheduler = make()
    scheduler.add(sequence(0, 3, sampling={"min_tokens": 1, "stop_token_ids": (5,)}))
    scheduler.admit()
    first, _ = scheduler.schedule(), run_step(scheduler)
    assert first is not None and first.sequences[0].banned_token_ids == (0, 5)
    second = scheduler.schedule()
    assert second is not None and second.sequences[0].banned_token_ids == ()


def test_releasing_in_any_state_returns_all_blocks():
    scheduler = make()
    sequences = [sequence(i, 5, remote=i == 1) for i in range(3)]
    for one in sequences:
        scheduler.add(one)
    scheduler.admit()
    run_step(scheduler)
    scheduler.hold(sequences[0])
    waiting = sequence(9, 5)
    scheduler.add(waiting)
    for one in (*sequences, waiting, sequences[0]):
        scheduler.release(one)
        assert one.status is Status.DONE
    assert scheduler.pool.num_free == 16 and not scheduler.running and not scheduler.remote


def test_what_another_node_has_begun_comes_before_what_waits_for_its_first_token():
    scheduler = make(seqs=1)
    for i in range(3):
        scheduler.add(sequence(i, 4))
    for i in (3, 4):
        begun = sequence(i, 4)
        begun.append(SampledToken(7))
        scheduler.add(begun)
    assert [each.seq_id for each in scheduler.waiting] == [3, 4, 0, 1, 2]
