"""The table of cores that the ranks of a host share: a file with an entry of 64 bytes per core. A
process owns a core while it holds a lock on the first byte of its entry: until it closes the file
or ends."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from pdserve.common.core.errors import ConfigError

ENTRY_NBYTES = 64
MOST_CORES = 1024
_LENT = struct.Struct("16xq40x")  # an entry: nanoseconds for which others used the core
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux


def lent_seconds(file: Path) -> list[float]:
    """Returns, per core of the table, the seconds for which ranks of other nodes have used it."""
    return [nanoseconds / 1e9 for (nanoseconds,) in _LENT.iter_unpack(file.read_bytes())]


def sized(fd: int, cores: int) -> int:
    """Returns the number of entries of the open table; a new file gets `cores` entries.

    Raises:
        ConfigError: the file is no table of cores.
        OSError: the disk is full, or `fd` is not a regular file.
    """
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        size = os.fstat(fd).st_size
        if not size:
            size = min(cores, MOST_CORES) * ENTRY_NBYTES
            os.posix_fallocate(fd, 0, size)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
    if size % ENTRY_NBYTES or size > MOST_CORES * ENTRY_NBYTES:
        raise ConfigError(f"--share-cores names a file of {size} bytes, which is no table of cores")
    return size // ENTRY_NBYTES


class CoresTaken(Exception):
    """Too few cores of a table have no owner."""


def lock_entries(fd: int, count: int, wanted: int) -> list[int]:
    """Locks the first `wanted` of `count` entries without an owner; returns their indices.

    Raises:
        CoresTaken: fewer have no owner; the caller closes `fd`, which drops the locks.
    """
    own: list[int] = []
    for entry in range(count):
        if len(own) < wanted and _lock(fd, entry * ENTRY_NBYTES):
            own.append(entry)
    if len(own) < wanted:
        raise CoresTaken(f"{len(own)} of its {count} cores have no owner, and {wanted} are wanted")
    return own


def _lock(fd: int, start: int) -> bool:
    """Locks one byte for this descriptor, until it is closed; returns False if it is taken."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except OSError:
        return False
    return True
