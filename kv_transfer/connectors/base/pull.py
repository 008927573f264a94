"""The base of connectors for one host: the sink reads the source's memory with one copy.

The source connects over a Unix socket, sends a handle of its memory, and then offers runs. It
confirms each run after the sink has read it: if it freed the blocks meanwhile, the read does not
count. A connector defines how memory is shared (`introduce`), opened (`open`) and copied
(`PeerCache.copy`).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np

from pdserve.common.core.errors import Blame, ConfigError
from pdserve.kv_transfer.connector import RankContext
from pdserve.kv_transfer.connectors.base.channel import FrameHash, Mover, OwnStream
from pdserve.kv_transfer.connectors.base.handshake import recv_frame, send_frame
from pdserve.kv_transfer.connectors.base.p2p import P2PConnector
from pdserve.kv_transfer.connectors.base.proof import Keys
from pdserve.kv_transfer.connectors.base.sockets import SocketListener, SocketPipe
from pdserve.kv_transfer.frame import Frame, FrameKind, bad_frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.pipe import KVPipe, PipeListener

CONNECT_TIMEOUT_S = 5.0


class Greeting(msgspec.Struct):
    """Introduces a source; a connector adds how its memory is opened."""

    fingerprint: str
    rect: Rect
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]


G = TypeVar("G", bound=Greeting)


class PeerCache(ABC):
    """Reads a source rank's cache, for as long as the connection lasts."""

    def __init__(self, greeting: Greeting) -> None:
        self.rect = greeting.rect
        self._num_blocks = greeting.num_blocks

    def check(self, rect: Rect, block_ids: Sequence[int]) -> None:
        """Raises TransferError BAD_FRAME unless the source has these blocks."""
        if not self.rect.contains(rect):
            raise bad_frame(f"{rect} is not within the source's {self.rect}")
        if max(block_ids) >= self._num_blocks:
            raise bad_frame(f"block {max(block_ids)} of {self._num_blocks}")

    @abstractmethod
    def copy(
        self,
        rect: Rect,
        source_ids: Sequence[int],
        sink_ids: Sequence[int],
        hash_: FrameHash,
    ) -> None:
        """Copies the source's blocks into this rank's, and may make the hash that is wanted.
        All arguments are checked."""

    def held(self, transfer_id: bytes, epoch: int) -> bool:
        """Returns True if the source certainly holds a transfer's blocks now, so that the copy
        counts without its CONFIRM. Default: not known."""
        return False


class PullConnector(P2PConnector, Generic[G]):
    """Connects ranks that share a host, a network namespace and a user."""

    greeting: type[G]  # the payload of HELLO

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        if config:
            raise ConfigError(f"{type(self).__name__} has no option {', '.join(sorted(config))!r}")
        super().__init__(context, config)
        self._hello_decoder = msgspec.msgpack.Decoder(self.greeting)

    @property
    def keys(self) -> Keys:
        """Returns no keys: the kernel says as which user the peer runs."""
        return ()

    @abstractmethod
    def introduce(self, pipe: KVPipe) -> None:
        """Source: sends HELLO with its `Greeting`."""

    @abstractmethod
    def open(self, pipe: SocketPipe, greeting: G) -> PeerCache:
        """Sink: opens the memory of a source with the same fingerprint.

        Raises:
            TransferError: it cannot be opened, or the greeting is invalid.
        """

    def listen(self, host: str) -> PipeListener:
        return UnixListener()

    def connect(self, endpoint: bytes) -> SocketPipe:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(b"\0" + endpoint)
            check_same_user(sock)
        except BaseException:
            sock.close()
            raise
        return SocketPipe(sock)

    def mover(self, pipe: KVPipe) -> Mover:
        return PullMover(self.context.view, pipe, None)

    def welcome(self, pipe: KVPipe, hello: bytes) -> Mover:
        assert isinstance(pipe, SocketPipe)  # our own listener made it
        try:
            greeting = self._hello_decoder.decode(hello)
        except msgspec.DecodeError as error:
            raise bad_frame(f"greeting: {error}") from error
        self.admit(pipe, greeting.fingerprint)
        peer = self.open(pipe, greeting)
        send_frame(pipe, Frame(FrameKind.WELCOME))
        return PullMover(self.context.view, pipe, peer)


class PullMover(Mover):
    """Moves the ids of the source's blocks as the payload of an OFFER. The sink copies the blocks
    from `peer` (None at a source) and answers TAKEN."""

    kind = FrameKind.OFFER
    payload = "block ids"

    def __init__(self, view: CacheView, pipe: KVPipe, peer: PeerCache | None) -> None:
        super().__init__(view, pipe)
        self._peer = peer
        self._stream = OwnStream(view.cache.device)

    def payload_nbytes(self, rect: Rect, count: int) -> int:
        return 4 * count

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        """Offers blocks, and makes the hash of a CPU cache that is wanted while the sink copies:
        both read the same bytes at the same time, and the memory once. The sink may still
        read when the gate closes; then the read does not count."""
        with self._stream.active():
            self._stream.synchronize()  # the device has computed the offered blocks
        self._pipe.send_bytes(_packed(block_ids))
        return self.finish(frame, block_ids, gate)

    def offer(self, block_ids: tuple[int, ...]) -> bytes:
        on_host = self._view.cache.device.type == "cpu"  # nothing computes the blocks any more
        return _packed(block_ids) if on_host else b""

    def finish(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        self.make_hash(frame, block_ids, gate)
        taken = recv_frame(self._pipe)
        if taken.kind is not FrameKind.TAKEN or taken.nbytes:
            raise bad_frame(f"{taken.kind.name} where TAKEN was due", Blame.DECODE)
        return gate.is_open

    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        assert self._peer is not None  # this is a sink
        source_ids = np.frombuffer(self._pipe.recv_bytes(frame.nbytes), dtype=np.uint32).tolist()
        self._peer.check(frame.rect, source_ids)
        with gate.passage() as admitted:
            if admitted:
                self._peer.copy(frame.rect, source_ids, block_ids, self.hash)
        if admitted and self._peer.held(frame.transfer_id, frame.epoch):
            self.on_counted()
        send_frame(self._pipe, replace(frame, kind=FrameKind.TAKEN))
        return admitted

    def drain(self, frame: Frame) -> None:
        super().drain(frame)
        send_frame(self._pipe, replace(frame, kind=FrameKind.TAKEN, count=0))


def _packed(block_ids: Sequence[int]) -> bytes:
    return np.asarray(block_ids, dtype=np.uint32).tobytes()


class UnixListener(SocketListener):
    """Listens on an abstract Unix socket with a random name, which vanishes with the process."""

    def __init__(self) -> None:
        name = b"pdserve-kv-" + secrets.token_hex(16).encode()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(b"\0" + name)
        sock.listen(128)
        super().__init__(sock, name)

    def accept(self) -> SocketPipe:
        """Accepts a connection; one of another user raises ConnectionAbortedError."""
        sock = self._sock.accept()[0]
        try:
            check_same_user(sock)
        except PermissionError as error:
            sock.close()
            raise ConnectionAbortedError(str(error)) from error
        return SocketPipe(sock)


def check_same_user(sock: socket.socket) -> None:
    """Raises PermissionError unless the peer runs as this process's user."""
    size = struct.calcsize("3i")
    peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = struct.unpack("3i", peer)
    if uid != os.geteuid():
        raise PermissionError(f"the peer runs as user {uid}, not {os.geteuid()}")
