"""The source: puts runs into the sinks' inboxes, a few at a time, and sees them taken."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from pdserve.common.core.errors import Blame, TransferError
from pdserve.kv_transfer.blocks import gather
from pdserve.kv_transfer.connector import BlockRun, Event, Failed, Progress, Sent, SourceTransfer
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Piece
from pdserve_file_connector.folder import NAME, is_alive
from pdserve_file_connector.runs import Header, write_run

WINDOW = 2  # runs of a piece that wait in an inbox: bounds what a stalled sink costs


class Endpoint(msgspec.Struct):
    """A sink's address for sources."""

    name: Annotated[str, msgspec.Meta(pattern=NAME)]
    fingerprint: str


_endpoints = msgspec.json.Decoder(Endpoint)


@dataclass(slots=True)
class Lane:
    """One piece of a transfer on its way to one sink."""

    piece: Piece
    endpoint: bytes
    runs: deque[tuple[BlockRun, tuple[int, ...]]] = field(default_factory=deque)
    files: deque[tuple[Path, int]] = field(default_factory=deque)  # put, and bytes of KV in it
    inbox: Path | None = None  # once the sink was found


@dataclass(slots=True)
class Outgoing:
    """One transfer under way."""

    transfer: SourceTransfer
    lanes: list[Lane]
    gate: Gate = field(default_factory=Gate)
    next_block: int = 0  # blocks before it were announced
    complete: bool = False  # the last run was announced
    over: bool = False  # sent or failed: the event was emitted
    nbytes: int = 0
    started: float = 0.0


class Source:
    """`submit`, `ready`, `forget` are called from any thread, the rest from the connector's own."""

    def __init__(
        self, view: CacheView, folder: Path, fingerprint: str, emit: Callable[[Event], None]
    ) -> None:
        self._view = view
        self._folder = folder
        self._fingerprint = fingerprint
        self._emit = emit
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._outgoing: dict[bytes, Outgoing] = {}

    def submit(self, transfer: SourceTransfer) -> None:
        lanes = [Lane(piece, endpoint) for piece, endpoint in transfer.pieces]
        with self._lock:
            self._outgoing.setdefault(transfer.transfer_id, Outgoing(transfer, lanes))

    def ready(
        self, transfer_id: bytes, run: BlockRun, block_ids: tuple[int, ...], last: bool
    ) -> None:
        with self._lock:
            outgoing = self._outgoing.get(transfer_id)
            if outgoing is None or outgoing.complete:
                return
            if run.count and run.first >= outgoing.next_block:  # not announced before
                for lane in outgoing.lanes:
                    lane.runs.append((run, block_ids))
                outgoing.next_block = run.first + run.count
            outgoing.started = outgoing.started or time.monotonic()
            outgoing.complete = last

    def forget(self, transfer_id: bytes) -> None:
        """Waits for the run that is being read, if it is this transfer's, and takes back what
        the sinks have not taken."""
        with self._lock:
            outgoing = self._outgoing.pop(transfer_id, None)
        if outgoing is not None:
            outgoing.gate.close()
            for lane in outgoing.lanes:
                for path, _ in tuple(lane.files):  # the connector's thread may look, too
                    path.unlink(missing_ok=True)

    def live(self) -> list[Outgoing]:
        with self._lock:
            return [each for each in self._outgoing.values() if not each.over]

    def close(self) -> None:
        for outgoing in self.live():
            self.forget(outgoing.transfer.transfer_id)

    def move_all(self) -> bool:
        """Advances every transfer by one step; returns whether anything moved."""
        moved = [self._move(outgoing) for outgoing in self.live()]
        return any(moved)

    def _move(self, outgoing: Outgoing) -> bool:
        transfer = outgoing.transfer
        try:
            moved = [self._step(outgoing, lane) for lane in outgoing.lanes]
        except TransferError as error:
            outgoing.over = True
            self._emit(Failed.of(transfer.transfer_id, transfer.epoch, error))
            return True
        with self._lock:
            left = any(lane.runs or lane.files for lane in outgoing.lanes)
            outgoing.over = outgoing.complete and not left and outgoing.gate.is_open
        if outgoing.over:
            seconds = time.monotonic() - outgoing.started
            self._emit(Sent(transfer.transfer_id, transfer.epoch, outgoing.nbytes, seconds))
        return any(moved)

    def _step(self, outgoing: Outgoing, lane: Lane) -> bool:
        if lane.inbox is None:
            lane.inbox = self._find(lane.endpoint)
        moved = self._count_taken(outgoing, lane, lane.inbox)
        while lane.runs and len(lane.files) < WINDOW and self._put(outgoing, lane, lane.inbox):
            moved = True
        return moved

    def _find(self, endpoint: bytes) -> Path:
        try:
            where = _endpoints.decode(endpoint)
        except msgspec.DecodeError as error:
            raise TransferError(
                f"no endpoint: {error}", code="CONNECT_FAILED", blame=Blame.DECODE, retryable=False
            ) from error
        inbox = self._folder.parent / where.name
        if not is_alive(inbox):
            message = f"no decode rank at {inbox}: is it the same directory on both sides?"
            raise TransferError(message, code="CONNECT_FAILED", blame=Blame.DECODE, retryable=True)
        if where.fingerprint != self._fingerprint:
            message = f"fingerprint {self._fingerprint} ≠ {where.fingerprint}"
            raise TransferError(
                message, code="FINGERPRINT_MISMATCH", blame=Blame.PREFILL, retryable=False
            )
        return inbox

    def _count_taken(self, outgoing: Outgoing, lane: Lane, inbox: Path) -> bool:
        """Notes the runs that were taken: those that are gone while their sink lives."""
        transfer, taken = outgoing.transfer, False
        while lane.files and not lane.files[0][0].exists() and outgoing.gate.is_open:
            if not is_alive(inbox):
                raise gone()
            _, nbytes = lane.files.popleft()
            outgoing.nbytes += nbytes
            self._emit(Progress(transfer.transfer_id, transfer.epoch, nbytes))
            taken = True
        return taken

    def _put(self, outgoing: Outgoing, lane: Lane, inbox: Path) -> bool:
        """Puts the next run; returns False once the transfer was cancelled."""
        transfer = outgoing.transfer
        run, block_ids = lane.runs[0]
        rect = lane.piece.rect
        names = (self._folder.name, transfer.transfer_id, transfer.epoch)
        path = inbox / f"{next(self._numbers):016x}-{self._folder.name}.run"
        with outgoing.gate.passage() as admitted:
            if admitted:
                data = gather(self._view, rect, block_ids).contiguous()
                try:
                    write_run(path, Header(*names, rect, run.first, run.count), data)
                except OSError as error:
                    raise TransferError(
                        str(error), code="CONNECTOR_FAILED", blame=Blame.PREFILL, retryable=True
                    ) from error
                lane.files.append((path, data.nbytes))
                lane.runs.popleft()
        return admitted

    def check_sinks(self) -> None:
        """Fails the transfers to those that died."""
        for outgoing in self.live():
            if not all(is_alive(lane.inbox) for lane in outgoing.lanes if lane.inbox):
                outgoing.over = True
                transfer = outgoing.transfer
                self._emit(Failed.of(transfer.transfer_id, transfer.epoch, gone()))


def gone() -> TransferError:
    message = "the decode rank is gone"
    return TransferError(message, code="PEER_LOST", blame=Blame.DECODE, retryable=True)
