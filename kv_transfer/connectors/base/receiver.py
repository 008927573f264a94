"""The sink rank's side: the accepted transfers, their blocks, and the progress of each piece.

accept ──▶ open ──all pieces in──▶ landed          frames after that are duplicates
             └──lost, bad frame──▶ failed          frames after that are drained
quiesce / release: forgotten; no thread is inside the blocks when it returns

A piece belongs to the connection that named it first. Frames about it from any other connection are
drained and counted, even if they have the right transfer id.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.common.core.errors import TransferError
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    Landed,
    Progress,
    SinkTransfer,
)
from pdserve.kv_transfer.frame import Frame, bad_frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect


@dataclass(slots=True)
class InboundTransfer:
    """Tracks one accepted transfer."""

    transfer: SinkTransfer
    missing: int  # bytes
    nbytes: int
    gate: Gate = field(default_factory=Gate)
    next_block: dict[Rect, int] = field(default_factory=dict)  # of each piece seen so far
    owners: dict[Rect, object] = field(default_factory=dict)  # the connection of each piece
    over: bool = False  # landed or failed: the event was emitted
    digests: dict[tuple[Rect, BlockRun], bytes] = field(default_factory=dict)  # as it landed

    def block_ids(self, frame: Frame) -> tuple[int, ...]:
        start = frame.first - self.transfer.first_block
        return self.transfer.block_ids[start : start + frame.count]


class Receiver:
    """Admits frames to the blocks of accepted transfers. It is thread-safe and emits events outside
    its lock."""

    def __init__(self, view: CacheView, emit: Callable[[Event], None]) -> None:
        self._view = view
        self._emit = emit
        self._lock = threading.Lock()
        self._inbound: dict[bytes, InboundTransfer] = {}
        self.counts: Counter[str] = Counter()

    def accept(self, transfer: SinkTransfer) -> None:
        nbytes = piece_nbytes(self._view.cache, self._view.rect, len(transfer.block_ids))
        inbound = InboundTransfer(transfer, nbytes, nbytes, over=nbytes == 0)
        with self._lock:
            old = self._inbound.get(transfer.transfer_id)
            if old is not None and old.transfer.epoch >= transfer.epoch:
                self.counts["stale_accept"] += 1
                return
            self._inbound[transfer.transfer_id] = inbound
        if old is not None:
            old.gate.close()
        if inbound.over:
            self._emit(Landed(transfer.transfer_id, transfer.epoch, 0))

    def begin(self, frame: Frame, peer: object) -> None:
        """Gives a piece to the connection `peer`.

        Raises:
            TransferError: BAD_FRAME, the piece is outside this rank's cache or overlaps another.
        """
        with self._lock:
            if self._owned(frame, peer) is None:
                return
        self._emit(Progress(frame.transfer_id, frame.epoch, 0))

    def admit(self, frame: Frame, peer: object) -> InboundTransfer | None:
        """Returns the transfer of the frame, whose piece counts as received up to the frame's end.
        None: the frame is late, a duplicate or another connection's, and must be drained.

        Raises:
            TransferError: BAD_FRAME, it does not fit the transfer or the frames before it.
        """
        with self._lock:
            inbound = self._owned(frame, peer)
            if inbound is None:
                return None
            self._check_blocks(frame, inbound)
            due = inbound.next_block.get(frame.rect, inbound.transfer.first_block)
            if frame.first + frame.count <= due:
                self.counts["duplicate_frame"] += 1
                return None
            if frame.first != due:
                raise bad_frame(f"block {frame.first} came where {due} was due")
            inbound.next_block[frame.rect] = frame.first + frame.count
            return inbound

    def _owned(self, frame: Frame, peer: object) -> InboundTransfer | None:
        """Returns the frame's transfer if its piece belongs to the peer, or has no owner yet and is
        given to the peer; else None."""
        inbound = self._current(frame)
        if inbound is None:
            return None
        if frame.rect not in inbound.owners:
            self._check_piece(frame.rect, inbound)
            inbound.owners[frame.rect] = peer
        if inbound.owners[frame.rect] is peer:
            return inbound
        self.counts["foreign_frame"] += 1
        return None

    def _current(self, frame: Frame) -> InboundTransfer | None:
        inbound = self._inbound.get(frame.transfer_id)
        if inbound is None:
            self.counts["unknown_frame"] += 1
        elif inbound.transfer.epoch != frame.epoch:
            self.counts["stale_frame"] += 1
        elif not inbound.gate.is_open:
            self.counts["cancelled_frame"] += 1
        else:
            return inbound
        return None

    def _check_piece(self, rect: Rect, inbound: InboundTransfer) -> None:
        if not self._view.rect.contains(rect):
            raise bad_frame(f"{rect} is not within this rank's {self._view.rect}")
        if any(rect.intersect(known).area for known in inbound.owners):
            raise bad_frame(f"{rect} overlaps another piece of the transfer")

    def _check_blocks(self, frame: Frame, inbound: InboundTransfer) -> None:
        transfer = inbound.transfer
        end = transfer.first_block + len(transfer.block_ids)
        if frame.count < 1 or frame.first < transfer.first_block or frame.first + frame.count > end:
            raise bad_frame(
                f"{frame.count} blocks from {frame.first} are not within "
                f"{transfer.first_block}…{end - 1}"
            )

    def landed(self, inbound: InboundTransfer, frame: Frame, made: bytes | None) -> None:
        """Counts a frame whose blocks are in place, notes its hash, if it was made, and emits
        Progress or Landed."""
        run = BlockRun(frame.first, frame.count)
        nbytes = piece_nbytes(self._view.cache, frame.rect, frame.count)
        transfer = inbound.transfer
        with self._lock:
            if made is not None:
                inbound.digests[frame.rect, run] = made
            inbound.missing -= nbytes
            done = inbound.missing == 0 and not inbound.over
            inbound.over = inbound.over or done
            self.counts["bytes"] += nbytes
        if done:
            self._emit(Landed(transfer.transfer_id, transfer.epoch, inbound.nbytes))
        else:
            self._emit(Progress(transfer.transfer_id, transfer.epoch, nbytes))

    def landed_digest(
        self, transfer_id: bytes, epoch: int, rect: Rect, run: BlockRun
    ) -> bytes | None:
        """Implements `KVConnector.landed_digest`."""
        with self._lock:
            inbound = self._inbound.get(transfer_id)
            if inbound is None or inbound.transfer.epoch != epoch:
                return None
            return inbound.digests.get((rect, run))

    def fail(self, transfer_id: bytes, error: TransferError) -> None:
        """Ends one transfer, if it is known and not over."""
        with self._lock:
            inbound = self._inbound.get(transfer_id)
            if inbound is None or inbound.over:
                return
            inbound.over = True
        self._emit(Failed.of(transfer_id, inbound.transfer.epoch, error))

    def moving(self, peer: object) -> None:
        """Emits Progress for all transfers of a connection on which bytes arrive: transfers that
        wait for their turn are alive, too."""
        with self._lock:
            waiting = [
                each.transfer
                for each in self._inbound.values()
                if not each.over and each.gate.is_open and peer in each.owners.values()
            ]
        for transfer in waiting:
            self._emit(Progress(transfer.transfer_id, transfer.epoch, 0))

    def disconnected(self, peer: object, error: TransferError) -> None:
        """Fails the unfinished transfers of a connection that ended."""
        with self._lock:
            orphans = [key for key, each in self._inbound.items() if peer in each.owners.values()]
        for transfer_id in orphans:
            self.fail(transfer_id, error)

    def forget(self, transfer_id: bytes) -> None:
        """Forgets a transfer; returns when no thread is inside its blocks and none will be."""
        with self._lock:
            inbound = self._inbound.pop(transfer_id, None)
        if inbound is not None:
            inbound.gate.close()
