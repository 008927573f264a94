"""`blocks.cpp`, prebuilt or built for this machine at first use. Where it cannot be built, numpy
copies and the `xxhash` package hashes: the same bytes and the same digests, more slowly where runs
are short."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdserve.common.core.native import load_library
from pdserve.common.core.native_library import BuildError
from pdserve.kv_transfer.native import BLOCKS

# A copy of this many bytes or more bypasses the CPU's caches. Less is soon read again, by decode;
# more would have left the caches by then.
PAST_CACHES_NBYTES = 4 << 20
MOVED_AT_ONCE = 4 << 20  # through a socket, before Python looks at the clock and the gate
OUTSIDE = -2  # returned for ranges that are not within the memory
MIN_HASHED_NBYTES = 241  # XXH3 hashes less than that in another way

logger = logging.getLogger(__name__)

Int64s = NDArray[np.int64]
HashState: TypeAlias = "ctypes.Array[ctypes.c_char]"


class BlockCode:
    """Calls the functions of the library. The caller guarantees that the planes exist; Python's
    lock is free while a function runs.

    A call is about the same ranges in each of `num_planes` planes, which are `stride` bytes long:
    `starts` counts from a plane's beginning. A range that leaves the plane is an IndexError.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        side = pointer, size, pointer
        self._copy = library.kv_copy
        self._copy.argtypes = [*side, *side, pointer, size, size, ctypes.c_uint64]
        self._hash = library.kv_hash
        ranges = pointer, size, pointer, pointer, size, size
        self._hash.argtypes = [ctypes.c_char_p, size, *ranges, ctypes.c_char_p]
        self._copy_hashed = library.kv_copy_hashed
        self._copy_hashed.argtypes = [
            *(ctypes.c_char_p, size, *self._copy.argtypes),
            ctypes.c_char_p,
        ]
        library.kv_hash_state_nbytes.restype = size
        self._state_nbytes = library.kv_hash_state_nbytes()
        self._begin = library.kv_hash_begin
        self._begin.argtypes = [ctypes.c_char_p, ctypes.c_char_p, size, ctypes.c_uint64]
        self._begin.restype = None
        self._update = library.kv_hash_update
        self._update.argtypes = [ctypes.c_char_p, pointer, size, pointer, pointer, size]
        self._end = library.kv_hash_end
        self._end.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self._end.restype = None
        number = ctypes.c_int
        self._move = library.kv_move
        self._move.argtypes = [
            *(number, number, number, ctypes.c_char_p, size, pointer, size, pointer, pointer, size),
            *(ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64, ctypes.c_char_p),
        ]

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
        """Copies from `at` in the source's planes to `to` in the target's."""
        done = self._copy(
            target, target_stride, to.ctypes.data, source, source_stride, at.ctypes.data,
            lengths.ctypes.data, len(lengths), num_planes, PAST_CACHES_NBYTES,
        )  # fmt: skip
        _check(done)

    def copy_hashed(
        self,
        prefix: bytes,
        target: int,
        target_stride: int,
        to: Int64s,
        source: int,
        source_stride: int,
        at: Int64s,
        lengths: Int64s,
        num_planes: int,
    ) -> bytes:
        """Copies as `copy` and returns the hash of the prefix and the copied bytes, as `hash`."""
        out = ctypes.create_string_buffer(16)
        done = self._copy_hashed(
            prefix, len(prefix), target, target_stride, to.ctypes.data, source, source_stride,
            at.ctypes.data, lengths.ctypes.data, len(lengths), num_planes, PAST_CACHES_NBYTES, out,
        )  # fmt: skip
        _check(done)
        return out.raw

    def begin_hash(self, prefix: bytes, nbytes: int) -> HashState:
        """Begins the hash of the prefix and of `nbytes` that follow, together MIN_HASHED_NBYTES or
        more."""
        state = ctypes.create_string_buffer(self._state_nbytes)
        self._begin(state, prefix, len(prefix), len(prefix) + nbytes)
        return state

    def update_hash(
        self, state: HashState, memory: int, nbytes: int, starts: Int64s, lengths: Int64s
    ) -> None:
        """Continues the hash with ranges of a memory of `nbytes`."""
        _check(
            self._update(
                state, memory, nbytes, starts.ctypes.data, lengths.ctypes.data, len(starts)
            )
        )

    def move(
        self,
        socket: int,
        receiving: bool,
        flags: int,
        head: bytes,
        memory: int,
        nbytes: int,
        starts: Int64s,
        lengths: Int64s,
        position: int,
        state: HashState | None,
    ) -> int:
        """Sends `head` and then the ranges of a memory of `nbytes`, or receives the ranges (without
        a head), from `position` on, and continues the hash, if there is one, with what it moves of
        the ranges. Returns how many bytes it has moved, about MOVED_AT_ONCE at most; 0 if the peer
        has closed. Raises OSError if it can move nothing."""
        at = ctypes.c_uint64(position)
        result = self._move(
            socket, receiving, flags, head, len(head), memory, nbytes, starts.ctypes.data,
            lengths.ctypes.data, len(starts), ctypes.byref(at), MOVED_AT_ONCE, state,
        )  # fmt: skip
        _check(result != OUTSIDE)
        moved = at.value - position
        if result > 0 and not moved:
            raise OSError(result, os.strerror(result))
        return moved

    def end_hash(self, state: HashState) -> bytes:
        out = ctypes.create_string_buffer(16)
        self._end(state, out)
        return out.raw

    def hash(
        self,
        prefix: bytes,
        memory: int,
        stride: int,
        starts: Int64s,
        lengths: Int64s,
        num_planes: int,
    ) -> bytes:
        """Returns the XXH3 hash (128 bits) of the prefix and the ranges, together
        MIN_HASHED_NBYTES or more."""
        out = ctypes.create_string_buffer(16)
        done = self._hash(
            prefix, len(prefix), memory, stride, starts.ctypes.data, lengths.ctypes.data,
            len(lengths), num_planes, out,
        )  # fmt: skip
        _check(done)
        return out.raw


def _check(done: int) -> None:
    if not done:
        raise IndexError("no such block")


@cache
def block_code() -> BlockCode | None:
    """Returns the library's functions; None if it cannot be built here, which is logged once."""
    try:
        return BlockCode(load_library(BLOCKS))
    except BuildError as error:
        logger.warning("KV blocks are copied and hashed without compiled code: %s", error)
        return None
