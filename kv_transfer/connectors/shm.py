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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.blocks import BlockLayout, CacheBytes, copy_blocks, memory_of
from pdserve.kv_transfer.connector import Capabilities, RankContext, SourceTransfer
from pdserve.kv_transfer.connectors.base import pull
from pdserve.kv_transfer.connectors.base.handshake import GREETING_S, send_frame, time_limit
from pdserve.kv_transfer.connectors.base.holds import Holds, PeerHolds
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
        pull=True, one_sided=True, same_host=True, authenticates=True
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
        with time_limit(pipe, GREETING_S, Blame.PREFILL):
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

    def copy(self, rect: Rect, source_ids: Sequence[int], sink_ids: Sequence[int]) -> None:
        copy_blocks(rect, self._ours, sink_ids, self._theirs, source_ids)

    def held(self, transfer_id: bytes, epoch: int) -> bool:
        return self._holds is not None and self._holds.has(transfer_id, epoch)


def _opened(holds: int) -> PeerHolds:
    try:
        return PeerHolds(holds)
    except (OSError, ValueError) as error:
        raise bad_frame(f"what came with the greeting is no table of holds: {error}") from error
