"""Block hashes: the same with and without the library, and each depends on all before it."""

from __future__ import annotations

import hashlib
import random
from array import array
from pathlib import Path

import pytest

from pdserve.common.core.block_hash import BlockHasher, hash_blocks, root_hash, short_hash
from pdserve.router.cluster.prefix_index import PromptBlocks


@pytest.fixture(scope="module")
def native() -> BlockHasher:
    hasher = BlockHasher()
    hasher.load()
    assert hasher.is_native
    return hasher


@pytest.mark.parametrize("block_size", [1, 3, 16, 28, 29, 32, 60, 64, 512])
def test_the_library_and_hashlib_agree(native: BlockHasher, block_size: int) -> None:
    chance, width = random.Random(block_size), 4 * block_size
    for parent in (b"", root_hash("salt", "adapter")):
        for count in (0, 1, 7):
            numbers = [chance.randrange(2**32) for _ in range(count * block_size)]
            tokens = array("I", numbers).tobytes()
            assert native.chain(tokens, width, parent) == BlockHasher().chain(tokens, width, parent)


def test_a_hash_is_that_of_the_parent_and_the_tokens() -> None:
    first, second = hash_blocks([1, 2, 3, 4, 5], 2)
    assert first == hashlib.blake2b(array("I", [1, 2]).tobytes(), digest_size=16).digest()
    both = first + array("I", [3, 4]).tobytes()
    assert second == hashlib.blake2b(both, digest_size=16).digest()
    assert hash_blocks([1, 2, 3, 4, 5], 2, [first]) == [first, second]


def test_a_prompt_s_blocks_are_hashed_once_and_piece_by_piece() -> None:
    tokens = list(range(1000))
    whole = [short_hash(each) for each in hash_blocks(tokens, 16, (), "salt", "adapter")]
    blocks = PromptBlocks(tokens, 16, "salt", "adapter")
    order = [0, 3, 2, 10, 61, 60]
    assert [blocks[at] for at in order] == [whole[at] for at in order] and len(blocks) == 62


def test_without_a_compiler_hashlib_computes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    hasher = BlockHasher()
    with caplog.at_level("INFO"):
        hasher.load()
    assert hasher.chain(bytes(64), 64, b"") == hashlib.blake2b(bytes(64), digest_size=16).digest()
    assert "no C++ compiler" in caplog.text
