"""Connectors that hash KV while it moves, and corrupt it in transit: after the source sent it and
before the sink hashes it. A ledger records each fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corrupt_connector import Spoiler
from kv_faults import Place
from pdserve.kv_transfer.blocks import ByteRuns, RunsHash, hash_blocks, plane_runs
from pdserve.kv_transfer.connector import RankContext, SinkTransfer
from pdserve.kv_transfer.connectors.base.channel import FrameHash, HashingPipeMover, Mover
from pdserve.kv_transfer.connectors.base.pull import PullMover
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.shm import Greeting, MappedCache, ShmConnector
from pdserve.kv_transfer.connectors.tcp import TCPConnector
from pdserve.kv_transfer.frame import Frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import Rect
from pdserve.kv_transfer.pipe import KVPipe
from pdserve.kv_transfer.rank import group_connector

group_connector.SHORT_NBYTES = 0  # hashes runs of small models too while they are sent


class SpoiltOnTheWay(Spoiler):
    """Corrupts at most one frame of an epoch."""

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self._due: set[tuple[bytes, int]] = set()

    def accept(self, transfer: SinkTransfer) -> None:
        if self.is_due(transfer):
            with self._lock:
                self._due.add((transfer.transfer_id, transfer.epoch))
        super().accept(transfer)

    def place(self, frame: Frame, block_ids: Sequence[int]) -> Place | None:
        """Returns the place of a frame that is to be corrupted, else None."""
        with self._lock:
            if (key := (frame.transfer_id, frame.epoch)) not in self._due:
                return None
            self._due.discard(key)
            return Place(self.context.view, frame.rect, block_ids)


class SpoilingPipeMover(HashingPipeMover):
    """Other bytes than the source sent reach the blocks, and the sink hashes those."""

    def __init__(self, connector: SpoiltOnTheWay, pipe: SocketPipe) -> None:
        super().__init__(connector.context.view, pipe)
        self._connector = connector
        self._receive = pipe.recv_blocks
        pipe.recv_blocks = self._spoilt  # type: ignore[method-assign]
        self._place: Place | None = None

    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        self._place = self._connector.place(frame, block_ids)
        return super().recv(frame, block_ids, gate)

    def _spoilt(
        self, memory: memoryview, runs: ByteRuns, gate: Gate, hashed: RunsHash | None = None
    ) -> bool:
        place, self._place = self._place, None
        if place is None:
            return self._receive(memory, runs, gate, hashed)
        before = place.read()
        moved = self._receive(memory, runs, gate)
        if moved:
            self._connector.spoil(place, before)
        if moved and hashed is not None:
            hashed.update(runs)
        return moved


class SpoiltTCP(SpoiltOnTheWay, TCPConnector):
    def mover(self, pipe: KVPipe) -> Mover:
        assert isinstance(pipe, SocketPipe)
        return SpoilingPipeMover(self, pipe)


class SpoilingCache(MappedCache):
    """Copies other bytes than the source has, and hashes those."""

    connector: SpoiltOnTheWay
    frame: Frame

    def copy(
        self,
        rect: Rect,
        source_ids: Sequence[int],
        sink_ids: Sequence[int],
        hash_: FrameHash,
    ) -> None:
        place = self.connector.place(self.frame, sink_ids)
        before = None if place is None else place.read()
        super().copy(rect, source_ids, sink_ids, hash_)
        if place is not None and before is not None:
            self.connector.spoil(place, before)
            if hash_.prefix is not None:
                runs = plane_runs(self.connector.context.view, rect, sink_ids)
                hash_.made = hash_blocks(hash_.prefix, self._ours, runs)


class SpoilingPullMover(PullMover):
    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        assert isinstance(self._peer, SpoilingCache)
        self._peer.frame = frame
        return super().recv(frame, block_ids, gate)


class SpoiltShm(SpoiltOnTheWay, ShmConnector):
    def open(self, pipe: SocketPipe, greeting: Greeting) -> MappedCache:
        opened = super().open(pipe, greeting)
        opened.__class__ = SpoilingCache
        assert isinstance(opened, SpoilingCache)
        opened.connector = self
        return opened

    def welcome(self, pipe: KVPipe, hello: bytes) -> Mover:
        made = super().welcome(pipe, hello)
        made.__class__ = SpoilingPullMover
        return made
