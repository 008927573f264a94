"""Moves blocks over any `KVPipe`: the source pushes, frame by frame (`kv_transfer/frame.py`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from common.core.errors import Blame, TransferError
from kv_transfer.blocks import byte_runs, gather, memory_of, piece_nbytes, scatter
from kv_transfer.connector import Capabilities, RankContext
from kv_transfer.connectors.intake import Incoming
from kv_transfer.connectors.linked import LinkedConnector
from kv_transfer.connectors.links import Channel
from kv_transfer.frame import HEADER_NBYTES, MAX_GREETING, Frame, Kind, bad_frame
from kv_transfer.gate import Gate
from kv_transfer.layout import CacheView
from kv_transfer.pipe import KVPipe, PipeListener, PipeTransport, recv_bytes, send_bytes

SCRATCH_NBYTES = 1 << 20


def send_frame(pipe: KVPipe, frame: Frame, payload: bytes = b"") -> None:
    send_bytes(pipe, replace(frame, nbytes=len(payload)).encode())
    if payload:
        send_bytes(pipe, payload)


def recv_frame(pipe: KVPipe) -> Frame:
    return Frame.decode(recv_bytes(pipe, HEADER_NBYTES))


def recv_greeting(pipe: KVPipe, blame: Blame) -> tuple[Frame, bytes]:
    """The first frame of a connection, with its (small) payload."""
    frame = recv_frame(pipe)
    if frame.nbytes > MAX_GREETING:
        raise bad_frame(f"a greeting of {frame.nbytes} bytes", blame)
    return frame, recv_bytes(pipe, frame.nbytes)


def expect_welcome(pipe: KVPipe) -> None:
    """Source: raises TransferError when the sink refused this rank."""
    frame, payload = recv_greeting(pipe, Blame.DECODE)
    if frame.kind is not Kind.WELCOME:
        raise TransferError(
            payload.decode(errors="replace"),
            code="FINGERPRINT_MISMATCH",
            blame=Blame.PREFILL,
            retryable=False,
        )


def welcome(pipe: KVPipe, ours: str, theirs: str) -> None:
    """Sink: answers a HELLO; raises TransferError after refusing another fingerprint."""
    if theirs == ours:
        send_frame(pipe, Frame(Kind.WELCOME))
        return
    message = f"fingerprint {theirs} ≠ {ours}: the nodes serve different models or layouts"
    send_frame(pipe, Frame(Kind.REFUSED), message.encode())
    raise TransferError(message, code="FINGERPRINT_MISMATCH", blame=Blame.PREFILL, retryable=False)


class Mover:
    """Moves pieces of a cache over a pipe: straight from and into the blocks on a CPU, through
    a pinned host buffer on a GPU. Belongs to one connection and its thread."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self._on_host = view.cache.device.type == "cpu"
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @cached_property
    def _memory(self) -> memoryview:
        return memory_of(self._view.cache)

    def send(self, pipe: KVPipe, frame: Frame, block_ids: tuple[int, ...]) -> None:
        if self._on_host:
            return pipe.send_runs(self._memory, byte_runs(self._view, frame.rect, block_ids))
        staged = self._staging(frame.nbytes)
        data = gather(self._view, frame.rect, block_ids)
        staged.copy_(data.view(torch.uint8).reshape(-1))  # waits for the device
        return pipe.send_tensor(staged)

    def recv(self, pipe: KVPipe, frame: Frame, block_ids: tuple[int, ...]) -> None:
        if self._on_host:
            return pipe.recv_runs(self._memory, byte_runs(self._view, frame.rect, block_ids))
        staged = self._staging(frame.nbytes)
        pipe.recv_tensor(staged)
        scatter(self._view, frame.rect, block_ids, staged)
        return torch.cuda.current_stream(self._view.cache.device).synchronize()

    def _staging(self, nbytes: int) -> torch.Tensor:
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer[:nbytes]


class PipeChannel(Channel):
    """A pipe whose sink has welcomed this rank."""

    def __init__(self, pipe: KVPipe, view: CacheView) -> None:
        self._pipe = pipe
        self._view = view
        self._mover = Mover(view)

    def begin(self, frame: Frame) -> None:
        send_frame(self._pipe, frame)

    def deliver(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> int:
        nbytes = piece_nbytes(self._view.cache, frame.rect, frame.count)
        frame = replace(frame, nbytes=nbytes)
        with gate.passage(self._pipe.interrupt) as admitted:
            if not admitted:
                return 0
            send_bytes(self._pipe, frame.encode())
            self._mover.send(self._pipe, frame, block_ids)
        return nbytes

    def alive(self) -> bool:
        return self._pipe.alive()

    def interrupt(self) -> None:
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()


class PipeConnector(LinkedConnector):
    """A connector over `transport(config)`, which is all a subclass must say."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        push=True, devices=frozenset({"cpu", "cuda"})
    )

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self._transport = self.transport(config)

    @abstractmethod
    def transport(self, config: Mapping[str, Any]) -> PipeTransport:
        """Raises ConfigError on unknown keys."""

    def listen(self, host: str) -> PipeListener:
        return self._transport.listen(host)

    def dial(self, endpoint: bytes) -> PipeChannel:
        pipe = self._transport.dial(endpoint)
        try:
            send_frame(pipe, Frame(Kind.HELLO), self.context.fingerprint.encode())
            expect_welcome(pipe)
        except BaseException:
            pipe.close()
            raise
        return PipeChannel(pipe, self.context.view)

    def serve(self, pipe: KVPipe) -> None:
        hello, fingerprint = recv_greeting(pipe, Blame.PREFILL)
        if hello.kind is not Kind.HELLO:
            raise bad_frame(f"{hello.kind.name} before HELLO")
        welcome(pipe, self.context.fingerprint, fingerprint.decode(errors="replace"))
        mover = Mover(self.context.view)
        while True:
            frame = recv_frame(pipe)
            if frame.kind is Kind.BEGIN:
                self.intake.begin(frame, pipe)
            elif frame.kind is Kind.DATA:
                self._take(pipe, frame, mover)
            else:
                raise bad_frame(f"{frame.kind.name} from a source that pushes")

    def _take(self, pipe: KVPipe, frame: Frame, mover: Mover) -> None:
        incoming = self._admit(pipe, frame)
        if incoming is None:
            return drain(pipe, frame.nbytes)
        with incoming.gate.passage(pipe.interrupt) as admitted:
            if admitted:
                mover.recv(pipe, frame, incoming.block_ids(frame))
                self.intake.landed(incoming, frame)
        return None if admitted else drain(pipe, frame.nbytes)

    def _admit(self, pipe: KVPipe, frame: Frame) -> Incoming | None:
        incoming = self.intake.admit(frame, pipe)
        if incoming is None:
            return None
        nbytes = piece_nbytes(self.context.view.cache, frame.rect, frame.count)
        if frame.nbytes != nbytes:
            raise bad_frame(f"{frame.nbytes} bytes for {frame.count} blocks of {nbytes} bytes")
        return incoming


def drain(pipe: KVPipe, nbytes: int) -> None:
    """Reads a payload nobody wants, in bounded memory."""
    scratch = torch.empty(min(nbytes, SCRATCH_NBYTES), dtype=torch.uint8)
    while nbytes > 0:
        part = scratch[:nbytes]
        pipe.recv_tensor(part)
        nbytes -= len(part)
