"""KV blocks between processes of one host: the sink reads the source's memory, one copy.

The source passes a read-only descriptor of the memory file behind its cache; nothing has a
name in /dev/shm, and nobody can write into another process's memory. Each run is confirmed
after it was read: had the source freed the blocks meanwhile, the read does not count.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.core.errors import Blame, ConfigError, TransferError
from kv_transfer.blocks import copy_blocks, memory_of, piece_nbytes, words
from kv_transfer.connector import Capabilities, RankContext
from kv_transfer.connectors.intake import Incoming
from kv_transfer.connectors.linked import LinkedConnector
from kv_transfer.connectors.links import Channel
from kv_transfer.connectors.pipe_connector import (
    drain,
    expect_welcome,
    recv_frame,
    recv_greeting,
    send_frame,
    welcome,
)
from kv_transfer.connectors.sockets import SocketPipe
from kv_transfer.frame import Frame, Kind, bad_frame
from kv_transfer.gate import Gate
from kv_transfer.layout import CacheView, Rect
from kv_transfer.pipe import KVPipe, PipeListener, recv_bytes

CONNECT_TIMEOUT_S = 5.0
MAX_RUN_BLOCKS = 1 << 20


class Greeting(msgspec.Struct):
    """Who the source is and what its memory file holds."""

    fingerprint: str
    rect: Rect
    num_blocks: int
    offset: int  # of the cache in the file
    nbytes: int  # of the cache


class ShmConnector(LinkedConnector):
    """Takes no options. Both ranks share a host, a network namespace and a user."""

    capabilities: ClassVar[Capabilities] = Capabilities(pull=True, one_sided=True, same_host=True)

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        if config:
            raise ConfigError(f"the shm connector has no option {', '.join(sorted(config))!r}")
        super().__init__(context, config)
        view = context.view
        layers, _, num_blocks, heads, _, _ = view.cache.shape
        self._words = words(memory_of(view.cache), layers, num_blocks, heads)

    def listen(self, host: str) -> PipeListener:
        return UnixListener()

    # ---- source ----

    def dial(self, endpoint: bytes) -> ShmChannel:
        shared_fd = self.context.view.shared_fd
        assert shared_fd is not None  # build_rank saw to it
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(b"\0" + endpoint)
            check_same_user(sock)
            pipe = SocketPipe(sock)
            self._greet(pipe, shared_fd)
        except BaseException:
            sock.close()
            raise
        return ShmChannel(pipe, self.context.view)

    def _greet(self, pipe: SocketPipe, shared_fd: int) -> None:
        view = self.context.view
        geometry = (view.cache.shape[2], view.shared_offset, view.cache.nbytes)
        greeting = Greeting(self.context.fingerprint, view.rect, *geometry)
        send_frame(pipe, Frame(Kind.HELLO), msgspec.msgpack.encode(greeting))
        readable = os.open(f"/proc/self/fd/{shared_fd}", os.O_RDONLY)
        try:
            socket.send_fds(pipe.sock, [b"F"], [readable])
        finally:
            os.close(readable)
        expect_welcome(pipe)

    # ---- sink ----

    def serve(self, pipe: KVPipe) -> None:
        assert isinstance(pipe, SocketPipe)  # our own listener made it
        peer = self._meet(pipe)
        while True:
            frame = recv_frame(pipe)
            if frame.kind is Kind.BEGIN:
                self.intake.begin(frame, pipe)
            elif frame.kind is Kind.OFFER:
                self._take(pipe, frame, peer)
            else:
                raise bad_frame(f"{frame.kind.name} from a source that offers")

    def _meet(self, pipe: SocketPipe) -> Peer:
        check_same_user(pipe.sock)
        hello, payload = recv_greeting(pipe, Blame.PREFILL)
        if hello.kind is not Kind.HELLO:
            raise bad_frame(f"{hello.kind.name} before HELLO")
        try:
            greeting = msgspec.msgpack.decode(payload, type=Greeting)
        except msgspec.DecodeError as error:
            raise bad_frame(f"greeting: {error}") from error
        _, fds, _, _ = socket.recv_fds(pipe.sock, 1, 1)
        if len(fds) != 1:
            raise bad_frame("no memory came with the greeting")
        try:
            welcome(pipe, self.context.fingerprint, greeting.fingerprint)
            return Peer(greeting, fds[0], piece_nbytes(self.context.view.cache, greeting.rect, 1))
        finally:
            os.close(fds[0])

    def _take(self, pipe: KVPipe, frame: Frame, peer: Peer) -> None:
        if frame.nbytes != 4 * frame.count or frame.count > MAX_RUN_BLOCKS:
            raise bad_frame(f"{frame.nbytes} bytes of block ids for {frame.count} blocks")
        incoming = self.intake.admit(frame, pipe)
        if incoming is None:
            drain(pipe, frame.nbytes)
            return self._settle(pipe, frame, None)
        source_ids = np.frombuffer(recv_bytes(pipe, frame.nbytes), dtype=np.uint32)
        part = peer.part(frame.rect, source_ids)
        with incoming.gate.passage(lambda: None) as admitted:
            if admitted:
                target = self._words[frame_slices(frame.rect, self.context.view.rect)]
                copy_blocks(target, part, incoming.block_ids(frame), source_ids.tolist())
        return self._settle(pipe, frame, incoming if admitted else None)

    def _settle(self, pipe: KVPipe, frame: Frame, incoming: Incoming | None) -> None:
        """Asks whether the source still held what was read."""
        send_frame(pipe, replace(frame, kind=Kind.TAKEN))
        confirm = recv_frame(pipe)
        if confirm.kind is not Kind.CONFIRM or confirm.nbytes:
            raise bad_frame(f"{confirm.kind.name} where CONFIRM was due")
        if incoming is None:
            return
        if confirm.count == 1:
            self.intake.landed(incoming, frame)
            return
        expired = TransferError(
            "the prefill rank freed its blocks while they were read",
            code="EXPIRED",
            blame=Blame.PREFILL,
            retryable=True,
        )
        self.intake.fail(frame.transfer_id, expired)


class ShmChannel(Channel):
    """Offers runs to a sink that has mapped this rank's memory."""

    def __init__(self, pipe: SocketPipe, view: CacheView) -> None:
        self._pipe = pipe
        self._view = view

    def begin(self, frame: Frame) -> None:
        send_frame(self._pipe, frame)

    def deliver(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> int:
        """The sink may still be reading when the gate shuts: then the answer is no."""
        if not gate.is_open:
            return 0
        ids = np.asarray(block_ids, dtype=np.uint32).tobytes()
        send_frame(self._pipe, replace(frame, kind=Kind.OFFER), ids)
        taken = recv_frame(self._pipe)
        if taken.kind is not Kind.TAKEN or taken.nbytes:
            raise bad_frame(f"{taken.kind.name} where TAKEN was due", Blame.DECODE)
        send_frame(self._pipe, replace(frame, kind=Kind.CONFIRM, count=int(gate.is_open)))
        return piece_nbytes(self._view.cache, frame.rect, frame.count)

    def alive(self) -> bool:
        return self._pipe.alive()

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()


class Peer:
    """A source rank's cache, mapped read-only for as long as the connection lasts."""

    def __init__(self, greeting: Greeting, fd: int, block_nbytes: int) -> None:
        end = greeting.offset + greeting.nbytes
        if block_nbytes == 0 or greeting.offset < 0:
            raise bad_frame(f"{greeting.rect} at {greeting.offset} is no cache")
        if greeting.nbytes != block_nbytes * greeting.num_blocks:
            raise bad_frame(f"a cache of {greeting.nbytes} bytes does not fit its geometry")
        if os.fstat(fd).st_size < end:
            raise bad_frame(f"the memory file ends before byte {end}")
        self._rect = greeting.rect
        self._num_blocks = greeting.num_blocks
        mapped = memoryview(mmap.mmap(fd, end, prot=mmap.PROT_READ))[greeting.offset :]
        layers = greeting.rect.layer_end - greeting.rect.layer_start
        heads = greeting.rect.head_end - greeting.rect.head_start
        self._words = words(mapped, layers, greeting.num_blocks, heads)

    def part(self, rect: Rect, block_ids: NDArray[np.uint32]) -> NDArray[Any]:
        """The planes and heads of `rect`, after checking what the source says it offers."""
        if rect.intersect(self._rect) != rect:
            raise bad_frame(f"{rect} is not within the source's {self._rect}")
        if block_ids.max() >= self._num_blocks:
            raise bad_frame(f"block {block_ids.max()} of {self._num_blocks}")
        return self._words[frame_slices(rect, self._rect)]


def frame_slices(rect: Rect, owner: Rect) -> tuple[slice, slice, slice]:
    """`rect` as an index into `[planes, blocks, heads]` of the rank that owns `owner`."""
    layers = rect.layer_start - owner.layer_start, rect.layer_end - owner.layer_start
    heads = slice(rect.head_start - owner.head_start, rect.head_end - owner.head_start)
    return slice(2 * layers[0], 2 * layers[1]), slice(None), heads


class UnixListener(PipeListener):
    """An abstract Unix socket with a random name: it is gone with the process."""

    def __init__(self) -> None:
        self._endpoint = b"pdserve-kv-" + secrets.token_hex(16).encode()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(b"\0" + self._endpoint)
        self._sock.listen(128)

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def accept(self) -> SocketPipe:
        return SocketPipe(self._sock.accept()[0])

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def check_same_user(sock: socket.socket) -> None:
    """Raises PermissionError unless the peer runs as this process's user."""
    size = struct.calcsize("3i")
    peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", peer)
    if uid != os.geteuid():
        raise PermissionError(f"the peer runs as user {uid}, not {os.geteuid()}")
