"""The identity of a KV block: a hash over its tokens and all before them, the adapter and the salt.

    digest of a block = SHA-256 of (64 bytes that begin with the root, the prompt's tokens up to the
                        block's end as 4 bytes each), the first 16 bytes

Equal hashes mean equal KV on nodes of one fingerprint. Nodes cache blocks by them; a router that
hashes a prompt the same way knows which nodes have a prefix of it. The hash is cryptographic: with
a weaker one a client could make a prompt that finds another client's blocks. A hash of the whole
prefix, not of the parent's digest and the block, costs the same, and a router that wants the
digests of few blocks hashes the tokens between them in one call.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes  # 16 bytes
DIGEST = 16  # bytes
ROOT = 64  # bytes, as many as SHA-256 takes at once


def begun(root: bytes) -> hashlib._Hash:
    """Returns a hash that takes the tokens after `root` next."""
    return hashlib.sha256(root.ljust(ROOT, b"\0"))


class BlockHasher:
    """Hashes the full blocks of a sequence in their order, while the sequence grows."""

    def __init__(self, block_size: int, root: bytes) -> None:
        self._block_size = block_size
        self._state = begun(root)

    def extend(self, token_ids: Sequence[int], start: int, end: int) -> list[BlockHash]:
        """Returns the hashes of the blocks that these tokens fill, which follow those before."""
        tokens, width = bytes(packed(token_ids, start, end)), 4 * self._block_size
        update, digest, found = self._state.update, self._state.digest, []
        for at in range(0, len(tokens), width):
            update(tokens[at : at + width])
            found.append(digest()[:DIGEST])
        return found


def hash_blocks(
    token_ids: Sequence[int], block_size: int, cache_salt: str = "", adapter: str = ""
) -> list[BlockHash]:
    """Returns the hashes of all full blocks of `token_ids`. `adapter`: digest of the LoRA adapter
    that computes the KV."""
    hasher = BlockHasher(block_size, root_hash(cache_salt, adapter))
    return hasher.extend(token_ids, 0, len(token_ids) // block_size * block_size)


def packed(token_ids: Sequence[int], start: int, end: int) -> memoryview:
    """Returns these tokens as 4 bytes each; an array's are not copied."""
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return memoryview(token_ids)[start:end]
    return memoryview(array("I", token_ids[start:end]))


def short_hash(block_hash: BlockHash) -> int:
    """Returns the block's hash as KV events name it: the last 8 bytes, as an unsigned number."""
    return int.from_bytes(block_hash[-8:], "big")


def root_hash(cache_salt: str, adapter: str) -> bytes:
    """Returns what stands before a prompt's first token."""
    if not (cache_salt or adapter):
        return b""
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=DIGEST, key=adapter.encode(), person=b"cache_salt"
    ).digest()
