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
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from numpy.typing import NDArray

from pdserve.common.core.errors import Blame, ConfigError
from pdserve.kv_transfer.blocks import copy_blocks, memory_of, piece_nbytes, words
from pdserve.kv_transfer.connector import Capabilities, RankContext
from pdserve.kv_transfer.connectors.base import pull
from pdserve.kv_transfer.connectors.base.frame import Frame, Kind, bad_frame
from pdserve.kv_transfer.connectors.base.pipe_connector import GREETING_S, send_frame
from pdserve.kv_transfer.connectors.base.server import time_limit
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.layout import CacheView, Rect


class Greeting(pull.Greeting):
    """Who the source is and what its memory file holds; the file's descriptor follows."""

    offset: int  # of the cache in the file
    nbytes: int  # of the cache


class ShmConnector(pull.PullConnector):
    """Takes no options."""

    capabilities: ClassVar[Capabilities] = Capabilities(pull=True, one_sided=True, same_host=True)

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        if config:
            raise ConfigError(f"the shm connector has no option {', '.join(sorted(config))!r}")
        super().__init__(context, config)

    def introduce(self, pipe: SocketPipe) -> None:
        view = self.context.view
        assert view.shared_fd is not None  # build_rank saw to it
        geometry = (view.cache.shape[2], view.shared_offset, view.cache.nbytes)
        greeting = Greeting(self.context.fingerprint, view.rect, *geometry)
        send_frame(pipe, Frame(Kind.HELLO), msgspec.msgpack.encode(greeting))
        readable = os.open(f"/proc/self/fd/{view.shared_fd}", os.O_RDONLY)
        try:
            socket.send_fds(pipe.sock, [b"F"], [readable])
        finally:
            os.close(readable)

    def open(self, pipe: SocketPipe, hello: bytes) -> MappedCache:
        greeting = msgspec.msgpack.decode(hello, type=Greeting)
        with time_limit(pipe, GREETING_S, Blame.PREFILL):
            _, fds, _, _ = socket.recv_fds(pipe.sock, 1, 1)
        if len(fds) != 1:
            raise bad_frame("no memory came with the greeting")
        try:
            self.welcome(pipe, greeting)
            return MappedCache(greeting, fds[0], self.context.view)
        finally:
            os.close(fds[0])


class MappedCache(pull.PeerCache):
    """A source rank's memory file, mapped read-only."""

    def __init__(self, greeting: Greeting, fd: int, view: CacheView) -> None:
        super().__init__(greeting)
        end = greeting.offset + greeting.nbytes
        block_nbytes = piece_nbytes(view.cache, greeting.rect, 1)
        if block_nbytes == 0 or greeting.offset < 0:
            raise bad_frame(f"{greeting.rect} at {greeting.offset} is no cache")
        if greeting.nbytes != block_nbytes * greeting.num_blocks:
            raise bad_frame(f"a cache of {greeting.nbytes} bytes does not fit its geometry")
        if os.fstat(fd).st_size < end:
            raise bad_frame(f"the memory file ends before byte {end}")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise bad_frame("the memory file could shrink under a reader: it is not sealed")
        mapped = memoryview(mmap.mmap(fd, end, prot=mmap.PROT_READ))[greeting.offset :]
        self._theirs = rows(mapped, greeting.rect, greeting.num_blocks)
        self._view = view
        self._ours = rows(memory_of(view.cache), view.rect, view.cache.shape[2])

    def copy(self, rect: Rect, source_ids: Sequence[int], sink_ids: Sequence[int]) -> None:
        theirs = self._theirs[frame_slices(rect, self.rect)]
        ours = self._ours[frame_slices(rect, self._view.rect)]
        copy_blocks(ours, theirs, sink_ids, source_ids)


def rows(memory: memoryview, rect: Rect, num_blocks: int) -> NDArray[Any]:
    """A cache of `rect` as `[planes, blocks, heads, words]`."""
    layers, heads = rect.layer_end - rect.layer_start, rect.head_end - rect.head_start
    return words(memory, layers, num_blocks, heads)


def frame_slices(rect: Rect, owner: Rect) -> tuple[slice, slice, slice]:
    """`rect` as an index into `[planes, blocks, heads]` of the rank that owns `owner`."""
    layers = rect.layer_start - owner.layer_start, rect.layer_end - owner.layer_start
    heads = slice(rect.head_start - owner.head_start, rect.head_end - owner.head_start)
    return slice(2 * layers[0], 2 * layers[1]), slice(None), heads
