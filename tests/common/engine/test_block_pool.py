"""The block pool: references, LRU and the prefix cache."""

import random

import pytest

from pdserve.common.core.block_hash import hash_blocks
from pdserve.common.engine.block_pool import BlockPool


def test_every_block_is_handed_out_once_and_comes_back():
    pool = BlockPool(8, 4)
    first, second = pool.allocate(5), pool.allocate(3)
    assert sorted(first + second) == list(range(8)) and pool.num_free == 0
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)
    pool.free(first)
    assert pool.num_free == 5
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(first[:1])


def test_a_freed_prefix_is_found_until_its_block_is_reused():
    pool = BlockPool(4, 2)
    hashes = hash_blocks([1, 2, 3, 4, 5], 2)
    blocks = pool.allocate(3)
    for block, block_hash in zip(blocks, hashes, strict=False):
        pool.register(block, block_hash)
    pool.free(blocks)
    assert pool.lookup(hashes) == blocks[:2] and pool.count_unheld(blocks[:2]) == 2
    pool.hold(blocks[:2])
    assert pool.count_unheld(blocks[:2]) == 0 and pool.num_free == 2
    pool.free(blocks[:2])
    # Unregistered blocks go first, then the tail of the prefix, then its head.
    assert set(pool.allocate(2)) == {3, blocks[2]}
    assert pool.allocate(1) == [blocks[1]]
    assert pool.lookup(hashes) == blocks[:1] and hashes[1] not in pool


def test_hashes_depend_on_every_token_before():
    assert hash_blocks([1, 2, 3, 4], 2)[1] != hash_blocks([9, 2, 3, 4], 2)[1]
    assert hash_blocks([1, 2, 3], 2) == hash_blocks([1, 2], 2)


def test_random_use_never_loses_or_doubles_a_block():
    rng, pool, held = random.Random(0), BlockPool(32, 2), []
    for _ in range(3000):
        if held and (rng.random() < 0.5 or pool.num_free < 8):
            pool.free(held.pop(rng.randrange(len(held))))
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 12))]
        hashes = hash_blocks(tokens, 2)
        blocks = pool.lookup(hashes)
        pool.hold(blocks)
        blocks += pool.allocate(min(pool.num_free, pool.blocks_for(len(tokens)) - len(blocks)))
        for block, block_hash in zip(blocks, hashes, strict=False):
            pool.register(block, block_hash)
        held.append(blocks)
        assert pool.num_free == 32 - len({block for blocks in held for block in blocks})
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == 32
