"""KV blocks that stay where they are: the sink reads them in the source's memory, for as long as
it needs them, and copies the last one of each transfer alone.

As `shm`, and over the same connections, with two additions. An OFFER begins with a word that says
whether the blocks are lent; the TAKEN that answers it has the number of those that the sink left in
place (`count`). And after the WELCOME the sink gets one end of a `Line`, on which it gives back.

A sink that cannot read in place (other layers or heads, no room for guests), or may not, copies.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.connector import (
    Capabilities,
    Event,
    Landed,
    LendingConnector,
    RankContext,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.channel import Mover
from pdserve.kv_transfer.connectors.base.handshake import (
    GREETING_S,
    recv_frame,
    send_frame,
    time_limit,
)
from pdserve.kv_transfer.connectors.base.pull import PeerCache, PullMover
from pdserve.kv_transfer.connectors.base.sockets import SocketPipe
from pdserve.kv_transfer.connectors.shared.borrower import Borrower, Region
from pdserve.kv_transfer.connectors.shared.ledger import Ledger, Line
from pdserve.kv_transfer.connectors.shm import Greeting, MappedCache, ShmConnector
from pdserve.kv_transfer.frame import Frame, Kind, bad_frame
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.layout import CacheView, Rect
from pdserve.kv_transfer.pipe import KVPipe, recv_bytes, send_bytes

logger = logging.getLogger(__name__)


class SharedConnector(ShmConnector, LendingConnector):
    """Takes no options."""

    capabilities: ClassVar[Capabilities] = replace(ShmConnector.capabilities, lends=True)

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(replace(context, emit=self._tell), config)
        self._emit = context.emit
        self._ledger = Ledger(context.emit)
        self._borrower = Borrower(context.view)
        self._lines: set[Line] = set()
        self._greetings: dict[KVPipe, Greeting] = {}  # of sources that are about to be welcomed
        self._regions: dict[KVPipe, Region] = {}

    @property
    def counts(self) -> Counter[str]:
        """Those of `shm`, and `borrowed`: blocks that were not copied."""
        return Counter(super().counts) + Counter(borrowed=self._borrower.num_borrowed)

    # ---- source -----------------------------------------------------------------------------

    def submit(self, transfer: SourceTransfer) -> None:
        if transfer.lend:
            self._ledger.open((transfer.transfer_id, transfer.epoch))
        super().submit(transfer)

    def mover(self, pipe: KVPipe) -> Mover:
        assert isinstance(pipe, SocketPipe)
        line = Line(self._ledger)
        assert self.context.view.shared_fd is not None
        memory = os.open(f"/proc/self/fd/{self.context.view.shared_fd}", os.O_RDONLY)
        try:
            socket.send_fds(pipe.sock, [b"L"], [line.theirs.fileno(), memory])
        finally:
            os.close(memory)
            line.start()
        with self._starting:
            self._lines = {each for each in self._lines if each.alive} | {line}
        return LendingMover(self.context.view, pipe, self._ledger, line)

    def on_loan(self, transfer_id: bytes) -> tuple[int, ...]:
        return self._ledger.on_loan(transfer_id)

    # ---- sink -------------------------------------------------------------------------------

    def accept(self, transfer: SinkTransfer) -> None:
        self._borrower.accept(transfer)
        super().accept(transfer)

    def open(self, pipe: SocketPipe, greeting: Greeting) -> MappedCache:
        self._greetings[pipe] = greeting
        return super().open(pipe, greeting)

    def welcome(self, pipe: KVPipe, hello: bytes) -> Mover:
        super().welcome(pipe, hello)
        assert isinstance(pipe, SocketPipe)
        region = self._region(pipe, self._greetings.pop(pipe))
        if reason := why_copied(self.context.view, region.cache, region.num_blocks):
            logger.warning("KV of a prefill rank is copied, not read in place: %s", reason)
        self._regions[pipe] = region
        self._borrower.add(region)
        return BorrowingMover(self.context.view, pipe, self._borrower, region, not reason)

    def _region(self, pipe: SocketPipe, greeting: Greeting) -> Region:
        """From the source's line and memory. Raises TransferError if it did not send them."""
        with time_limit(pipe, GREETING_S, Blame.PREFILL):
            said, fds, _, _ = socket.recv_fds(pipe.sock, 1, 2)
        try:
            if not said:
                raise ConnectionError("it left after the greeting")
            if len(fds) != 2:
                raise bad_frame("no line came after the greeting")
            cache = MappedCache(greeting, fds[1], self.context.view)
            line = socket.fromfd(fds[0], socket.AF_UNIX, socket.SOCK_SEQPACKET)
            return Region(cache, greeting.num_blocks, greeting.offset, os.dup(fds[1]), line)
        finally:
            for fd in fds:
                os.close(fd)

    def _serve(self, pipe: KVPipe) -> None:
        try:
            super()._serve(pipe)
        finally:
            self._greetings.pop(pipe, None)
            if (region := self._regions.pop(pipe, None)) is not None:
                self._borrower.disconnected(region)

    def borrow(self, transfer_id: bytes, epoch: int, first: int | None) -> tuple[int, ...]:
        return self._borrower.settle((transfer_id, epoch), first)

    def give_back(self, lender: bytes, loan: tuple[bytes, int], blocks: tuple[int, ...]) -> None:
        self._borrower.give_back(lender, loan, blocks)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Landed):
            loan = event.transfer_id, event.epoch
            event = replace(event, borrowed=self._borrower.borrowed(loan))
        self._emit(event)

    # ---- both -------------------------------------------------------------------------------

    def quiesce(self, transfer_id: bytes) -> None:
        super().quiesce(transfer_id)
        self._ledger.close(transfer_id)
        self._borrower.forget(transfer_id, keep=False)

    def release(self, transfer_id: bytes) -> None:
        super().quiesce(transfer_id)
        self._ledger.close(transfer_id)
        self._borrower.forget(transfer_id, keep=True)

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._borrower.close()
        for line in self._lines:
            line.close()


class LendingMover(PullMover):
    """A source's: what it offers is lent first."""

    def __init__(self, view: CacheView, pipe: KVPipe, ledger: Ledger, line: Line) -> None:
        super().__init__(view, pipe, None)
        self._ledger = ledger
        self._line = line

    def payload_nbytes(self, rect: Rect, count: int) -> int:
        return 4 * (1 + count)

    def send(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        loan = frame.transfer_id, frame.epoch
        lent = self._ledger.lend(loan, self._line, block_ids)
        send_bytes(self._pipe, np.asarray((lent, *block_ids), "<u4").tobytes())
        taken = recv_frame(self._pipe)
        if taken.kind is not Kind.TAKEN or taken.nbytes or taken.count > lent * len(block_ids):
            raise bad_frame(f"{taken.kind.name} where TAKEN was due", Blame.DECODE)
        self._ledger.take_back(loan, self._line, block_ids[taken.count :])
        return gate.is_open


class BorrowingMover(PullMover):
    """A sink's: what it may and can, it leaves in place."""

    def __init__(
        self, view: CacheView, pipe: KVPipe, borrower: Borrower, region: Region, in_place: bool
    ) -> None:
        super().__init__(view, pipe, region.cache)
        self._borrower = borrower
        self._region = region
        self._in_place = in_place

    def payload_nbytes(self, rect: Rect, count: int) -> int:
        return 4 * (1 + count)

    def recv(self, frame: Frame, block_ids: tuple[int, ...], gate: Gate) -> bool:
        lent, *source_ids = np.frombuffer(recv_bytes(self._pipe, frame.nbytes), "<u4").tolist()
        self._region.cache.check(frame.rect, source_ids)
        count = 0
        with gate.passage() as admitted:
            if admitted:
                if lent and self._in_place and frame.rect == self._view.rect:
                    count = self._left(frame, source_ids)
                rest = source_ids[count:], block_ids[count:]
                self._region.cache.copy(frame.rect, *rest)
        send_frame(self._pipe, replace(frame, kind=Kind.TAKEN, count=count))
        return admitted

    def _left(self, frame: Frame, source_ids: Sequence[int]) -> int:
        """How many of them stay in place."""
        loan = frame.transfer_id, frame.epoch
        return self._borrower.take(self._region, loan, frame.first, source_ids)


def why_copied(view: CacheView, theirs: PeerCache, num_blocks: int) -> str:
    """Why this rank cannot read a source's blocks in place; empty: it can."""
    if view.guests is None:
        return "this rank has no room for guests"
    if theirs.rect != view.rect:
        return f"it holds {theirs.rect} of the model, this rank {view.rect}; give both one layout"
    plane = view.cache[0, 0, 0].nbytes * num_blocks
    if plane % mmap.PAGESIZE:
        return f"its {num_blocks} blocks are no whole pages"
    return ""
