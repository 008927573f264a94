"""Which transfers' blocks a source rank holds, written where its sinks can look: a sink that has
copied a run sees by itself whether the copy counts, and need not ask.

A transfer has one place in the table, by its id. It is entered before its first run is offered and
taken out before its blocks may be freed. So a sink that finds it there *after* its copy has copied
what was held: a processor neither delays a read past a later one nor a write past an earlier one
(x86), or not for as long as the interpreter takes between them. A transfer that is not there (its
place is taken, it was given up, the source is of another kind) is asked for as ever.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading

PLACES = 4096
_ENTRY = struct.Struct("=I16s12x")  # epoch (0: nobody), transfer id
NBYTES = PLACES * _ENTRY.size


class Holds:
    """A source's table."""

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
        """Nothing is held any more, nor will be."""
        with self._lock:
            if self.fd >= 0:
                self._table[:] = bytes(NBYTES)
                self._table.release()
                self._memory.close()
                os.close(self.fd)
            self.fd = -1


class PeerHolds:
    """A source's table as its sink sees it."""

    def __init__(self, fd: int) -> None:
        """Raises ValueError, OSError: it is none."""
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the table could shrink under a reader: it is not sealed")
        self._table = memoryview(mmap.mmap(fd, NBYTES, prot=mmap.PROT_READ))

    def has(self, transfer_id: bytes, epoch: int) -> bool:
        place = _place(transfer_id)
        ids = slice(place + 4, place + 20)
        # Looked at before and after: an epoch is another transfer's only beside another id.
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
