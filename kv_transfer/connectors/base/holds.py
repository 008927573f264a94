"""The table of the transfers whose blocks a source rank holds, in memory that its sinks can read. A
sink that has copied a run sees there that the copy counts, and need not wait for CONFIRM.

A transfer has one place in the table, by its id. It is entered before its first run is offered and
taken out before its blocks may be freed. So if a sink finds it there *after* a copy, the blocks
were held during the copy: x86 keeps the order of reads and of writes, and elsewhere the interpreter
takes long enough between them. For a transfer that is not in the table (its place is taken, it was
cancelled) the sink waits for CONFIRM.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading

PLACES = 4096
_ENTRY = struct.Struct("=I16s12x")  # epoch (0: free), transfer id
NBYTES = PLACES * _ENTRY.size


class Holds:
    """Is a source's table."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("pdserve-kv-holds", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, NBYTES)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._memory = mmap.mmap(self.fd, NBYTES)  # has a descriptor of its own
        self._table = memoryview(self._memory)
        self._lock = threading.Lock()

    def enter(self, transfer_id: bytes, epoch: int) -> None:
        place = _place(transfer_id)
        with self._lock:
            if self.fd >= 0 and not _epoch(self._table, place):
                self._table[place + 4 : place + 20] = transfer_id
                self._table[place : place + 4] = struct.pack("=I", epoch)  # last: now it holds

    def take_out(self, transfer_id: bytes) -> None:
        place = _place(transfer_id)
        with self._lock:
            if self.fd >= 0 and self._table[place + 4 : place + 20] == transfer_id:
                self._table[place : place + 4] = bytes(4)

    def close(self) -> None:
        """Clears the table and frees its memory."""
        with self._lock:
            if self.fd >= 0:
                self._table[:] = bytes(NBYTES)
                self._table.release()
                self._memory.close()
                os.close(self.fd)
            self.fd = -1


class PeerHolds:
    """Reads a source's table, at a sink."""

    def __init__(self, fd: int) -> None:
        """Raises ValueError or OSError if `fd` is no such table."""
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the table could shrink under a reader: it is not sealed")
        self._table = memoryview(mmap.mmap(fd, NBYTES, prot=mmap.PROT_READ))

    def has(self, transfer_id: bytes, epoch: int) -> bool:
        place = _place(transfer_id)
        ids = slice(place + 4, place + 20)
        # The id is read before and after the epoch: another transfer's epoch has another id.
        return (
            self._table[ids] == transfer_id
            and _epoch(self._table, place) == epoch
            and self._table[ids] == transfer_id
        )


def _place(transfer_id: bytes) -> int:
    return int.from_bytes(transfer_id[:4], "little") % PLACES * _ENTRY.size


def _epoch(table: memoryview, place: int) -> int:
    (epoch,) = struct.unpack_from("=I", table, place)
    return int(epoch)
