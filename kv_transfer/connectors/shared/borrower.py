"""What a sink rank reads in other ranks' memory.

    Region    a source rank's memory, for as long as its connection lasts or a block of it is held
    Held      what one transfer reads there; `release` leaves it to the node, `quiesce` returns it

Every block that is taken is returned once: by its transfer, or by the node (`give_back`). A region
with none and without its connection is closed, and its line with it: the source may then forget
whatever it thinks is lent.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pdserve.common.core.errors import TransferError
from pdserve.kv_transfer.connector import Borrowed, SinkTransfer
from pdserve.kv_transfer.connectors.base.pull import PeerCache
from pdserve.kv_transfer.connectors.shared.ledger import Loan, encode_return
from pdserve.kv_transfer.layout import CacheView, GuestArea


class Region:
    """A source rank's memory file, its `cache` readable here. Owns both descriptors."""

    def __init__(
        self, cache: PeerCache, num_blocks: int, offset: int, fd: int, line: socket.socket
    ) -> None:
        self.name = secrets.token_bytes(8)
        self.cache = cache
        self.num_blocks = num_blocks
        self.num_taken = 0
        self.connected = True
        self.first: int | None = None  # its blocks are the guests `first …`
        self._offset = offset
        self._fd = fd
        self._line = line
        self._returns: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-returns", daemon=True)
        self._thread.start()

    def map_at(self, area: GuestArea, first: int) -> None:
        area.map(self._fd, self._offset, self.num_blocks, first)
        self.first = first

    def give_back(self, loan: Loan, blocks: Sequence[int]) -> None:
        """Never blocks: the source may stand still."""
        self.num_taken -= len(blocks)
        for message in encode_return(loan, blocks):
            self._returns.put(message)

    def close(self) -> None:
        """After what was given back."""
        os.close(self._fd)
        self._returns.put(None)

    def interrupt(self) -> None:
        self._returns.put(None)
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            while message := self._returns.get():
                self._line.send(message)
        except OSError:
            pass  # the source is gone: what it lent is nobody's now
        finally:
            self._line.close()


@dataclass(slots=True)
class Held:
    """What a transfer reads in a region: logical block `places[i]` is its `blocks[i]`."""

    region: Region
    epoch: int
    places: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Borrower:
    """All regions of one sink rank. Thread-safe."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._accepted: dict[bytes, SinkTransfer] = {}
        self._held: dict[bytes, Held] = {}
        self._regions: dict[bytes, Region] = {}
        self.num_borrowed = 0  # blocks since start

    def accept(self, transfer: SinkTransfer) -> None:
        with self._lock:
            old = self._accepted.get(transfer.transfer_id)
            if old is None or old.epoch < transfer.epoch:
                self._accepted[transfer.transfer_id] = transfer

    def add(self, region: Region) -> None:
        with self._lock:
            self._regions[region.name] = region

    def take(self, region: Region, loan: Loan, first: int, blocks: Sequence[int]) -> int:
        """How many of logical blocks `first …`, which are the source's `blocks`, are read in place.
        The last one of a transfer is not: the next tokens may be written to it."""
        transfer_id, epoch = loan
        with self._lock:
            transfer = self._accepted.get(transfer_id)
            if transfer is None or transfer.epoch != epoch or self._view.guests is None:
                return 0
            last = transfer.first_block + len(transfer.block_ids) - 1
            count = max(0, min(len(blocks), last - first))
            if count:
                held = self._held.setdefault(transfer_id, Held(region, epoch))
                held.places += range(first, first + count)
                held.blocks += blocks[:count]
                region.num_taken += count
                self.num_borrowed += count
            return count

    def borrowed(self, loan: Loan) -> Borrowed | None:
        with self._lock:
            held = self._held.get(loan[0])
            if held is None or held.epoch != loan[1]:
                return None
            region, places, blocks = held.region, tuple(held.places), tuple(held.blocks)
            return Borrowed(region.name, region.num_blocks, places, blocks)

    def settle(self, loan: Loan, first: int | None) -> tuple[int, ...]:
        """As `LendingConnector.borrow`."""
        with self._lock:
            transfer, held = self._accepted.get(loan[0]), self._held.get(loan[0])
            if transfer is None or held is None or held.epoch != loan[1]:
                raise TransferError("the transfer was stopped", code="UNKNOWN_TRANSFER")
            if first is not None:
                self._place(held.region, first)
                return self._where(transfer, held, first)
        self._copy(transfer, held)
        return transfer.block_ids

    def _place(self, region: Region, first: int) -> None:
        area = self._view.guests
        assert area is not None  # or nothing was taken
        if region.first == first:
            return
        end = first + region.num_blocks
        for other in self._regions.values():  # nobody holds any of its blocks, or it would stay
            start = end if other.first is None else other.first
            if start < end and first < start + other.num_blocks:
                area.clear(start, other.num_blocks)
                other.first = None
        region.map_at(area, first)

    def _where(self, transfer: SinkTransfer, held: Held, first: int) -> tuple[int, ...]:
        ids = list(transfer.block_ids)
        for place, block in zip(held.places, held.blocks, strict=True):
            ids[place - transfer.first_block] = first + block
        return tuple(ids)

    def _copy(self, transfer: SinkTransfer, held: Held) -> None:
        own = [transfer.block_ids[place - transfer.first_block] for place in held.places]
        held.region.cache.copy(self._view.rect, held.blocks, own)
        self.drop(transfer.transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """What the transfer reads goes back, unless it was left to the node."""
        with self._lock:
            held = self._held.pop(transfer_id, None)
            if held is not None:
                held.region.give_back((transfer_id, held.epoch), held.blocks)
                self._close_if_idle(held.region)

    def forget(self, transfer_id: bytes, *, keep: bool) -> None:
        """The transfer is over; what it reads is the node's (`keep`), or goes back."""
        if not keep:
            self.drop(transfer_id)
        with self._lock:
            self._accepted.pop(transfer_id, None)
            self._held.pop(transfer_id, None)

    def give_back(self, name: bytes, loan: Loan, blocks: Sequence[int]) -> None:
        with self._lock:
            if (region := self._regions.get(name)) is not None:
                region.give_back(loan, blocks)
                self._close_if_idle(region)

    def disconnected(self, region: Region) -> None:
        with self._lock:
            region.connected = False
            self._close_if_idle(region)

    def _close_if_idle(self, region: Region) -> None:
        if region.connected or region.num_taken or region.name not in self._regions:
            return
        del self._regions[region.name]
        if region.first is not None and self._view.guests is not None:
            self._view.guests.clear(region.first, region.num_blocks)
        region.close()

    def close(self) -> None:
        """The rank ends, and computes nothing any more."""
        with self._lock:
            for region in self._regions.values():
                region.interrupt()
