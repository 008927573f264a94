"""Moves blocks over any `KVPipe`: the source pushes, frame by frame (see `frame.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.core.printable import MAX_PEER_TEXT, peer_code, printable
from pdserve.kv_transfer.blocks import byte_runs, gather, memory_of, piece_nbytes, scatter
from pdserve.kv_transfer.connector import Capabilities, RankContext
from pdserve.kv_transfer.connectors.base.frame import (
    HEADER_NBYTES,
    MAX_GREETING,
    Frame,
    Kind,
    bad_frame,
)
from pdserve.kv_transfer.connectors.base.intake import Incoming, Intake
from pdserve.kv_transfer.connectors.base.linked import LinkedConnector
from pdserve.kv_transfer.connectors.base.links import FRAME_NBYTES, Channel
from pdserve.kv_transfer.connectors.base.server import time_limit
from pdserve.kv_transfer.connectors.base.sockets import scratch
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView
from pdserve.kv_transfer.pipe import KVPipe, PipeListener, PipeTransport, recv_bytes, send_bytes

GREETING_S = 5.0  # in which a peer must have said who it is


def send_frame(pipe: KVPipe, frame: Frame, payload: bytes = b"") -> None:
    send_bytes(pipe, replace(frame, nbytes=len(payload)).encode())
    if payload:
        send_bytes(pipe, payload)


def recv_frame(pipe: KVPipe) -> Frame:
    return Frame.decode(recv_bytes(pipe, HEADER_NBYTES))


def next_frame(pipe: KVPipe) -> Frame:
    """Sink: when the source has something to say."""
    pipe.wait()
    return recv_frame(pipe)


def recv_greeting(pipe: KVPipe, blame: Blame) -> tuple[Frame, bytes]:
    """The first frame of a connection, with its (small) payload.

    Raises:
        TransferError: BAD_FRAME, or CONNECT_FAILED when it takes longer than GREETING_S.
    """
    with time_limit(pipe, GREETING_S, blame):
        frame = recv_frame(pipe)
        if frame.nbytes > MAX_GREETING:
            raise bad_frame(f"a greeting of {frame.nbytes} bytes", blame)
        return frame, recv_bytes(pipe, frame.nbytes)


def expect_welcome(pipe: KVPipe) -> None:
    """Source: raises TransferError when the sink refused this rank."""
    frame, payload = recv_greeting(pipe, Blame.DECODE)
    if frame.kind is not Kind.WELCOME:
        code, _, message = payload.decode(errors="replace").partition(": ")
        raise refusal(peer_code(code), printable(message, MAX_PEER_TEXT))


def welcome(pipe: KVPipe, ours: str, theirs: str) -> None:
    """Sink: answers a HELLO; raises TransferError after refusing another fingerprint."""
    if theirs != ours:
        message = f"fingerprint {theirs} ≠ {ours}: the nodes serve different models or layouts"
        raise refused(pipe, "FINGERPRINT_MISMATCH", message)
    send_frame(pipe, Frame(Kind.WELCOME))


def refused(pipe: KVPipe, code: str, message: str) -> TransferError:
    """Sink: tells the source why; returns the error for this end."""
    send_frame(pipe, Frame(Kind.REFUSED), f"{code}: {message}".encode())
    return refusal(code, message)


def refusal(code: str, message: str) -> TransferError:
    return TransferError(message, code=code, blame=Blame.PREFILL, retryable=False)


class Mover(ABC):
    """Moves the payload of DATA frames. Belongs to one connection and its thread.

    A frame is moved to its end, whatever becomes of its transfer. Blocks are touched inside the
    gate alone, and nobody waits for the peer there: once it is shut, other memory takes their
    place.
    """

    @abstractmethod
    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        """Whether all that was sent are the blocks' bytes."""

    @abstractmethod
    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        """Whether all bytes are in the blocks."""

    @abstractmethod
    def drain(self, frame: Frame) -> None:
        """Takes a payload nobody wants, in bounded memory."""


class PipeMover(Mover):
    """Through the pipe: straight from and into the blocks on a CPU, through a pinned host
    buffer on a GPU."""

    def __init__(self, view: CacheView, pipe: KVPipe) -> None:
        self._view = view
        self._pipe = pipe
        self._on_host = view.cache.device.type == "cpu"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @cached_property
    def _memory(self) -> memoryview:
        return memory_of(self._view.cache)

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        if self._on_host:
            runs = byte_runs(self._view, frame.rect, block_ids)
            return self._pipe.send_blocks(self._memory, runs, gate)
        staged = self._staging(frame.nbytes)
        with gate.passage() as admitted:
            if admitted:
                data = gather(self._view, frame.rect, block_ids)
                staged.copy_(data.view(torch.uint8).reshape(-1))  # waits for the device
        self._pipe.send_tensor(staged)
        return admitted

    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        if self._on_host:
            runs = byte_runs(self._view, frame.rect, block_ids)
            return self._pipe.recv_blocks(self._memory, runs, gate)
        staged = self._staging(frame.nbytes)
        self._pipe.recv_tensor(staged)
        with gate.passage() as admitted:
            if admitted:
                scatter(self._view, frame.rect, block_ids, staged)
                torch.cuda.current_stream(self._view.cache.device).synchronize()
        return admitted

    def drain(self, frame: Frame) -> None:
        drain(self._pipe, frame.nbytes)

    def _staging(self, nbytes: int) -> torch.Tensor:
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer[:nbytes]


class PipeChannel(Channel):
    """A pipe whose sink has welcomed this rank."""

    def __init__(self, pipe: KVPipe, view: CacheView, mover: Mover) -> None:
        self._pipe = pipe
        self._view = view
        self._mover = mover

    def begin(self, frame: Frame) -> None:
        send_frame(self._pipe, frame)

    def deliver(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> int:
        if not gate.is_open:
            return 0
        nbytes = piece_nbytes(self._view.cache, frame.rect, frame.count)
        frame = replace(frame, nbytes=nbytes)
        send_bytes(self._pipe, frame.encode())
        whole = self._mover.send(frame, block_ids, gate)
        send_frame(self._pipe, replace(frame, kind=Kind.CONFIRM, count=int(whole)))
        return nbytes if whole else 0

    def watch(self, on_moved: Callable[[], None]) -> None:
        self._pipe.on_moved = on_moved

    def alive(self) -> bool:
        return self._pipe.alive()

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()


class PipeConnector(LinkedConnector):
    """A connector over `transport(config)`, which is all a subclass must say; one whose
    payloads take another way than the pipe overrides `mover`."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        push=True, devices=frozenset({"cpu", "cuda"})
    )

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self._transport = self.transport(config)
        self._links.streams = self._transport.streams

    @abstractmethod
    def transport(self, config: Mapping[str, Any]) -> PipeTransport:
        """Raises ConfigError on unknown keys."""

    def mover(self, pipe: KVPipe) -> Mover:
        """How payloads travel on a connection that was just welcomed; called at both ends."""
        return PipeMover(self.context.view, pipe)

    def listen(self, host: str) -> PipeListener:
        return self._transport.listen(host)

    def dial(self, endpoint: bytes) -> PipeChannel:
        pipe = self._transport.dial(endpoint)
        try:
            send_frame(pipe, Frame(Kind.HELLO), self.context.fingerprint.encode())
            expect_welcome(pipe)
            return PipeChannel(pipe, self.context.view, self.mover(pipe))
        except BaseException:
            pipe.close()
            raise

    def serve(self, pipe: KVPipe) -> None:
        hello, fingerprint = recv_greeting(pipe, Blame.PREFILL)
        if hello.kind is not Kind.HELLO:
            raise bad_frame(f"{hello.kind.name} before HELLO")
        welcome(pipe, self.context.fingerprint, fingerprint.decode(errors="replace"))
        mover = self.mover(pipe)
        while True:
            frame = next_frame(pipe)
            if frame.nbytes > self.context.view.cache.nbytes:
                raise bad_frame(f"{frame.nbytes} bytes are more than this rank's cache")
            if frame.kind is Kind.BEGIN and not frame.nbytes:
                self.intake.begin(frame, pipe)
            elif frame.kind is Kind.DATA:
                self._take(pipe, frame, mover)
            else:
                raise bad_frame(f"{frame.kind.name} from a source that pushes")

    def _take(self, pipe: KVPipe, frame: Frame, mover: Mover) -> None:
        incoming = self._admit(pipe, frame)
        if incoming is None:
            mover.drain(frame)
        elif not mover.recv(frame, incoming.block_ids(frame), incoming.gate):
            incoming = None
        settle(pipe, frame, incoming, self.intake)

    def _admit(self, pipe: KVPipe, frame: Frame) -> Incoming | None:
        incoming = self.intake.admit(frame, pipe)
        if incoming is None:
            return None
        nbytes = piece_nbytes(self.context.view.cache, frame.rect, frame.count)
        if frame.nbytes != nbytes:
            raise bad_frame(f"{frame.nbytes} bytes for {frame.count} blocks of {nbytes} bytes")
        if frame.count > 1 and frame.nbytes > FRAME_NBYTES:  # staging memory is bounded
            raise bad_frame(f"{frame.nbytes} bytes in a frame, more than {FRAME_NBYTES}")
        return incoming


def settle(pipe: KVPipe, frame: Frame, incoming: Incoming | None, intake: Intake) -> None:
    """Sink: hears whether the source held its blocks while their bytes were moved. They are in
    `incoming`'s blocks; None: they were dropped, or the transfer was given up meanwhile."""
    confirm = recv_frame(pipe)
    if confirm.kind is not Kind.CONFIRM or confirm.nbytes:
        raise bad_frame(f"{confirm.kind.name} where CONFIRM was due")
    if incoming is None:
        return
    with incoming.gate.passage() as admitted:
        if admitted and confirm.count == 1:
            intake.landed(incoming, frame)
        elif admitted:
            intake.fail(frame.transfer_id, _expired())


def _expired() -> TransferError:
    return TransferError(
        "the prefill rank freed its blocks while they were read",
        code="EXPIRED",
        blame=Blame.PREFILL,
        retryable=True,
    )


def drain(pipe: KVPipe, nbytes: int) -> None:
    """Reads a payload nobody wants, in bounded memory."""
    for part in scratch(nbytes):
        pipe.recv_tensor(torch.frombuffer(part, dtype=torch.uint8))
