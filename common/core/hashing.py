"""Chained block hashes: the identity of a full KV block is its tokens and all tokens before.

The hash of block i covers (hash of block i-1, tokens of block i), so equal hashes mean equal
prefixes and a block can be shared wherever its hash is found. The method is vLLM's automatic
prefix caching. A salt takes the place of what is before the first block: equal hashes mean equal
salts, too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes  # 16 bytes


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    known: Sequence[BlockHash] = (),
    cache_salt: str = "",
) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`; `known` are the hashes of the first blocks
    when they are already computed."""
    hashes = list(known)
    parent = hashes[-1] if hashes else _root(cache_salt)
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = array("I", token_ids[start : start + block_size]).tobytes()
        parent = hashlib.blake2b(tokens, key=parent, digest_size=16).digest()
        hashes.append(parent)
    return hashes


def _root(cache_salt: str) -> bytes:
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"cache_salt").digest()
