"""The identity of a KV block: a hash over its tokens and all before them, the adapter and the salt.

    digest of a block = BLAKE2b of (digest of the block before, tokens as 4 bytes each), 16 bytes

Equal hashes mean equal KV on nodes of one fingerprint. Nodes cache blocks by them; a router that
hashes a prompt the same way knows which nodes have a prefix of it. The hash is cryptographic: with
a weaker one a client could make a prompt that finds another client's blocks.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.common.core.native import BuildError, Library, load_library

logger = logging.getLogger(__name__)

BlockHash = bytes  # 16 bytes
DIGEST = 16  # bytes

# Generic tuning: with -mtune=native, GCC 12's code for Zen 5 is four times as slow.
_LIBRARY = Library("block-hash", Path(__file__).parent / "native_hash", ("-mtune=generic",))


class BlockHasher:
    """Computes chained block hashes: with a compiled library once `load` has returned, until then
    with hashlib, which returns the same hashes at a quarter of the speed."""

    def __init__(self) -> None:
        self._native: Any = None

    @property
    def is_native(self) -> bool:
        return self._native is not None

    def load(self) -> None:
        """Loads the compiled library, building it first if the cache lacks it. A build takes
        seconds, so call this on a thread."""
        try:
            found = load_library(_LIBRARY).chain_hashes
        except BuildError as error:
            logger.info("block hashes are computed by hashlib: %s", error)
            return
        size, text = ctypes.c_size_t, ctypes.c_char_p
        found.argtypes, found.restype = [text, size, size, text, size, text], None
        if sys.byteorder == "little":  # the byte order in which the library writes digests
            self._native = found

    def chain(self, tokens: bytes, block_nbytes: int, parent: BlockHash) -> bytes:
        """Returns the digests of all full blocks of `tokens`, concatenated. `parent`: the digest of
        the block before the first one, or of the root, which may be empty."""
        count = len(tokens) // block_nbytes
        if self._native is not None:
            digests = bytes(DIGEST * count)
            self._native(tokens, count, block_nbytes, parent, len(parent), digests)
            return digests
        found = []
        for start in range(0, count * block_nbytes, block_nbytes):
            block = tokens[start : start + block_nbytes]
            parent = hashlib.blake2b(parent + block, digest_size=DIGEST).digest()
            found.append(parent)
        return b"".join(found)


HASHER = BlockHasher()
"""The hasher that this process uses."""


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    known: Sequence[BlockHash] = (),
    cache_salt: str = "",
    adapter: str = "",
) -> list[BlockHash]:
    """Returns the chained hashes of all full blocks of `token_ids`. `known`: hashes of the first
    blocks if already computed. `adapter`: digest of the LoRA adapter that computes the KV."""
    parent = known[-1] if known else root_hash(cache_salt, adapter)
    first, end = len(known) * block_size, len(token_ids) // block_size * block_size
    tokens = array("I", token_ids[first:end]).tobytes()
    digests = HASHER.chain(tokens, 4 * block_size, parent)
    return [*known, *(digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST))]


def short_hash(block_hash: BlockHash) -> int:
    """Returns the block's hash as KV events name it: the last 8 bytes, as an unsigned number."""
    return int.from_bytes(block_hash[-8:], "big")


def root_hash(cache_salt: str, adapter: str) -> BlockHash:
    """Returns the parent of a prompt's first block."""
    if not (cache_salt or adapter):
        return b""
    return hashlib.blake2b(
        cache_salt.encode(), digest_size=DIGEST, key=adapter.encode(), person=b"cache_salt"
    ).digest()
