"""A connection between two ranks after their greeting, and the movers of its payloads.

Headers always go through the pipe. A `Mover` moves the payload of a frame: the bytes themselves,
through the pipe or beside it, or only the ids of blocks that the sink reads by itself.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeAlias

import torch

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.blocks import (
    BlockLayout,
    CacheBytes,
    RunsHash,
    byte_runs,
    gather,
    hash_blocks,
    memory_of,
    piece_nbytes,
    plane_runs,
    scatter,
)
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.connectors.base.handshake import send_frame
from pdserve.kv_transfer.connectors.base.sockets import MoveBlocks, SocketPipe, scratch
from pdserve.kv_transfer.digest import hash_prefix
from pdserve.kv_transfer.frame import Frame, FrameKind, bad_frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.pipe import KVPipe

FRAME_NBYTES = 16 << 20  # of a frame's payload at most, unless one block is larger
PART_NBYTES = 64 << 20  # of one staging tensor; both ends of a pair must cut runs alike
# A payload up to this size is sent together with its header. A larger one follows it, so that the
# sink receives while the source still sends.
JOINED_NBYTES = 16 << 10
HEARTBEAT_S = 0.1  # between two reports of a long frame; leases are longer

logger = logging.getLogger(__name__)

Payload: TypeAlias = bytes


@dataclass(slots=True)
class FrameHash:
    """Takes the hash of a frame, which a mover makes as it sends or writes it."""

    prefix: bytes | None  # None: it is not wanted
    made: bytes | None = None


NO_HASH = FrameHash(None)


def wanted_hash(fingerprint: str, frame: Frame) -> FrameHash:
    run = BlockRun(frame.first, frame.count)
    return FrameHash(hash_prefix(fingerprint, frame.transfer_id, frame.epoch, frame.rect, run))


class Mover(ABC):
    """Moves the payload of frames of one kind. It belongs to one connection and its thread.

    A frame is moved to its end even if its transfer was cancelled. Blocks are touched only inside
    the gate, where a thread does not wait for the peer; once the gate is closed, other memory is
    moved instead.
    """

    kind: ClassVar[FrameKind] = FrameKind.DATA
    payload: ClassVar[str] = "KV"
    in_pipe: ClassVar[bool] = True  # the payload goes through the pipe

    def __init__(self, view: CacheView, pipe: KVPipe) -> None:
        self._view = view
        self._pipe = pipe
        # For the present frame:
        self.on_counted: Callable[[], None] = lambda: None
        self.hash = NO_HASH

    def payload_nbytes(self, rect: Rect, count: int) -> int:
        """Returns the payload's size for `count` blocks of a piece."""
        return piece_nbytes(self._view.cache, rect, count)

    def check(self, frame: Frame) -> None:
        """Sink: raises TransferError BAD_FRAME when the payload has a wrong size."""
        if frame.nbytes != self.payload_nbytes(frame.rect, frame.count):
            raise bad_frame(f"{frame.nbytes} bytes of {self.payload} for {frame.count} blocks")
        if frame.count > 1 and frame.nbytes > FRAME_NBYTES:  # staging memory is bounded
            raise bad_frame(f"{frame.nbytes} bytes in a frame, more than {FRAME_NBYTES}")

    @cached_property
    def bytes(self) -> CacheBytes:
        return CacheBytes.of(memory_of(self._view.cache), BlockLayout.of(self._view))

    def make_hash(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> None:
        """Hashes blocks of a CPU cache if the frame's `hash` is wanted."""
        if self.hash.prefix is None:
            return
        with gate.passage() as admitted:
            if admitted:
                runs = plane_runs(self._view, frame.rect, block_ids)
                self.hash.made = hash_blocks(self.hash.prefix, self.bytes, runs)

    @abstractmethod
    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        """Source: sends the payload and makes the `hash` if it is wanted. Returns whether the
        blocks were held until the sink had all their bytes."""

    def offer(self, block_ids: tuple[int, ...]) -> Payload:
        """Source: returns the payload if it can be sent at once, by any thread; then `send` is
        replaced by `finish`. Default: empty, it cannot."""
        return b""

    def finish(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        """Source: does what `send` does after the payload."""
        raise NotImplementedError

    @abstractmethod
    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        """Sink: receives the payload. Returns whether all bytes are in the blocks. It may call
        `on_counted` if it knows that the source held the blocks meanwhile: then the bytes count
        without the source's CONFIRM. It may make the `hash` if it is wanted."""

    def drain(self, frame: Frame) -> None:
        """Sink: receives a payload and drops it, in bounded memory."""
        for part in scratch(frame.nbytes):
            self._pipe.recv_tensor(torch.frombuffer(part, dtype=torch.uint8))


class PipeMover(Mover):
    """Moves payloads through the pipe: straight from and into the blocks on a CPU, through a pinned
    host buffer on a GPU, on a stream of its own beside the model's steps."""

    def __init__(self, view: CacheView, pipe: KVPipe) -> None:
        super().__init__(view, pipe)
        self._on_host = view.cache.device.type == "cpu"
        self._stream = OwnStream(view.cache.device)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @cached_property
    def _memory(self) -> memoryview:
        return memory_of(self._view.cache)

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        if self._on_host:
            runs = byte_runs(self._view, frame.rect, block_ids)
            return self._pipe.send_blocks(self._memory, runs, gate)
        staged = self._staging(frame.nbytes)
        with gate.passage() as admitted, self._stream.active():
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
        with gate.passage() as admitted, self._stream.active():
            if admitted:
                scatter(self._view, frame.rect, block_ids, staged)
                self._stream.synchronize()
        return admitted

    def _staging(self, nbytes: int) -> torch.Tensor:
        if len(self._buffer) < nbytes:
            with self._stream.active():  # pinned for the cache's device, not this thread's
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self._buffer[:nbytes]


class HashingPipeMover(PipeMover):
    """Hashes a frame of a CPU cache as the socket moves it, if the hash is wanted: what has just
    been sent or received, while it is in the core's caches."""

    def __init__(self, view: CacheView, pipe: SocketPipe) -> None:
        super().__init__(view, pipe)
        self._socket = pipe

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        if not self._on_host or self.hash.prefix is None:
            return super().send(frame, block_ids, gate)
        return self._hashed(self._socket.send_blocks, frame, block_ids, gate)

    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        if not self._on_host or self.hash.prefix is None:
            return super().recv(frame, block_ids, gate)
        return self._hashed(self._socket.recv_blocks, frame, block_ids, gate)

    def _hashed(
        self, move: MoveBlocks, frame: Frame, block_ids: tuple[int, ...], gate: Gate
    ) -> bool:
        assert self.hash.prefix is not None
        made = RunsHash(self.hash.prefix, self.bytes, frame.nbytes)
        runs = byte_runs(self._view, frame.rect, block_ids)
        whole = move(self._memory, runs, gate, made)
        if whole:
            self.hash.made = made.digest()
        return whole


def parts(cache: torch.Tensor, rect: Rect, count: int, nbytes: int = 0) -> Iterator[slice]:
    """Cuts `count` blocks of a piece into parts of at most `nbytes`, or else `PART_NBYTES` (one
    block at least)."""
    step = max(1, (nbytes or PART_NBYTES) // piece_nbytes(cache, rect, 1))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


class OwnStream:
    """Runs a connection's work on its own CUDA stream. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes work queued in the body start after the model's steps queued so far. It is needed
        because a rank that does not sample answers before the device has computed its blocks."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            yield

    def synchronize(self) -> None:
        """Returns when the device has done all work queued here."""
        if self._stream is not None:
            self._stream.synchronize()


class Channel:
    """Connects a source to a sink that has welcomed it. One thread uses it; `interrupt` may
    come from any. Errors: OSError, TransferError."""

    def __init__(self, pipe: KVPipe, view: CacheView, mover: Mover) -> None:
        self._pipe = pipe
        self._view = view
        self._mover = mover

    def begin(self, frame: Frame) -> None:
        """Tells the sink that a piece will come on this connection."""
        send_frame(self._pipe, frame)

    def offer(self, frame: Frame, block_ids: tuple[int, ...]) -> int:
        """Sends what can be sent of blocks without waiting: any thread may, while the owner waits
        for work, which then delivers the rest. Returns how many bytes, 0 if none."""
        payload = self._mover.offer(block_ids)
        return (
            self._pipe.send_now(self._headed(frame, block_ids).encode() + payload) if payload else 0
        )

    def deliver(
        self,
        frame: Frame,
        block_ids: tuple[int, ...],
        gate: Gate,
        hash_: FrameHash = NO_HASH,
        offered: int = 0,
    ) -> int:
        """Sends blocks, of which so many bytes were `offered`, and makes the hash that is wanted;
        returns the bytes that count, 0 if the gate is closed."""
        if not offered and not gate.is_open:
            return 0
        self._mover.hash = hash_
        frame = self._headed(frame, block_ids)
        if offered:
            if rest := (frame.encode() + self._mover.offer(block_ids))[offered:]:
                self._pipe.send_bytes(rest)
            held = self._mover.finish(frame, block_ids, gate)
        else:
            joined = self._mover.in_pipe and frame.nbytes <= JOINED_NBYTES
            (self._pipe.send_header if joined else self._pipe.send_bytes)(frame.encode())
            held = self._mover.send(frame, block_ids, gate)
        send_frame(self._pipe, replace(frame, kind=FrameKind.CONFIRM, count=int(held)))
        return piece_nbytes(self._view.cache, frame.rect, frame.count) if held else 0

    def _headed(self, frame: Frame, block_ids: tuple[int, ...]) -> Frame:
        nbytes = self._mover.payload_nbytes(frame.rect, len(block_ids))
        return replace(frame, kind=self._mover.kind, nbytes=nbytes)

    def watch(self, on_moved: Callable[[], None]) -> None:
        """Makes the pipe call `on_moved` repeatedly while a frame moves."""
        self._pipe.on_moved = on_moved

    def alive(self) -> bool:
        return self._pipe.alive()

    def interrupt(self) -> None:
        """Makes a blocked call fail; from any thread."""
        self._pipe.interrupt()

    def close(self) -> None:
        self._pipe.close()


class Heartbeat:
    """Calls `beat` when it is called, but at most every `HEARTBEAT_S` seconds."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._last = time.monotonic()

    def __call__(self) -> None:
        if (now := time.monotonic()) - self._last >= HEARTBEAT_S:
            self._last = now
            self._beat()


def as_transfer_error(error: Exception, peer: Blame) -> TransferError:
    """Makes a typed error of the exception that ended a connection. All exceptions of a connector
    are mapped here. `peer` is the other side's role."""
    if isinstance(error, TransferError):
        return error
    if isinstance(error, OSError):
        return TransferError(f"the {peer} rank is gone: {error}", code="PEER_LOST", blame=peer)
    logger.error("a KV connector failed", exc_info=error)
    ours = Blame.DECODE if peer is Blame.PREFILL else Blame.PREFILL
    text = f"the KV connector of the {ours} node failed ({type(error).__name__}); its log says why"
    return TransferError(text, code="CONNECTOR_FAILED", blame=ours)
