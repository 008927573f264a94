"""Block hashes: each depends on all before it, however it is computed."""

from __future__ import annotations

import hashlib
import random
from array import array

import pytest

from pdserve.common.core.block_hash import BlockHasher, hash_blocks, root_hash, short_hash
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.sequence import Sequence
from pdserve.router.cluster.prefix_index import PromptBlocks


def test_a_hash_is_that_of_the_root_and_all_tokens_up_to_its_end() -> None:
    for root in (b"", root_hash("salt", "adapter")):
        begun = root + bytes(64 - len(root))
        whole = begun + array("I", [1, 2, 3, 4]).tobytes()
        first, second = BlockHasher(2, root).extend([1, 2, 3, 4, 5], 0, 4)
        assert first == hashlib.sha256(whole[:72]).digest()[:16]
        assert second == hashlib.sha256(whole).digest()[:16]
    assert len(hash_blocks([1, 2, 3, 4, 5], 2)) == 2
    assert hash_blocks([0, 1, 2, 3], 4)[0] != hash_blocks([0, 1, 2, 4], 4)[0]


def test_a_root_is_not_the_tokens_that_look_like_it() -> None:
    """Prompts of another salt share no hash, even if they begin with that salt's bytes."""
    salted = root_hash("salt", "")
    as_tokens = array("I", salted + bytes(64 - len(salted))).tolist()
    tokens = list(range(16))
    assert not {*hash_blocks(as_tokens + tokens, 16)} & {*hash_blocks(tokens, 16, "salt")}


@pytest.mark.parametrize("block_size", [1, 3, 16, 29, 64])
def test_a_growing_sequence_has_the_hashes_of_the_whole(block_size: int) -> None:
    chance = random.Random(block_size)
    tokens = [chance.randrange(2**32) for _ in range(20 * block_size)]
    growing = Sequence(0, SamplingParams(), tokens[:5], 5, cache_salt="salt", adapter="adapter")
    while growing.num_tokens < len(tokens):
        count = growing.num_tokens + chance.randrange(1, 3 * block_size + 1)
        growing.token_ids += tokens[growing.num_tokens : count]
        whole = hash_blocks(growing.token_ids, block_size, "salt", "adapter")
        assert growing.hashes(block_size) == whole


@pytest.mark.parametrize("make", [list, lambda ids: array("I", ids), lambda ids: array("L", ids)])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_a_prompt_s_blocks_may_be_asked_for_in_any_order(make, block_size: int) -> None:
    tokens, chance = make(range(1000)), random.Random(block_size)
    whole = [short_hash(each) for each in hash_blocks(range(1000), block_size, "salt", "adapter")]
    blocks = PromptBlocks(tokens, block_size, "salt", "adapter")
    assert list(blocks) == whole and len(blocks) == len(whole) and not blocks.num_hashed
    for at in chance.choices(range(len(whole)), k=200):
        assert blocks[at] == whole[at]
    assert blocks.num_hashed <= len(whole)
    for beyond in (len(whole), -1):
        with pytest.raises(IndexError):
            blocks[beyond]
