"""KV blocks between processes of one host: the sink reads the source's memory, one copy.

The source passes a read-only descriptor of the memory file behind its cache. Nothing has a name in
/dev/shm, and no process can write into another's memory. The protocol is that of
`kv_transfer/connectors/base/pull.py`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.blocks import (
    BlockLayout,
    CacheBytes,
    copy_blocks,
    copy_hashed,
    memory_of,
)
from pdserve.kv_transfer.connector import Capabilities, RankContext, SourceTransfer
from pdserve.kv_transfer.connectors.base import pull
from pdserve.kv_transfer.connectors.base.channel import FrameHash
from pdserve.kv_transfer.connectors.base.handshake import greeting_limit, send_frame
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.frame import Frame, FrameKind, bad_frame
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.pipe import KVPipe


class Greeting(pull.Greeting):
    """Introduces a source and describes its memory file, whose descriptor follows."""

    offset: int  # of the cache in the file
    nbytes: int  # of the cache
    holds: bool = False  # a second descriptor follows, of its table of holds


class ShmConnector(pull.PullConnector[Greeting]):
    """Takes no options."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        pull=True,
        one_sided=True,
        same_host=True,
        authenticates=True,
        sink_writes=True,
        source_hashes=True,
    )
    greeting = Greeting

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self._holds = Holds()

    def submit(self, transfer: SourceTransfer) -> None:
        self._holds.enter(transfer.transfer_id, transfer.epoch)
        super().submit(transfer)

    def quiesce(self, transfer_id: bytes) -> None:
        self._holds.take_out(transfer_id)
        super().quiesce(transfer_id)

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._holds.close()

    def introduce(self, pipe: KVPipe) -> None:
        view = self.context.view
        assert view.shared_fd is not None and isinstance(pipe, SocketPipe)
        geometry = (view.cache.shape[2], view.shared_offset, view.cache.nbytes)
        greeting = Greeting(self.context.fingerprint, view.rect, *geometry, holds=True)
        send_frame(pipe, Frame(FrameKind.HELLO), msgspec.msgpack.encode(greeting))
        with ExitStack() as stack:
            readable = []
            for fd in (view.shared_fd, self._holds.fd):
                readable.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
                stack.callback(os.close, readable[-1])
            socket.send_fds(pipe.sock, [b"F"], readable)

    def open(self, pipe: SocketPipe, greeting: Greeting) -> MappedCache:
        with greeting_limit(pipe, Blame.PREFILL):
            _, fds, _, _ = socket.recv_fds(pipe.sock, 1, 2)
        try:
            if len(fds) != 1 + greeting.holds:
                raise bad_frame("no memory came with the greeting")
            return MappedCache(greeting, fds[0], self.context.view, *fds[1:])
        finally:
            for fd in fds:
                os.close(fd)


class MappedCache(pull.PeerCache):
    """Maps a source rank's memory file, read-only."""

    def __init__(
        self, greeting: Greeting, fd: int, view: CacheView, holds: int | None = None
    ) -> None:
        """Maps `fd`, the memory file, and `holds`, the table; both may be closed afterwards."""
        super().__init__(greeting)
        end = greeting.offset + greeting.nbytes
        ours = BlockLayout.of(view)
        theirs = replace(ours, rect=greeting.rect, num_blocks=greeting.num_blocks)
        if greeting.rect.area == 0 or greeting.offset < 0:
            raise bad_frame(f"{greeting.rect} at byte {greeting.offset} cannot be a cache")
        if greeting.nbytes != theirs.nbytes:
            raise bad_frame(f"a cache of {greeting.nbytes} bytes does not fit its geometry")
        if os.fstat(fd).st_size < end:
            raise bad_frame(f"the memory file ends before byte {end}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise bad_frame("the memory file could shrink under a reader: it is not sealed")
        self._holds = None if holds is None else _opened(holds)
        mapped = memoryview(mmap.mmap(fd, end, prot=mmap.PROT_READ))[greeting.offset :]
        self._theirs = CacheBytes.of(mapped, theirs)
        self._ours = CacheBytes.of(memory_of(view.cache), ours)

    def copy(
        self,
        rect: Rect,
        source_ids: Sequence[int],
        sink_ids: Sequence[int],
        hash_: FrameHash,
    ) -> None:
        ends = self._ours, sink_ids, self._theirs, source_ids
        if hash_.prefix is None:
            copy_blocks(rect, *ends)
        else:
            hash_.made = copy_hashed(hash_.prefix, rect, *ends)

    def held(self, transfer_id: bytes, epoch: int) -> bool:
        return self._holds is not None and self._holds.has(transfer_id, epoch)


def _opened(holds: int) -> PeerHolds:
    try:
        return PeerHolds(holds)
    except (OSError, ValueError) as error:
        raise bad_frame(f"what came with the greeting is no table of holds: {error}") from error


# ---- the table of transfers with blocks held by a source ----

PLACES = 4096
_ENTRY = struct.Struct("=I16s12x")  # epoch (0: free), transfer id
NBYTES = PLACES * _ENTRY.size


class Holds:
    """Lists the transfers whose blocks a source rank holds, in memory that its sinks can read. A
    sink that has copied a run sees there that the copy counts, without waiting for CONFIRM.

    A transfer has one place in the table, by its id. It is entered before its first run is offered
    and taken out before its blocks may be freed. So if a sink finds it there *after* a copy, the
    blocks were held during the copy: x86 keeps the order of reads and of writes, and elsewhere the
    interpreter takes long enough between them. For a transfer that is not in the table (its place
    is taken, it was cancelled) the sink waits for CONFIRM.
    """

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
