"""Connectors of one host whose sink reads the source's memory, one copy.

The source greets over a Unix socket with what opens its memory and then offers runs. Each run
is confirmed after it was read: had the source freed the blocks meanwhile, the read does not
count. A connector says how memory is shared (`introduce`), opened (`open`) and copied
(`PeerCache.copy`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connectors.base.frame import Frame, Kind, bad_frame
from pdserve.kv_transfer.connectors.base.intake import Incoming
from pdserve.kv_transfer.connectors.base.linked import LinkedConnector
from pdserve.kv_transfer.connectors.base.links import Channel
from pdserve.kv_transfer.connectors.base.pipe_connector import (
    drain,
    expect_welcome,
    next_frame,
    recv_frame,
    recv_greeting,
    send_frame,
    settle,
    welcome,
)
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.base.staging import OwnStream
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.pipe import KVPipe, PipeListener, recv_bytes

CONNECT_TIMEOUT_S = 5.0
MAX_RUN_BLOCKS = 1 << 20


class Greeting(msgspec.Struct):
    """Who the source is; a connector adds how its memory is opened."""

    fingerprint: str
    rect: Rect
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]


class PeerCache(ABC):
    """A source rank's cache, readable for as long as the connection lasts."""

    def __init__(self, greeting: Greeting) -> None:
        self.rect = greeting.rect
        self._num_blocks = greeting.num_blocks

    def check(self, rect: Rect, block_ids: Sequence[int]) -> None:
        """Raises TransferError BAD_FRAME when the source offers what it does not have."""
        if rect.intersect(self.rect) != rect:
            raise bad_frame(f"{rect} is not within the source's {self.rect}")
        if max(block_ids) >= self._num_blocks:
            raise bad_frame(f"block {max(block_ids)} of {self._num_blocks}")

    @abstractmethod
    def copy(self, rect: Rect, source_ids: Sequence[int], sink_ids: Sequence[int]) -> None:
        """Returns when the source's blocks are in this rank's. All arguments are checked."""


class PullConnector(LinkedConnector):
    """Both ranks share a host, a network namespace and a user."""

    @abstractmethod
    def introduce(self, pipe: SocketPipe) -> None:
        """Source: says HELLO with its `Greeting`."""

    @abstractmethod
    def open(self, pipe: SocketPipe, hello: bytes) -> PeerCache:
        """Sink: `welcome`s the source of a HELLO and opens its memory.

        Raises:
            msgspec.DecodeError: this is no greeting.
            TransferError: the source is refused, or what it says cannot be.
        """

    def listen(self, host: str) -> PipeListener:
        return UnixListener()

    # ---- source ----

    def dial(self, endpoint: bytes) -> PullChannel:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(b"\0" + endpoint)
            check_same_user(sock)
            pipe = SocketPipe(sock)
            self.introduce(pipe)
            expect_welcome(pipe)
        except BaseException:
            sock.close()
            raise
        return PullChannel(pipe, self.context.view)

    # ---- sink ----

    def serve(self, pipe: KVPipe) -> None:
        assert isinstance(pipe, SocketPipe)  # our own listener made it
        peer = self._meet(pipe)
        while True:
            frame = next_frame(pipe)
            if frame.kind is Kind.BEGIN:
                self.intake.begin(frame, pipe)
            elif frame.kind is Kind.OFFER:
                self._take(pipe, frame, peer)
            else:
                raise bad_frame(f"{frame.kind.name} from a source that offers")

    def _meet(self, pipe: SocketPipe) -> PeerCache:
        check_same_user(pipe.sock)
        hello, payload = recv_greeting(pipe, Blame.PREFILL)
        if hello.kind is not Kind.HELLO:
            raise bad_frame(f"{hello.kind.name} before HELLO")
        try:
            return self.open(pipe, payload)
        except msgspec.DecodeError as error:
            raise bad_frame(f"greeting: {error}") from error

    def welcome(self, pipe: SocketPipe, greeting: Greeting) -> None:
        """Raises TransferError after refusing another fingerprint."""
        welcome(pipe, self.context.fingerprint, greeting.fingerprint)

    def _take(self, pipe: KVPipe, frame: Frame, peer: PeerCache) -> None:
        if frame.nbytes != 4 * frame.count or frame.count > MAX_RUN_BLOCKS:
            raise bad_frame(f"{frame.nbytes} bytes of block ids for {frame.count} blocks")
        incoming = self.intake.admit(frame, pipe)
        if incoming is None:
            drain(pipe, frame.nbytes)
            return self._settle(pipe, frame, None)
        source_ids = np.frombuffer(recv_bytes(pipe, frame.nbytes), dtype=np.uint32).tolist()
        peer.check(frame.rect, source_ids)
        with incoming.gate.passage() as admitted:
            if admitted:
                peer.copy(frame.rect, source_ids, incoming.block_ids(frame))
        return self._settle(pipe, frame, incoming if admitted else None)

    def _settle(self, pipe: KVPipe, frame: Frame, incoming: Incoming | None) -> None:
        """Asks whether the source still held what was read."""
        send_frame(pipe, replace(frame, kind=Kind.TAKEN))
        settle(pipe, frame, incoming, self.intake)


class PullChannel(Channel):
    """Offers runs to a sink that has opened this rank's memory."""

    def __init__(self, pipe: SocketPipe, view: CacheView) -> None:
        self._pipe = pipe
        self._view = view
        self._stream = OwnStream(view.cache.device)

    def begin(self, frame: Frame) -> None:
        send_frame(self._pipe, frame)

    def deliver(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> int:
        """The sink may still be reading when the gate shuts: then the answer is no."""
        if not gate.is_open:
            return 0
        with self._stream.active():
            self._stream.synchronize()  # the device has computed what is offered
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
