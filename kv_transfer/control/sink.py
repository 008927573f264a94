"""The sink's control half: the transfers for which a decode node has reserved blocks, with the
calls of its sessions, which wait for KV, and of the sources, which send it.

    reserve() ──▶ ticket ──▶ … ──▶ arrival has a result: the session owns the blocks
       retarget() ──▶ ticket        arrival has an error: on_freed() was called, they are free

It belongs to the event loop of the decode node. `recv_transfer.py` handles one transfer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.kv_transfer.commands import Call, RankCalls, transfer_error
from pdserve.kv_transfer.connector import Failed, Landed, RunDigest
from pdserve.kv_transfer.control.background import Tasks
from pdserve.kv_transfer.control.protocol import SinkEvent
from pdserve.kv_transfer.control.recv_transfer import (
    GroupBlocks,
    RecvResult,
    RecvTransfer,
    stale_epoch,
)
from pdserve.kv_transfer.control.ticket import RankEndpoint, Ticket, new_transfer_id
from pdserve.kv_transfer.layout import adapted

REMEMBERED = 1024  # finished transfers whose outcome a late commit still gets
MAX_MESSAGE = 500  # characters of a failure that are kept


class KVSink:
    """Speaks to the ranks by the executor's `call` and `on_event`; sources commit at `address`."""

    def __init__(
        self,
        ranks: Sequence[RankEndpoint],
        *,
        fingerprint: str,
        block_size: int,
        address: str,
        lease_s: float,
        call: Call,
        digests: bool = True,
    ) -> None:
        self.counts: Counter[str] = Counter()  # landed, bytes, failed/CODE, late state/event
        self.ranks = RankCalls(call, self.counts, [each.share for each in ranks])
        self._blank = Ticket(
            transfer_id=b"",
            epoch=1,
            lease_s=lease_s,
            address=address,
            fingerprint=fingerprint,
            block_size=block_size,
            num_tokens=0,
            first_blocks=(),
            endpoints=tuple(ranks),
            digests=digests,
        )
        self._tasks = Tasks(Blame.DECODE)
        self._live: dict[bytes, RecvTransfer] = {}
        self._finished: OrderedDict[bytes, FinishedTransfer] = OrderedDict()

    # ---- for sessions: reserve, cancel -------------------------------------------------------

    async def reserve(
        self,
        num_tokens: int,
        blocks: Sequence[GroupBlocks],
        on_freed: Callable[[], None],
        adapter: str = "",
    ) -> tuple[Ticket, asyncio.Future[RecvResult]]:
        """Takes over `blocks`, one entry per KV group. Returns, when every rank takes data, the
        ticket and the arrival. That has a result once the transfer is committed, has
        landed on every rank and its digests match; then the caller owns the blocks. Otherwise it
        has a TransferError and `on_freed` was called, which alone frees the blocks. Do not cancel
        it. `adapter` is the digest of the LoRA adapter, if any.

        Raises:
            TransferError: a rank refused.
        """
        transfer_id = new_transfer_id()
        ticket = replace(
            self._blank,
            transfer_id=transfer_id,
            num_tokens=num_tokens,
            first_blocks=tuple(each.first for each in blocks),
            fingerprint=adapted(self._blank.fingerprint, adapter),
        )
        made = RecvTransfer(
            *(ticket, blocks, self.ranks, self._tasks),
            on_freed=on_freed,
            on_over=self._finish,
        )
        self._live[transfer_id] = made
        return await made.issued(), made.arrival

    async def cancel(self, transfer_id: bytes) -> bool:
        """Cancels a transfer whose session ends. Returns True once the blocks are free, also for an
        unknown transfer; False when the session owns them already and must free them."""
        transfer = self._live.get(transfer_id)
        if transfer is not None:
            transfer.cancel("during the hand-off")
            await asyncio.wait([transfer.arrival])
        outcome = self._finished.get(transfer_id)
        return outcome is None or outcome.failure is not None

    async def close(self) -> None:
        """Cancels all transfers and waits until their blocks are handed back."""
        await asyncio.gather(*(self.cancel(transfer_id) for transfer_id in list(self._live)))
        await self._tasks.join()

    # ---- for sources: commit, renew, abort, retarget -----------------------------------------

    async def commit(
        self,
        transfer_id: bytes,
        epoch: int,
        first_token: pb.FirstToken,
        digests: Sequence[RunDigest] = (),
    ) -> int:
        """Takes the source's commit, after its last run, with the `first_token`. Returns the bytes
        that landed, once the sequence is runnable. A repeated commit gets the same answer.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, DIGEST_MISMATCH, or why the transfer
                failed.
        """
        if (outcome := self._outcome(transfer_id, epoch)) is not None:
            return outcome.nbytes
        return await self._find(transfer_id, epoch).commit(first_token, digests)

    def renew(self, transfer_id: bytes, epoch: int, committed: bool = False) -> int:
        """Renews the lease for a source that is queued, computing or sending, unless it says that
        it has `committed`. Returns a number that grows while KV lands and digests are compared.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why the transfer failed.
        """
        if self._outcome(transfer_id, epoch) is not None:
            return 0
        transfer = self._find(transfer_id, epoch)
        if transfer.cause is not None:
            raise transfer.cause
        if not committed:
            transfer.renew()
        return transfer.progress

    def abort(self, transfer_id: bytes, epoch: int, reason: str) -> None:
        """Ends the source's epoch; the blocks wait for another source, as long as the lease.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH.
        """
        error = TransferError(
            f"the prefill node aborted the transfer: {reason}",
            code="ABORTED",
            blame=Blame.PREFILL,
            retryable=True,
        )
        if (outcome := self._finished.get(transfer_id)) is None:
            self._find(transfer_id, epoch).on(SinkEvent.ABORT, error)
        else:  # it comes late
            _check_epoch(epoch, outcome.epoch)

    async def retarget(self, transfer_id: bytes, epoch: int = 0) -> Ticket:
        """Begins the next epoch and returns its ticket; data of the last epoch's source is refused
        from now on. `epoch` is the one to replace; 0 is the current one. Of the router's calls (0)
        the last one gets the ticket. A source's own retry gives way to all of them, or a source
        that was replaced could preempt its successor.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, ALREADY_LANDED, or why the transfer
                failed.
        """
        if self._outcome(transfer_id, epoch or None) is not None:
            raise TransferError("all KV has landed", code="ALREADY_LANDED")
        return await self._find(transfer_id, epoch or None).retarget(preempts=not epoch)

    def knows(self, transfer_id: bytes) -> bool:
        """Returns whether it issued a ticket of this transfer and still remembers it."""
        return transfer_id in self._live or transfer_id in self._finished

    # ---- reports of the ranks ----------------------------------------------------------------

    def on_event(self, rank: int, message: bytes) -> None:
        """Handles an event of a rank's connector; called on the event loop."""
        share, event = self.ranks.decode_event(rank, message)
        transfer = self._live.get(event.transfer_id)
        if transfer is None or transfer.machine.epoch != event.epoch:
            self.counts["late_event"] += 1
            return
        match event:
            case Failed():
                transfer.on(SinkEvent.FAILED, transfer_error(event))
            case Landed():
                transfer.landed(share, event.nbytes, event.connectors)
        transfer.renew()

    # ---- inside ------------------------------------------------------------------------------

    def _find(self, transfer_id: bytes, epoch: int | None = None) -> RecvTransfer:
        """Returns a transfer that is under way.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why it failed.
        """
        transfer = self._live.get(transfer_id)
        if transfer is None:
            self._outcome(transfer_id, epoch)
            message = f"no transfer {transfer_id.hex()} here"
            raise TransferError(message, code="UNKNOWN_TRANSFER", blame=Blame.PREFILL)
        _check_epoch(epoch, transfer.machine.epoch)
        return transfer

    def _outcome(self, transfer_id: bytes, epoch: int | None) -> FinishedTransfer | None:
        """Returns the outcome of a transfer that has landed; None if it is under way or unknown.

        Raises:
            TransferError: STALE_EPOCH, or why it failed.
        """
        outcome = self._finished.get(transfer_id)
        if outcome is None:
            return None
        _check_epoch(epoch, outcome.epoch)
        if outcome.failure is not None:
            raise outcome.failure()
        return outcome

    def _finish(self, transfer: RecvTransfer) -> None:
        """Replaces a transfer by its outcome."""
        transfer_id, epoch = transfer.ticket.transfer_id, transfer.epoch
        outcome = FinishedTransfer.of(transfer.machine.epoch, epoch.nbytes, transfer.cause)
        del self._live[transfer_id]
        self._finished[transfer_id] = outcome
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)


def _check_epoch(epoch: int | None, current: int) -> None:
    if epoch not in (None, current):
        raise stale_epoch(f"epoch {epoch} is not the current {current}")


@dataclass(frozen=True, slots=True)
class FinishedTransfer:
    """Keeps the outcome of a transfer that is over, for late calls. It references neither the
    session and its tokens nor an error's stack frames."""

    epoch: int
    nbytes: int
    failure: Callable[[], PdserveError] | None  # makes a new copy of the error

    @classmethod
    def of(cls, epoch: int, nbytes: int, cause: PdserveError | None) -> FinishedTransfer:
        return cls(epoch, nbytes, None if cause is None else _copies(cause))


def _copies(error: PdserveError) -> Callable[[], PdserveError]:
    return partial(
        type(error),
        error.message[:MAX_MESSAGE],
        code=error.code,
        blame=error.blame,
        retryable=error.retryable,
    )
