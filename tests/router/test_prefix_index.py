"""The prefix index: who has which prefix, in how much memory and time."""

from __future__ import annotations

import random
import sys

import pytest

from pdserve.common.core.block_hash import hash_blocks, short_hash
from pdserve.router.cluster.prefix_index import (
    EVICTED,
    FIRST_STEP,
    MAX_BLOCKS,
    SHARDS,
    PrefixIndex,
    PromptBlocks,
)

SIZE = 4


def hashes(tokens, salt="", adapter="", size=SIZE):
    return [short_hash(each) for each in hash_blocks(tokens, size, salt, adapter)]


def prompt(tokens, salt="", adapter=""):
    return PromptBlocks(tokens, SIZE, salt, adapter)


def test_it_answers_as_plain_sets_do_whatever_places_say() -> None:
    """Places drop the last blocks of a prompt first, come, go and are cleared."""
    rng = random.Random(3)
    index, plain = PrefixIndex(), {}
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(4, 90))] for _ in range(40)]
    for _ in range(500):
        place, some = rng.randrange(12), hashes(rng.choice(prompts))
        what = rng.random()
        has = plain.setdefault(place, set())
        if what < 0.6:
            index.store(place, some)
            has.update(some)
        elif what < 0.9:
            # With a block all that follow it go, in whatever prompts.
            first = some[rng.randrange(len(some)) :][:1]
            gone = {
                block
                for each in map(hashes, prompts)
                if first[0] in each
                for block in each[each.index(first[0]) :]
            } & has
            assert index.remove(place, [*gone, 99]) == 1
            has -= gone
        else:
            index.clear(place)
            has.clear()
        asked = rng.choice(prompts)
        depths = {place: _depth(hashes(asked), has) for place, has in plain.items()}
        assert index.match(prompt(asked)) == {p: n for p, n in depths.items() if n}
        assert [index.num_blocks(place) for place in plain] == [len(has) for has in plain.values()]
    for _ in index.sweep():
        index.store("new", ())
    assert len(index) == len(set().union(*plain.values())), "what was cleared has left memory"
    assert index._retired == 0


def _depth(blocks, has) -> int:
    return next((i for i, block in enumerate(blocks) if block not in has), len(blocks))


def test_of_states_the_last_one_counts() -> None:
    """Whatever places have of the blocks before."""
    rng = random.Random(5)
    index, plain = PrefixIndex(), {place: set() for place in range(9)}
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(4, 90))] for _ in range(40)]
    for _ in range(300):
        place, some = rng.randrange(9), hashes(rng.choice(prompts))
        states = rng.sample(some, min(2, len(some)))
        if rng.random() < 0.7:
            index.store(place, states)
            plain[place] |= {*states}
        else:
            index.remove(place, states)
            plain[place] -= {*states}
        asked = rng.choice(prompts)
        depths = {
            place: max((i for i, each in enumerate(hashes(asked), 1) if each in has), default=0)
            for place, has in plain.items()
        }
        assert index.match_states(prompt(asked)) == {p: n for p, n in depths.items() if n}


def test_adapters_and_salts_are_apart() -> None:
    index, tokens = PrefixIndex(), list(range(20))
    index.store("plain", hashes(tokens))
    index.store("salted", hashes(tokens, "salt"))
    index.store("adapted", hashes(tokens, "", "digest"))
    assert index.match(prompt(tokens)) == {"plain": 5}
    assert index.match(prompt(tokens, "salt")) == {"salted": 5}
    assert index.match(prompt(tokens, "", "digest")) == {"adapted": 5}
    assert index.match(prompt(tokens, "salt", "digest")) == index.match(prompt([])) == {}
    assert index.match(prompt([9, 9, 9])) == {}, "no block is full"


def test_a_prompt_is_hashed_only_as_far_as_somebody_has_it() -> None:
    index, tokens = PrefixIndex(), list(range(4000))
    blocks = prompt(tokens)
    assert index.match(blocks) == {} and blocks.num_hashed == 1
    index.store("a", hashes(tokens)[:100])
    assert index.match(blocks) == {"a": 100} and blocks.num_hashed < 2 * 100 + FIRST_STEP


def test_memory_is_bounded_and_what_came_first_goes_first() -> None:
    most = 40 * SHARDS
    index, rng = PrefixIndex(most), random.Random(1)
    first, last = ([rng.getrandbits(64) for _ in range(most)] for _ in range(2))
    index.store("a", first)
    index.store("b", last)
    assert most - SHARDS * (1 + 40 // EVICTED) < len(index) <= most
    assert index.num_evicted + len(index) == 2 * most
    assert index.num_blocks("a") + index.num_blocks("b") == len(index)
    assert index.num_blocks("b") > index.num_blocks("a")
    gone = index.remove("a", first)
    assert 0 < gone < most and index.num_blocks("a") == 0


def test_ten_million_blocks_take_less_than_a_gigabyte() -> None:
    """Shown on a few shards, which are as full as all would be, after they have been turned over:
    a dictionary grows by entries that were deleted, too."""
    index, rng = PrefixIndex(), random.Random(2)
    count = 4 * (MAX_BLOCKS // SHARDS - 20)

    def blocks(first: int, end: int) -> list[int]:
        return [(rng.getrandbits(60) & -SHARDS) | at % 4 for at in range(first, end)]

    held = blocks(0, count)
    index.store(0, held)
    for at in [*range(0, count, 500)] * 3:
        end = min(at + 500, count)
        index.remove(0, held[at:end])
        held[at:end] = blocks(at, end)
        index.store(0, held[at:end])
    used = [shard for shard in index._shards if shard]
    assert len(used) == 4 and len(index) == count
    nbytes = sum(sys.getsizeof(shard) + sum(map(sys.getsizeof, shard)) for shard in used)
    assert nbytes / len(index) * MAX_BLOCKS < 1e9


def test_few_blocks_of_a_prompt_of_32k_tokens_are_looked_up() -> None:
    tokens, looked = list(range(2**15)), list[int]()

    class Blocks(PromptBlocks):
        def __getitem__(self, index: int) -> int:
            looked.append(index)
            return super().__getitem__(index)

    index, blocks = PrefixIndex(), Blocks(tokens, 16)
    known = hashes(tokens, size=16)
    for place, depth in enumerate((2048, 2048, 777, 100)):
        index.store(place, known[:depth])
    assert index.match(blocks) == {0: 2048, 1: 2048, 2: 777, 3: 100}
    assert len(looked) < 100  # of 2048: there and back by steps that double, for each depth


@pytest.mark.slow
def test_ten_million_blocks_of_four_places() -> None:
    index, rng = PrefixIndex(), random.Random(0)
    before = _resident()
    for number in range(1200):
        index.store(number % 4, [rng.getrandbits(64) for _ in range(10_000)])
    assert len(index) > 0.94 * MAX_BLOCKS and _resident() - before < 1e9


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
