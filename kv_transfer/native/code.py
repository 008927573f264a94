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
    """The functions of the library. They are given addresses of planes that the caller knows to be
    there; Python's lock is free while they run.

    In each of `num_planes` planes, `stride` bytes apart and as long, the same ranges are meant:
    `starts` from a plane's beginning, `lengths` long. One beyond the plane is an IndexError.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        side = pointer, size, pointer
        self._copy = library.kv_copy
        self._copy.argtypes = [*side, *side, pointer, size, size, ctypes.c_uint64]
        self._hash = library.kv_hash
        ranges = pointer, size, pointer, pointer, size, size
        self._hash.argtypes = [ctypes.c_char_p, size, *ranges, ctypes.c_char_p]

    def copy(
        self,
        target: int,
        target_stride: int,
        to: Int64s,
        source: int,
        source_stride: int,
        at: Int64s,
        lengths: Int64s,
        num_planes: int,
    ) -> None:
        """From `at` in the source's planes to `to` in the target's."""
        done = self._copy(
            target, target_stride, to.ctypes.data, source, source_stride, at.ctypes.data,
            lengths.ctypes.data, len(lengths), num_planes, PAST_CACHES_NBYTES,
        )  # fmt: skip
        _check(done)

    def hash(
        self,
        prefix: bytes,
        memory: int,
        stride: int,
        starts: Int64s,
        lengths: Int64s,
        num_planes: int,
    ) -> bytes:
        """XXH3 (128 bits) of the prefix and the ranges; MIN_HASHED_NBYTES altogether at least."""
        out = ctypes.create_string_buffer(16)
        done = self._hash(
            prefix, len(prefix), memory, stride, starts.ctypes.data, lengths.ctypes.data,
            len(lengths), num_planes, out,
        )  # fmt: skip
        _check(done)
        return out.raw


def _check(done: int) -> None:
    if not done:
        raise IndexError("a block that there is not")


@cache
def block_code() -> BlockCode | None:
    """None: it cannot be built here, which is logged once."""
    try:
        return BlockCode(load_library(BLOCKS))
    except BuildError as error:
        logger.warning("KV blocks are copied and hashed without compiled code: %s", error)
        return None
