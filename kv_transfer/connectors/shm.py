"""KV blocks between processes of one host: the sink reads the source's memory, one copy.

The source passes a read-only descriptor of the memory file behind its cache; nothing has a
name in /dev/shm, and nobody can write into another process's memory. The protocol is that of
`kv_transfer/connectors/base/pull.py`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import msgspec
import numpy as np

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.blocks import Placement, copy_blocks, memory_of
from pdserve.kv_transfer.connector import Capabilities
from pdserve.kv_transfer.connectors.base import pull
from pdserve.kv_transfer.connectors.base.handshake import GREETING_S, send_frame, time_limit
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.frame import Frame, Kind, bad_frame
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.pipe import KVPipe


class Greeting(pull.Greeting):
    """Who the source is and what its memory file holds; the file's descriptor follows."""

    offset: int  # of the cache in the file
    nbytes: int  # of the cache


class ShmConnector(pull.PullConnector[Greeting]):
    """Takes no options."""

    capabilities: ClassVar[Capabilities] = Capabilities(pull=True, one_sided=True, same_host=True)
    greeting = Greeting

    def introduce(self, pipe: KVPipe) -> None:
        view = self.context.view
        assert view.shared_fd is not None and isinstance(pipe, SocketPipe)
        geometry = (view.cache.shape[2], view.shared_offset, view.cache.nbytes)
        greeting = Greeting(self.context.fingerprint, view.rect, *geometry)
        send_frame(pipe, Frame(Kind.HELLO), msgspec.msgpack.encode(greeting))
        readable = os.open(f"/proc/self/fd/{view.shared_fd}", os.O_RDONLY)
        try:
            socket.send_fds(pipe.sock, [b"F"], [readable])
        finally:
            os.close(readable)

    def open(self, pipe: SocketPipe, greeting: Greeting) -> MappedCache:
        with time_limit(pipe, GREETING_S, Blame.PREFILL):
            _, fds, _, _ = socket.recv_fds(pipe.sock, 1, 1)
        if len(fds) != 1:
            raise bad_frame("no memory came with the greeting")
        try:
            return MappedCache(greeting, fds[0], self.context.view)
        finally:
            os.close(fds[0])


class MappedCache(pull.PeerCache):
    """A source rank's memory file, mapped read-only."""

    def __init__(self, greeting: Greeting, fd: int, view: CacheView) -> None:
        super().__init__(greeting)
        end = greeting.offset + greeting.nbytes
        ours = Placement.of(view)
        theirs = replace(ours, rect=greeting.rect, num_blocks=greeting.num_blocks)
        if greeting.rect.area == 0 or greeting.offset < 0:
            raise bad_frame(f"{greeting.rect} at {greeting.offset} is no cache")
        if greeting.nbytes != theirs.nbytes:
            raise bad_frame(f"a cache of {greeting.nbytes} bytes does not fit its geometry")
        if os.fstat(fd).st_size < end:
            raise bad_frame(f"the memory file ends before byte {end}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise bad_frame("the memory file could shrink under a reader: it is not sealed")
        mapped = memoryview(mmap.mmap(fd, end, prot=mmap.PROT_READ))[greeting.offset :]
        self._theirs = np.frombuffer(mapped, np.uint8), theirs
        self._ours = np.frombuffer(memory_of(view.cache), np.uint8), ours

    def copy(self, rect: Rect, source_ids: Sequence[int], sink_ids: Sequence[int]) -> None:
        copy_blocks(rect, self._ours, sink_ids, self._theirs, source_ids)
