"""Blocks of several KV groups: what a sequence takes, frees and finds in each."""

from __future__ import annotations

import pytest

from pdserve.common.core.block_hash import hash_blocks
from pdserve.common.core.kv_groups import STATES_HELD, KVGroup, LayerKV, grouped, kv_groups
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.kv_pool import NO_BLOCK, KVPool
from pdserve.common.engine.sequence import Sequence

SIZE = 16
FULL, WINDOW = kv_groups((None, 1024), num_kv_heads=1, head_dim=1)
(STATE,) = grouped([LayerKV.of_state(1, 1)])


def sequence(length: int, seq_id: int = 0, remote: bool = False) -> Sequence:
    return Sequence(seq_id, SamplingParams(), list(range(1, length + 1)), length, remote=remote)


def admit(pool: KVPool, each: Sequence) -> None:
    usable = (each.num_tokens - (not each.remote)) // SIZE
    fit = pool.fit(each.hashes(SIZE)[:usable], each.num_tokens, each.remote)
    assert pool.has_room(fit, 0)
    pool.admit(each, fit)


def compute(pool: KVPool, each: Sequence, chunk: int) -> int:
    """All tokens, chunk by chunk; returns the most blocks of a window that it held."""
    most = 0
    while each.num_pending:
        end = pool.extend(each, min(each.num_computed + chunk, each.num_tokens))
        table = each.block_tables[-1]
        most = max(most, len(table) - table.count(NO_BLOCK))
        pool.computed(each, end - each.num_computed)
    return most


def test_a_long_prompt_takes_its_window_and_a_chunk() -> None:
    """32,768 tokens: 2,048 blocks of full attention, and 98 of the window's 100."""
    pool = KVPool([FULL, WINDOW], [2048, 100], SIZE, in_flight=512)
    it = sequence(32768)
    admit(pool, it)
    assert [each.num_free for each in pool.pools] == [0, 100]
    assert compute(pool, it, 512) <= WINDOW.most_blocks(32768, 512, SIZE) == 98
    assert pool.pools[1].num_free == 100 - 65
    assert pool.num_held == 2048, "the fullest group's share"
    assert pool.release(it) == 2048 + 65
    assert [each.num_free for each in pool.pools] == [2048, 100]


def test_prompts_are_admitted_while_their_windows_fit() -> None:
    pool = KVPool([FULL, WINDOW], [9999, 202], SIZE, in_flight=512)
    running = [sequence(8000, 0), sequence(8000, 1)]
    for each in running:
        admit(pool, each)
    fit = pool.fit([], 8000, remote=False)
    assert fit.needed == (500, 98)
    assert pool.has_room(fit, 0), "no sequence has taken a block"
    assert not pool.has_room(fit, 0, running), "running ones will"
    assert pool.has_room(pool.fit([], 90, remote=False), 0, running)
    assert pool.tightest(8000) == (98, 202, 202)
    pool.pools[0].allocate(pool.pools[0].num_free - 450)
    assert pool.tightest(8000) == (500, 450, 9999)


def test_a_sequence_from_elsewhere_has_no_blocks_before_its_window() -> None:
    pool = KVPool([FULL, WINDOW], [200, 200], SIZE)
    it = sequence(3000, remote=True)
    admit(pool, it)
    full, window = it.block_tables
    first = (2992 - 1023) // SIZE  # of the query after the full blocks before the last token
    assert NO_BLOCK not in full and len(full) == len(window) == 188
    assert window.index(next(each for each in window if each != NO_BLOCK)) == first
    pool.computed(it, 3000)
    assert window.count(NO_BLOCK) == first


@pytest.mark.parametrize("remote", [False, True])
def test_a_prefix_is_cached_as_far_as_every_group_has_it(remote: bool) -> None:
    small = KVGroup((1,), 1, 1, window=40)
    pool = KVPool([FULL, small], [64, 64], SIZE, in_flight=512)
    it = sequence(160)
    admit(pool, it)
    compute(pool, it, 160)
    pool.release(it)
    hashes = hash_blocks(range(1, 161), SIZE)
    assert pool.fit(hashes, 161, remote).num_cached == 10
    for index in (9, 6):  # of the window the blocks before the last token's, and one far behind
        pool.pools[1].forget(pool.pools[1].lookup(hashes[index : index + 1]))
    # Queries from token 144 on read blocks 6 to 8, those from 96 on 3 to 5. What comes from
    # elsewhere is read from token 161 on: blocks 7 to 9.
    fit = pool.fit(hashes, 161, remote)
    assert (fit.num_cached, fit.first) == ((9, (0, 7)) if remote else (6, (0, 3)))
    assert len(fit.cached[0]) == fit.num_cached and len(fit.cached[1]) == (2 if remote else 3)
    for index in range(10):
        pool.pools[1].forget(pool.pools[1].lookup(hashes[index : index + 1]))
    assert pool.fit(hashes, 161, remote).num_cached == (7 if remote else 0)


@pytest.mark.parametrize("length", range(161, 161 + SIZE))
@pytest.mark.parametrize("remote", [False, True])
def test_another_choice_of_a_prompt_computes_its_last_block_alone(
    length: int, remote: bool
) -> None:
    pool = KVPool([FULL, KVGroup((1,), 1, 1, window=40)], [64, 64], SIZE, in_flight=512)
    it = sequence(length, remote=remote)
    admit(pool, it)
    if remote:
        pool.computed(it, length)
    else:
        compute(pool, it, length)
    for each in pool.pools:
        each.allocate(each.num_free)  # nothing that is free stays
    fit = pool.fit(it.hashes(SIZE)[: (length - 1) // SIZE], length, remote=False)
    assert fit.num_cached == (length - 1) // SIZE


@pytest.mark.parametrize("chunk", [7, 16, 64, 100, 512])
def test_a_state_is_kept_where_a_chunk_ends_and_at_the_block_before(chunk: int) -> None:
    pool = KVPool([FULL, STATE], [64, 40], SIZE)
    it = sequence(300)
    admit(pool, it)
    assert compute(pool, it, chunk) <= STATES_HELD
    table = it.block_tables[1]
    held = [index for index, block in enumerate(table) if block != NO_BLOCK]
    assert held == [17, 18] == [*range(STATE.first_kept(300, SIZE), 19)], "all that is handed over"
    hashes = it.hashes(SIZE)
    # At the ends of a chunk's last block, which the next one fills, and of the one before.
    ends = {(300 - 1) // SIZE}
    for end in range(chunk, 300, chunk):
        ends |= {(end - 1) // SIZE, (end - 1) // SIZE + 1}
    found = {count for count in range(1, 19) if hashes[count - 1] in pool.pools[1]}
    assert found == ends & {*range(1, 19)}
    pool.release(it)
    for count in range(1, 19):
        fit = pool.fit(hashes[:count], 16 * count + 1, remote=False)
        assert fit.num_cached == max((each for each in found if each <= count), default=0)


def test_a_state_of_a_decoding_sequence_is_kept_at_each_block() -> None:
    pool = KVPool([FULL, STATE], [64, 40], SIZE)
    it = sequence(30)
    admit(pool, it)
    compute(pool, it, 512)
    for token in range(31, 80):
        it.token_ids.append(token)
        assert pool.grow(it, token)
        pool.computed(it, 1)
        held = [index for index, block in enumerate(it.block_tables[1]) if block != NO_BLOCK]
        assert held == [*range(STATE.first_kept(token, SIZE), len(it.block_tables[1]))]
        assert len(held) == 2
    hashes = it.hashes(SIZE)
    assert [each in pool.pools[1] for each in hashes] == [True] * 4


def test_a_chunk_without_room_for_two_states_waits() -> None:
    pool = KVPool([FULL, STATE], [64, 4], SIZE)
    it = sequence(300)
    admit(pool, it)
    taken = pool.pools[1].allocate(3)
    assert pool.extend(it, 64) == 0 and it.block_tables[1] == []
    assert pool.extend(it, 10) == 10, "in one block"
    pool.pools[1].free(taken[:1])
    pool.computed(it, 10)
    assert pool.extend(it, 64) == 16, "the rest of its block"
    pool.pools[1].free(taken[1:])
    assert pool.extend(it, 64) == 64


def test_two_groups_of_full_attention_share_a_prefix_as_far_as_both_have_it() -> None:
    other = KVGroup((2,), num_kv_heads=2, head_dim=1)
    for forgetful in (0, 1):
        pool = KVPool([FULL, other], [100, 100], SIZE)
        first = sequence(100)
        hashes = first.hashes(SIZE)
        admit(pool, first)
        compute(pool, first, 100)
        pool.release(first)
        assert pool.fit(hashes, 101, remote=False).num_cached == 6
        pool.pools[forgetful].forget(pool.pools[forgetful].lookup(hashes)[2:3])
        assert pool.fit(hashes, 101, remote=False).num_cached == 2
