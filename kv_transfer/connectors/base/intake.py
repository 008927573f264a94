"""The sink rank's book: which transfers may write into which blocks, and how far each piece is.

accept ──▶ open ──all pieces in──▶ landed          frames after that are duplicates
             └──lost, bad frame──▶ failed          frames after that are drained
quiesce / release: forgotten; nobody is inside the blocks when it returns

A piece belongs to the connection that spoke of it first. Frames about it from any other are
refused: drained and counted, whatever transfer id they know.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.blocks import piece_nbytes
from pdserve.kv_transfer.connector import Event, Failed, Landed, Progress, SinkTransfer
from pdserve.kv_transfer.connectors.base.frame import Frame, bad_frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect

logger = logging.getLogger(__name__)

PULSE_S = 0.1  # between two words about a frame that takes long; leases are longer


class Pulse:
    """Says at most every `PULSE_S` seconds that something moves."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self._last = time.monotonic()

    def __call__(self) -> None:
        if (now := time.monotonic()) - self._last >= PULSE_S:
            self._last = now
            self._say()


@dataclass(slots=True)
class Incoming:
    """One accepted transfer."""

    transfer: SinkTransfer
    missing: int  # bytes
    nbytes: int
    gate: Gate = field(default_factory=Gate)
    next_block: dict[Rect, int] = field(default_factory=dict)  # of each piece seen so far
    owners: dict[Rect, object] = field(default_factory=dict)  # the connection of each piece
    over: bool = False  # landed or failed: the event was emitted

    def block_ids(self, frame: Frame) -> tuple[int, ...]:
        start = frame.first - self.transfer.first_block
        return self.transfer.block_ids[start : start + frame.count]


class Intake:
    """All methods are thread-safe; events are emitted outside the lock."""

    def __init__(self, view: CacheView, emit: Callable[[Event], None]) -> None:
        self._view = view
        self._emit = emit
        self._lock = threading.Lock()
        self._incoming: dict[bytes, Incoming] = {}
        self.counts: Counter[str] = Counter()

    def accept(self, transfer: SinkTransfer) -> None:
        nbytes = piece_nbytes(self._view.cache, self._view.rect, len(transfer.block_ids))
        incoming = Incoming(transfer, nbytes, nbytes, over=nbytes == 0)
        with self._lock:
            old = self._incoming.get(transfer.transfer_id)
            if old is not None and old.transfer.epoch >= transfer.epoch:
                self.counts["stale_accept"] += 1
                return
            self._incoming[transfer.transfer_id] = incoming
        if old is not None:
            old.gate.close()
        if incoming.over:
            self._emit(Landed(transfer.transfer_id, transfer.epoch, 0))

    def begin(self, frame: Frame, peer: object) -> None:
        """`peer` answers for a piece from now on.

        Raises:
            TransferError: BAD_FRAME, it is no piece of this rank's cache or overlaps another.
        """
        with self._lock:
            if self._owned(frame, peer) is None:
                return
        self._emit(Progress(frame.transfer_id, frame.epoch, 0))

    def admit(self, frame: Frame, peer: object) -> Incoming | None:
        """The transfer into whose blocks the frame belongs; the piece counts as received up
        to the frame's end. None: the frame is late, a duplicate or another connection's, and
        must be drained.

        Raises:
            TransferError: BAD_FRAME, it contradicts what was agreed.
        """
        with self._lock:
            incoming = self._owned(frame, peer)
            if incoming is None:
                return None
            self._check_blocks(frame, incoming)
            due = incoming.next_block.get(frame.rect, incoming.transfer.first_block)
            if frame.first + frame.count <= due:
                self.counts["duplicate_frame"] += 1
                return None
            if frame.first != due:
                raise bad_frame(f"block {frame.first} came where {due} was due")
            incoming.next_block[frame.rect] = frame.first + frame.count
            return incoming

    def _owned(self, frame: Frame, peer: object) -> Incoming | None:
        """The frame's transfer, if its piece is the peer's or, from now on, becomes the peer's."""
        incoming = self._current(frame)
        if incoming is None:
            return None
        if frame.rect not in incoming.owners:
            self._check_piece(frame.rect, incoming)
            incoming.owners[frame.rect] = peer
        if incoming.owners[frame.rect] is peer:
            return incoming
        self.counts["foreign_frame"] += 1
        return None

    def _current(self, frame: Frame) -> Incoming | None:
        incoming = self._incoming.get(frame.transfer_id)
        if incoming is None:
            self.counts["unknown_frame"] += 1
        elif incoming.transfer.epoch != frame.epoch:
            self.counts["stale_frame"] += 1
        elif not incoming.gate.is_open:
            self.counts["cancelled_frame"] += 1
        else:
            return incoming
        return None

    def _check_piece(self, rect: Rect, incoming: Incoming) -> None:
        if not rect.area or rect.intersect(self._view.rect) != rect:
            raise bad_frame(f"{rect} is not within this rank's {self._view.rect}")
        if any(rect.intersect(known).area for known in incoming.owners):
            raise bad_frame(f"{rect} overlaps another piece of the transfer")

    def _check_blocks(self, frame: Frame, incoming: Incoming) -> None:
        transfer = incoming.transfer
        end = transfer.first_block + len(transfer.block_ids)
        if frame.count < 1 or frame.first < transfer.first_block or frame.first + frame.count > end:
            raise bad_frame(
                f"{frame.count} blocks from {frame.first} are not within "
                f"{transfer.first_block}…{end - 1}"
            )

    def landed(self, incoming: Incoming, frame: Frame) -> None:
        """The frame's blocks are in place."""
        nbytes = piece_nbytes(self._view.cache, frame.rect, frame.count)
        transfer = incoming.transfer
        with self._lock:
            incoming.missing -= nbytes
            done = incoming.missing == 0 and not incoming.over
            incoming.over = incoming.over or done
            self.counts["bytes"] += nbytes
        if done:
            self._emit(Landed(transfer.transfer_id, transfer.epoch, incoming.nbytes))
        else:
            self._emit(Progress(transfer.transfer_id, transfer.epoch, nbytes))

    def fail(self, transfer_id: bytes, error: TransferError) -> None:
        """Ends one transfer, if it is known and not over."""
        with self._lock:
            incoming = self._incoming.get(transfer_id)
            if incoming is None or incoming.over:
                return
            incoming.over = True
        self._emit(
            Failed(
                transfer_id,
                incoming.transfer.epoch,
                error.code,
                error.blame.value,
                error.retryable,
                error.message,
            )
        )

    def moving(self, peer: object) -> None:
        """Bytes come over a connection: those of its transfers that wait their turn live, too."""
        with self._lock:
            waiting = [
                each.transfer
                for each in self._incoming.values()
                if not each.over and each.gate.is_open and peer in each.owners.values()
            ]
        for transfer in waiting:
            self._emit(Progress(transfer.transfer_id, transfer.epoch, 0))

    def disconnected(self, peer: object, error: TransferError) -> None:
        """A connection ended: its unfinished transfers fail."""
        with self._lock:
            orphans = [key for key, each in self._incoming.items() if peer in each.owners.values()]
        for transfer_id in orphans:
            self.fail(transfer_id, error)

    def forget(self, transfer_id: bytes) -> None:
        """Returns when nobody is inside the transfer's blocks; nobody will be."""
        with self._lock:
            incoming = self._incoming.pop(transfer_id, None)
        if incoming is not None:
            incoming.gate.close()


def as_transfer_error(error: Exception, peer: Blame) -> TransferError:
    """What ended a connection, typed: the one place where a connector's own exceptions end.
    `peer` is the other side's role."""
    if isinstance(error, TransferError):
        return error
    if isinstance(error, OSError):
        return TransferError(f"the {peer} rank is gone: {error}", code="PEER_LOST", blame=peer)
    logger.error("a KV connector failed", exc_info=error)
    ours = Blame.DECODE if peer is Blame.PREFILL else Blame.PREFILL
    text = f"the KV connector of the {ours} node failed ({type(error).__name__}); its log says why"
    return TransferError(text, code="CONNECTOR_FAILED", blame=ours)
