"""`blocks.cpp`, built for this machine at first use. Where it cannot be built, numpy copies and the
`xxhash` package hashes: the same bytes and the same digests, more slowly where runs are short."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.common.core.native import BuildError, Library, load_library

BLOCKS = Library("kv-blocks", Path(__file__).parent)
# From so many bytes on, what is copied passes by the caches. Less is soon read again, by whoever
# checks its digest or decodes; more than a part of the caches would not be there any more by then.
PAST_CACHES_NBYTES = 4 << 20
MIN_HASHED_NBYTES = 241  # XXH3 has another way with less

logger = logging.getLogger(__name__)

Int64s = NDArray[np.int64]


class BlockCode:
    """The functions of the library. They are given offsets within memory of which the caller knows
    that it is there; Python's lock is free while they run."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._copy = library.kv_copy
        self._copy.argtypes = [pointer] * 5 + [size, ctypes.c_int]
        self._copy.restype = None
        self._hash = library.kv_hash
        self._hash.argtypes = [ctypes.c_char_p, size, *[pointer] * 3, size, ctypes.c_char_p]
        self._hash.restype = None

    def copy(
        self,
        target: NDArray[np.uint8],
        to: Int64s,
        source: NDArray[np.uint8],
        at: Int64s,
        lengths: Int64s,
    ) -> None:
        """`lengths[i]` bytes from `source[at[i]:]` to `target[to[i]:]`."""
        self._copy(
            target.ctypes.data,
            to.ctypes.data,
            source.ctypes.data,
            at.ctypes.data,
            lengths.ctypes.data,
            len(lengths),
            int(lengths.sum()) >= PAST_CACHES_NBYTES,
        )

    def hash(
        self, prefix: bytes, memory: NDArray[np.uint8], offsets: Int64s, lengths: Int64s
    ) -> bytes:
        """XXH3 (128 bits) of the prefix and the ranges; MIN_HASHED_NBYTES altogether at least."""
        out = ctypes.create_string_buffer(16)
        self._hash(
            prefix,
            len(prefix),
            memory.ctypes.data,
            offsets.ctypes.data,
            lengths.ctypes.data,
            len(lengths),
            out,
        )
        return out.raw


@cache
def block_code() -> BlockCode | None:
    """None: it cannot be built here, which is logged once."""
    try:
        return BlockCode(load_library(BLOCKS))
    except BuildError as error:
        logger.warning("KV blocks are copied and hashed without compiled code: %s", error)
        return None
