"""The base of the built-in connectors: connections from source ranks to sink ranks.

    source   submit, ready ──▶ Sender ──▶ SendWorker per sink rank ──▶ Channel ═══╗
    sink     accept ──▶ Receiver ◀── a thread per connection ◀── PipeServer ◀═════╝

A subclass says how to listen and connect, how a source introduces itself, and how payloads move.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from pdserve.common.core.errors import Blame, ConfigError, TransferError
from pdserve.common.core.throttle import LogThrottle
from pdserve.kv_transfer.connector import (
    BlockRun,
    KVConnector,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.channel import (
    NO_HASH,
    Channel,
    FrameHash,
    Heartbeat,
    Mover,
    as_transfer_error,
    wanted_hash,
)
from pdserve.kv_transfer.connectors.base.handshake import (
    check_fingerprint,
    expect_welcome,
    greeting_limit,
    recv_frame,
    recv_greeting,
)
from pdserve.kv_transfer.connectors.base.proof import (
    Keys,
    ProofExchange,
    check_sink,
    check_source,
    prove_source,
    refuse_challenge,
)
from pdserve.kv_transfer.connectors.base.receiver import InboundTransfer, Receiver
from pdserve.kv_transfer.connectors.base.sender import Sender
from pdserve.kv_transfer.connectors.base.server import PipeServer
from pdserve.kv_transfer.frame import Frame, FrameKind, bad_frame
from pdserve.kv_transfer.layout import Rect
from pdserve.kv_transfer.pipe import KVPipe, PipeListener

logger = logging.getLogger(__name__)


class P2PConnector(KVConnector):
    """Connects ranks to each other and speaks the protocol of `kv_transfer/frame.py`."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        device = context.view.cache.device.type
        if device not in self.capabilities.devices:
            raise ConfigError(
                f"{type(self).__name__} cannot move KV of a {device} cache: "
                "choose another --kv-connector (tcp can)"
            )
        self.receiver = Receiver(context.view, context.emit)
        self.sender = Sender(self.dial, context)
        self._server: PipeServer | None = None
        self._refusals = LogThrottle(logger)
        self._starting = threading.Lock()

    @abstractmethod
    def listen(self, host: str) -> PipeListener:
        """Sink: makes the listener to which its sources connect."""

    @abstractmethod
    def connect(self, endpoint: bytes) -> KVPipe:
        """Source: connects to a sink. Raises OSError or TransferError."""

    @abstractmethod
    def introduce(self, pipe: KVPipe) -> None:
        """Source: sends HELLO."""

    @abstractmethod
    def mover(self, pipe: KVPipe) -> Mover:
        """Source: makes the mover for a sink that has just welcomed it."""

    @abstractmethod
    def welcome(self, pipe: KVPipe, hello: bytes) -> Mover:
        """Sink: answers the payload of a HELLO, after calling `admit`, and makes the mover for this
        source.

        Raises:
            TransferError: the source is refused, or its HELLO is invalid.
        """

    @property
    def keys(self) -> Keys:
        """Returns the keys that both ends prove to know before HELLO; empty: they prove nothing."""
        return self.context.keys

    @property
    def counts(self) -> Counter[str]:
        """Counts late, duplicate, foreign and drained frames, refused and ended connections, and
        bytes."""
        return self.receiver.counts

    # ---- source ----

    def submit(self, transfer: SourceTransfer) -> None:
        self.sender.submit(transfer)

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self.sender.ready(transfer_id, run, block_ids, last)

    @property
    def hashes_as_it_sends(self) -> bool:
        """Returns False where layers have streams of their own: small runs, which the core hashes,
        would be cut into other parts."""
        on_host = self.context.view.cache.device.type == "cpu"
        return self.capabilities.source_hashes and on_host and self.sender.streams == 1

    def ready_hashed(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        self.sender.ready(transfer_id, run, block_ids, last, hashed=True)

    def dial(self, endpoint: bytes) -> Channel:
        """Connects and introduces itself. Raises OSError or TransferError."""
        pipe = self.connect(endpoint)
        try:
            with greeting_limit(pipe, Blame.DECODE):
                self._greet(pipe, endpoint)
            return Channel(pipe, self.context.view, self.mover(pipe))
        except BaseException:
            pipe.close()
            raise

    def _greet(self, pipe: KVPipe, endpoint: bytes) -> None:
        """Sends HELLO right after the source's proof, without waiting for the sink's proof."""
        exchange = prove_source(pipe, self.keys, endpoint) if self.keys else None
        try:
            self.introduce(pipe)
        except ConnectionError:
            with suppress(OSError):
                self._expect_welcome(pipe, exchange)  # a sink that refused may have said why
            raise
        self._expect_welcome(pipe, exchange)

    def _expect_welcome(self, pipe: KVPipe, exchange: ProofExchange | None) -> None:
        if exchange is not None:
            check_sink(pipe, self.keys, exchange)
        expect_welcome(pipe)

    # ---- sink ----

    def endpoint(self) -> bytes:
        with self._starting:
            if self._server is None:
                listener = self.listen(self.context.bind_host)
                self._server = PipeServer(listener, self._serve, self.counts)
            return self._server.endpoint

    def accept(self, transfer: SinkTransfer) -> None:
        self.receiver.accept(transfer)

    def landed_digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
    ) -> bytes | None:
        return self.receiver.landed_digest(transfer_id, epoch, rect, run)

    def _serve(self, pipe: KVPipe) -> None:
        pipe.on_moved = Heartbeat(partial(self.receiver.moving, pipe))
        try:
            self._receive(pipe)
        except Exception as error:
            typed = as_transfer_error(error, Blame.PREFILL)
            self.counts[typed.code] += 1
            if typed.code != "PEER_LOST":  # as every connection ends
                self._refusals.warning("a KV connection was refused: %s", typed)
            self.receiver.disconnected(pipe, typed)

    def _receive(self, pipe: KVPipe) -> None:
        """Admits the source behind `pipe` and takes its blocks until it leaves (OSError) or
        violates the protocol (TransferError)."""
        with greeting_limit(pipe, Blame.PREFILL):
            hello = self._recv_hello(pipe)
        mover = self.welcome(pipe, hello)
        while True:
            pipe.wait()
            frame = recv_frame(pipe)
            if frame.nbytes > self.context.view.cache.nbytes:
                raise bad_frame(f"{frame.nbytes} bytes are more than this rank's cache")
            if frame.kind is FrameKind.BEGIN and not frame.nbytes:
                self.receiver.begin(frame, pipe)
            elif frame.kind is mover.kind:
                self._take(pipe, frame, mover)
            else:
                does = "pushes" if mover.kind is FrameKind.DATA else "offers"
                raise bad_frame(f"{frame.kind.name} from a source that {does}")

    def _recv_hello(self, pipe: KVPipe) -> bytes:
        """Checks that the source knows the cluster's key, if there is one; returns the payload of
        its HELLO."""
        if self.keys:
            check_source(pipe, self.keys, self.endpoint())
            self._known(pipe)
        hello, payload = recv_greeting(pipe, Blame.PREFILL)
        if hello.kind is FrameKind.CHALLENGE:
            raise refuse_challenge(pipe)
        if hello.kind is not FrameKind.HELLO:
            raise bad_frame(f"{hello.kind.name} before HELLO")
        return payload

    def admit(self, pipe: KVPipe, fingerprint: str) -> None:
        """Sink: marks the source as known. Raises TransferError after refusing one with another
        fingerprint."""
        check_fingerprint(pipe, self.context.fingerprint, fingerprint)
        self._known(pipe)

    def _known(self, pipe: KVPipe) -> None:
        if self._server is not None:
            self._server.known(pipe)

    def _take(self, pipe: KVPipe, frame: Frame, mover: Mover) -> None:
        """Receives a frame. Its blocks count once it is certain that the source held them while
        their bytes moved: the mover knows it, or the source confirms it."""
        inbound = self.receiver.admit(frame, pipe)
        settled = inbound is None
        if inbound is None:
            mover.drain(frame)
        else:
            mover.check(frame)
            mover.hash = hash_ = self._landing_hash(frame, inbound)

            def settle() -> None:
                nonlocal settled
                settled = True
                self._settle(frame, inbound, hash_, held=True)

            mover.on_counted = settle
            moved = mover.recv(frame, inbound.block_ids(frame), inbound.gate)
            settled = settled or not moved
        confirm = recv_frame(pipe)
        if confirm.kind is not FrameKind.CONFIRM or confirm.nbytes:
            raise bad_frame(f"{confirm.kind.name} where CONFIRM was due")
        if inbound is not None and not settled:
            self._settle(frame, inbound, mover.hash, held=confirm.count == 1)

    def _landing_hash(self, frame: Frame, inbound: InboundTransfer) -> FrameHash:
        if not (inbound.transfer.digests and self.capabilities.sink_writes):
            return NO_HASH
        return wanted_hash(self.context.fingerprint, frame)

    def _settle(self, frame: Frame, inbound: InboundTransfer, hash_: FrameHash, held: bool) -> None:
        """Counts the frame, unless its transfer was cancelled meanwhile."""
        with inbound.gate.passage() as admitted:
            if admitted and held:
                self.receiver.landed(inbound, frame, hash_.made)
            elif admitted:
                self.receiver.fail(frame.transfer_id, _expired())

    # ---- both ----

    def quiesce(self, transfer_id: bytes) -> None:
        self.receiver.forget(transfer_id)
        self.sender.forget(transfer_id)

    def close(self, deadline: float) -> None:
        self.sender.close(deadline)
        if self._server is not None:
            self._server.close(deadline)


def _expired() -> TransferError:
    return TransferError(
        "the prefill rank freed its blocks while they were read",
        code="EXPIRED",
        blame=Blame.PREFILL,
        retryable=True,
    )
