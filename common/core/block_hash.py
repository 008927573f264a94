"""The identity of a KV block: a hash over its tokens and all before them, the adapter and the salt.

Equal hashes mean equal KV on nodes of one fingerprint. Nodes cache blocks by them; a router that
hashes a prompt the same way knows which nodes have a prefix of it.
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
    adapter: str = "",
) -> list[BlockHash]:
    """Returns the chained hashes of all full blocks of `token_ids`. `known`: hashes of the first
    blocks if already computed. `adapter`: digest of the LoRA adapter that computes the KV."""
    hashes = list(known)
    parent = hashes[-1] if hashes else _root(cache_salt, adapter)
    first, end = len(hashes) * block_size, len(token_ids) // block_size * block_size
    tokens = array("I", token_ids[first:end]).tobytes()
    width = 4 * block_size
    for start in range(0, len(tokens), width):
        block = tokens[start : start + width]
        parent = hashlib.blake2b(block, key=parent, digest_size=16).digest()
        hashes.append(parent)
    return hashes


def short_hash(block_hash: BlockHash) -> int:
    """Returns the block's hash as KV events name it: the last 8 bytes, as an unsigned number."""
    return int.from_bytes(block_hash[-8:], "big")


def _root(cache_salt: str, adapter: str) -> bytes:
    if not (cache_salt or adapter):
        return b""
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=16, key=adapter.encode(), person=b"cache_salt"
    ).digest()
