"""A CPU cache whose tensor has room for the blocks of others: *guests*.

    block ids     0 … N-1                    N … N+G-1
    memory        this rank's own file       read-only pages of whoever lends, zeros elsewhere

The whole is one contiguous tensor to whoever computes, `[layers, 2, N+G, heads, slots, dim]`, and a
guest is a block like any other: a lender's file is mapped into the gaps between this rank's planes
(a plane is one layer's keys or values), a mapping for each. So attention needs no word of it. Room
is address space alone: it costs no memory until something is mapped there.

Writing to a guest ends the process: its pages are read-only, whatever a defect may try.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from math import prod

import torch

from pdserve.common.core.errors import ConfigError

GUESTS_PER_BLOCK = 15  # ids for guests, for each block of its own
_NO_RESERVE = 0x4000  # MAP_NORESERVE
_FIXED = 0x10  # MAP_FIXED
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)


def whole_pages(num_blocks: int, block_nbytes: int) -> int:
    """The least number of blocks, `num_blocks` or more, whose plane ends with a page."""
    while num_blocks * block_nbytes % mmap.PAGESIZE:
        num_blocks += 1
    return num_blocks


class GuestArea:
    """`tensor` covers this rank's own blocks, first, and `num_guests` ids behind them. Its memory
    is never given back: it ends with the process, as the cache's does."""

    def __init__(self, own_fd: int, own: torch.Tensor) -> None:
        """`own` has the dimensions of a cache, whole pages a plane, and is what `own_fd` holds.

        Raises:
            ConfigError: the process has no address space left.
        """
        layers, two, self.num_own, *block = own.shape
        self.num_guests = GUESTS_PER_BLOCK * self.num_own
        self._planes = layers * two
        self._block_nbytes = prod(block) * own.element_size()
        self._stride = (self.num_own + self.num_guests) * self._block_nbytes
        size = self._planes * self._stride
        self._base = _map(None, size)
        self._map_planes(own_fd, 0, 0, self.num_own, mmap.PROT_READ | mmap.PROT_WRITE)
        memory = (ctypes.c_char * size).from_address(self._base)
        flat = torch.frombuffer(memory, dtype=own.dtype)
        self.tensor = flat.view(layers, two, self.num_own + self.num_guests, *block)

    def map(self, fd: int, offset: int, num_blocks: int, first: int) -> None:
        """The cache of `num_blocks` blocks at `offset` of a lender's file becomes the blocks
        `first …` here. The descriptor may be closed afterwards. What was there is replaced."""
        self._check(first, num_blocks)
        self._map_planes(fd, offset, first, num_blocks, mmap.PROT_READ)

    def clear(self, first: int, num_blocks: int) -> None:
        """Zeros take the place of what was mapped there: whoever reads it still does not fault."""
        self._check(first, num_blocks)
        size = num_blocks * self._block_nbytes
        for plane in range(self._planes):
            _map(self._address(plane, first), size)

    def _check(self, first: int, num_blocks: int) -> None:
        end = self.num_own + self.num_guests
        if not self.num_own <= first < first + num_blocks <= end:
            raise ValueError(f"{num_blocks} guests at {first}: not within {self.num_own}…{end - 1}")
        if any(count * self._block_nbytes % mmap.PAGESIZE for count in (first, num_blocks)):
            raise ValueError(f"{num_blocks} guests are no whole pages")

    def _map_planes(self, fd: int, offset: int, first: int, count: int, access: int) -> None:
        size = count * self._block_nbytes
        for plane in range(self._planes):
            _map(self._address(plane, first), size, access, fd, offset + plane * size)

    def _address(self, plane: int, block: int) -> int:
        return self._base + plane * self._stride + block * self._block_nbytes


def _map(
    address: int | None, size: int, access: int = mmap.PROT_READ, fd: int = -1, offset: int = 0
) -> int:
    """Maps a file, or zeros that nobody can write to; at `address` in place of what is there."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    if address is not None:
        flags |= _FIXED
    found: int = _libc.mmap(address, size, access, flags, fd, offset)
    if found == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"cannot map {size} bytes of address space for KV blocks: {reason}")
    return found
