"""The sink: reads runs from its inbox and writes them into their blocks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pdserve.kv_transfer.blocks import piece_nbytes, scatter
from pdserve.kv_transfer.connector import Event, Failed, Landed, Progress, SinkTransfer
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView
from pdserve_file_connector.folder import is_alive
from pdserve_file_connector.runs import Header, read_data, read_header


@dataclass(slots=True)
class Incoming:
    """One accepted transfer."""

    transfer: SinkTransfer
    missing: int  # bytes
    nbytes: int
    gate: Gate = field(default_factory=Gate)
    sources: set[str] = field(default_factory=set)  # folders of those heard of
    over: bool = False  # landed or failed: the event was emitted


class Sink:
    """`accept` and `forget` are called from any thread, the rest from the connector's own."""

    def __init__(self, view: CacheView, inbox: Path, emit: Callable[[Event], None]) -> None:
        self._view = view
        self._inbox = inbox
        self._emit = emit
        self._lock = threading.Lock()
        self._incoming: dict[bytes, Incoming] = {}
        self.counts: Counter[str] = Counter()

    def accept(self, transfer: SinkTransfer) -> None:
        nbytes = piece_nbytes(self._view.cache, self._view.rect, len(transfer.block_ids))
        with self._lock:
            old = self._incoming.get(transfer.transfer_id)
            if old is not None and old.transfer.epoch >= transfer.epoch:
                self.counts["stale_accept"] += 1
                return
            incoming = Incoming(transfer, nbytes, nbytes, over=nbytes == 0)
            self._incoming[transfer.transfer_id] = incoming
        if old is not None:
            old.gate.close()
        if nbytes == 0:
            self._emit(Landed(transfer.transfer_id, transfer.epoch, 0))

    def forget(self, transfer_id: bytes) -> None:
        """Waits for the run that is being written, if it is this transfer's."""
        with self._lock:
            incoming = self._incoming.pop(transfer_id, None)
        if incoming is not None:
            incoming.gate.close()

    def live(self) -> list[Incoming]:
        with self._lock:
            return [each for each in self._incoming.values() if not each.over]

    def take_all(self) -> bool:
        """Empties the inbox; returns whether it had anything."""
        paths = sorted(self._inbox.glob("*.run"))
        for path in paths:
            try:
                self._take(path)
            except FileNotFoundError:  # the source took it back
                self.counts["withdrawn_run"] += 1
            path.unlink(missing_ok=True)  # tells the source that it was taken
        return bool(paths)

    def _take(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                header = read_header(file)
            except msgspec.DecodeError:
                self.counts["bad_run"] += 1
                return
            incoming = self._current(header)
            if incoming is None:
                return
            incoming.sources.add(header.source)
            data = read_data(file)
            if fault := self._fault(header, incoming.transfer, len(data)):
                self._fail(incoming, "BAD_FRAME", False, fault)
                return
        with incoming.gate.passage() as admitted:
            if admitted:
                start = header.first - incoming.transfer.first_block
                ids = incoming.transfer.block_ids[start : start + header.count]
                scatter(self._view, header.rect, ids, data)
        if admitted:
            self._landed(incoming, len(data))

    def _current(self, header: Header) -> Incoming | None:
        with self._lock:
            incoming = self._incoming.get(header.transfer_id)
        if incoming is None or incoming.transfer.epoch != header.epoch or incoming.over:
            self.counts["late_run"] += 1
            return None
        return incoming

    def _fault(self, header: Header, transfer: SinkTransfer, nbytes: int) -> str:
        rect, ours = header.rect, self._view.rect
        if not ours.contains(rect):
            return f"{rect} is not within this rank's {ours}"
        start = header.first - transfer.first_block
        if start < 0 or header.count < 1 or start + header.count > len(transfer.block_ids):
            return f"{header.count} blocks from {header.first} are not the transfer's"
        if nbytes != piece_nbytes(self._view.cache, rect, header.count):
            return f"{nbytes} bytes for {header.count} blocks"
        return ""

    def _landed(self, incoming: Incoming, nbytes: int) -> None:
        transfer = incoming.transfer
        incoming.missing -= nbytes
        if incoming.missing:
            self._emit(Progress(transfer.transfer_id, transfer.epoch, nbytes))
        else:
            incoming.over = True
            self._emit(Landed(transfer.transfer_id, transfer.epoch, incoming.nbytes))

    def check_sources(self) -> None:
        """Fails the transfers of those that died."""
        for incoming in self.live():
            if not all(is_alive(self._inbox.parent / name) for name in incoming.sources):
                self._fail(incoming, "PEER_LOST", True, "the prefill rank is gone")

    def _fail(self, incoming: Incoming, code: str, retryable: bool, message: str) -> None:
        incoming.over = True
        transfer = incoming.transfer
        self._emit(
            Failed(transfer.transfer_id, transfer.epoch, code, "prefill", retryable, message)
        )
