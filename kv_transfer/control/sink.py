"""The sink's control half: the transfers a decode node has reserved blocks for, and the calls of
those who wait for them and of the sources that fill them.

    reserve() ──▶ ticket ──▶ … ──▶ wait() returns: the waiter owns the blocks
       retarget() ──▶ ticket        wait() raises:  on_freed() was called, the blocks are free

Lives on the event loop of the decode node. What happens to one transfer is `reservation.py`'s.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pdserve.common.core.errors import Blame, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.kv_transfer.commands import Call, GiveBack, RankCalls, decode_event, transfer_error
from pdserve.kv_transfer.connector import Failed, Landed
from pdserve.kv_transfer.control.background import Tasks
from pdserve.kv_transfer.control.epoch import ArrivedKV, Outcome, stale_epoch
from pdserve.kv_transfer.control.loans import Guests, Lender, Loan
from pdserve.kv_transfer.control.protocol import SinkEvent
from pdserve.kv_transfer.control.reservation import Reservation
from pdserve.kv_transfer.control.ticket import RankEndpoint, Ticket, new_transfer_id
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import adapted

REMEMBERED = 1024  # outcomes of finished transfers whose outcome a late commit still learns


class KVSink:
    """`call` and `on_event` are the executor's; `address` is where sources commit."""

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
        guest_ids: tuple[int, int] = (0, 0),
    ) -> None:
        """`guest_ids`: first and end of the ids for blocks that prefill nodes lend."""
        self.counts: Counter[str] = Counter()  # landed, bytes, failed/CODE, late state/event
        self.ranks = RankCalls(call, self.counts)
        self._blank = Ticket(
            transfer_id=b"",
            epoch=1,
            lease_s=lease_s,
            address=address,
            fingerprint=fingerprint,
            block_size=block_size,
            num_tokens=0,
            first_block=0,
            endpoints=tuple(ranks),
            digests=digests,
        )
        self._tasks = Tasks(Blame.DECODE)
        self.guests = Guests(*guest_ids)
        self._live: dict[bytes, Reservation] = {}
        self._arrivals: dict[bytes, asyncio.Future[ArrivedKV]] = {}  # activated, not waited for yet
        self._finished: OrderedDict[bytes, Outcome] = OrderedDict()

    # ---- the waiter's side: reserve, wait, cancel --------------------------------------------

    async def reserve(
        self,
        num_tokens: int,
        first_block: int,
        block_ids: Sequence[int],
        on_freed: Callable[[], None],
        on_hosted: Callable[[dict[int, int]], None] | None = None,
        adapter: str = "",
    ) -> Ticket:
        """Takes charge of `block_ids` (logical blocks `first_block …`): from this call on they
        are freed by `on_freed` alone, called once, unless `wait` returns. When the ticket is
        returned, every rank takes data. `on_hosted` is told, before `wait` returns, which logical
        blocks lie in guests instead, which whoever frees them must `give_back`; without it,
        everything is copied. `adapter`: the digest of the one whose KV is wanted.

        Raises:
            TransferError: a rank refused.
        """
        transfer_id = new_transfer_id()
        ticket = replace(
            self._blank,
            transfer_id=transfer_id,
            num_tokens=num_tokens,
            first_block=first_block,
            fingerprint=adapted(self._blank.fingerprint, adapter),
        )
        made = Reservation(
            *(ticket, block_ids, self.ranks, self._tasks),
            guests=self.guests,
            on_freed=on_freed,
            on_over=self._finish,
            on_hosted=on_hosted,
            give_back=self._give_back,
        )
        self._live[transfer_id] = made
        return await made.issued()

    async def wait(self, transfer_id: bytes) -> ArrivedKV:
        """Waits until the transfer is committed, has landed on every rank and is what was sent.
        From then on the blocks are the caller's.

        Raises:
            TransferError: it failed; `on_freed` was called before this raises.
        """
        return await asyncio.shield(self.landing(transfer_id))

    def landing(self, transfer_id: bytes) -> asyncio.Future[ArrivedKV]:
        """What `wait` waits for, for whoever must act as soon as it is there. Not to be cancelled.

        Raises:
            TransferError: no such transfer is under way.
        """
        if (landed := self._arrivals.pop(transfer_id, None)) is not None:
            return landed
        reservation = self._find(transfer_id)
        reservation.awaited = True
        return reservation.arrival

    async def cancel(self, transfer_id: bytes) -> bool:
        """Nobody waits for it any more. Returns True once the blocks are free; False when they are
        the waiter's already, who must free them. Unknown transfers are free."""
        reservation = self._live.get(transfer_id)
        if reservation is not None:
            reservation.cancel("during the hand-off")
            await asyncio.wait([reservation.arrival])
        self._arrivals.pop(transfer_id, None)
        outcome = self._finished.get(transfer_id)
        return outcome is None or outcome.failure is not None

    def give_back(self, guests: list[int]) -> None:
        """Nobody uses these guests any more."""
        for lender, loans in self.guests.gone(guests):
            self._give_back(lender, loans)

    def _give_back(self, lender: Lender, loans: Mapping[Loan, Sequence[int]]) -> None:
        back = tuple((loan, tuple(blocks)) for loan, blocks in loans.items())
        ranks = (each.rank for each in self._blank.endpoints)
        for rank, name in zip(ranks, lender.names, strict=True):
            self._tasks.start(self._return(rank, GiveBack(name, back)))

    async def _return(self, rank: int, command: GiveBack) -> None:
        await self.ranks.send_alive([rank], command)

    async def close(self) -> None:
        """Cancels what is under way and waits until all blocks are handed back."""
        await asyncio.gather(*(self.cancel(transfer_id) for transfer_id in list(self._live)))
        await self._tasks.join()

    # ---- the sources' side: commit, renew, abort, retarget -----------------------------------

    async def commit(
        self,
        transfer_id: bytes,
        epoch: int,
        first_token: pb.FirstToken,
        digests: Sequence[RunDigest] = (),
    ) -> int:
        """The source has handed over everything and passes `first_token`. Returns the bytes that
        landed, once the sequence is runnable. A repeated commit gets the same answer.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, DIGEST_MISMATCH, or why the transfer
                failed.
        """
        if (outcome := self._outcome(transfer_id, epoch)) is not None:
            return outcome.nbytes
        return await self._find(transfer_id, epoch).commit(first_token, digests)

    def renew(self, transfer_id: bytes, epoch: int) -> None:
        """The source works on it though nothing moves yet (queued, computing).

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why the transfer failed.
        """
        if (reservation := self._active(transfer_id, epoch)) is not None:
            reservation.renew()

    def progress(self, transfer_id: bytes, epoch: int) -> int:
        """Grows as long as it goes on here: KV lands, digests are compared. Raises as `renew`."""
        reservation = self._active(transfer_id, epoch)
        return 0 if reservation is None else reservation.progress

    def abort(self, transfer_id: bytes, epoch: int, reason: str) -> None:
        """The source gives up: the blocks wait for another one, as long as the lease.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH.
        """
        error = TransferError(
            f"the prefill node gave up: {reason}",
            code="ABORTED",
            blame=Blame.PREFILL,
            retryable=True,
        )
        if (outcome := self._finished.get(transfer_id)) is None:
            self._find(transfer_id, epoch).on(SinkEvent.ABORT, error)
        else:  # it comes late
            _check_epoch(epoch, outcome.epoch)

    async def retarget(self, transfer_id: bytes, epoch: int = 0) -> Ticket:
        """Begins the next epoch and returns its ticket: what the source of the last one still
        sends is refused. `epoch` is the one to replace; 0: whichever is current. Of the router's
        calls (0) the last one gets the ticket; a source's own next try gives way to any, or a
        source that was given up could preempt the one that takes over.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, ALREADY_LANDED (there is no need), or
                why the transfer failed.
        """
        if self._outcome(transfer_id, epoch or None) is not None:
            raise TransferError("all KV has landed", code="ALREADY_LANDED")
        return await self._find(transfer_id, epoch or None).retarget(preempts=not epoch)

    def knows(self, transfer_id: bytes) -> bool:
        """Whether it has issued a ticket of this transfer, and remembers it."""
        return transfer_id in self._live or transfer_id in self._finished

    # ---- what ranks report -------------------------------------------------------------------

    def on_event(self, rank: int, message: bytes) -> None:
        """A rank's connector reports; on the event loop."""
        event = decode_event(message)
        reservation = self._live.get(event.transfer_id)
        if reservation is None or reservation.machine.epoch != event.epoch:
            self.counts["late_event"] += 1
            return
        match event:
            case Failed():
                reservation.on(SinkEvent.FAILED, transfer_error(event))
            case Landed(_, _, nbytes, borrowed):
                reservation.landed(rank, nbytes, borrowed)
        reservation.renew()

    # ---- inside ------------------------------------------------------------------------------

    def _find(self, transfer_id: bytes, epoch: int | None = None) -> Reservation:
        """One that is under way.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why it failed.
        """
        reservation = self._live.get(transfer_id)
        if reservation is None:
            self._outcome(transfer_id, epoch)
            message = f"no transfer {transfer_id.hex()} here"
            raise TransferError(message, code="UNKNOWN_TRANSFER", blame=Blame.PREFILL)
        _check_epoch(epoch, reservation.machine.epoch)
        return reservation

    def _outcome(self, transfer_id: bytes, epoch: int | None) -> Outcome | None:
        """How a transfer ended that has landed; None: it is under way, or nobody knows it.

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

    def _active(self, transfer_id: bytes, epoch: int) -> Reservation | None:
        """One that is under way and has not failed; None: it has landed. Raises as `renew`."""
        if self._outcome(transfer_id, epoch) is not None:
            return None
        reservation = self._find(transfer_id, epoch)
        if reservation.cause is not None:
            raise reservation.cause
        return reservation

    def _finish(self, reservation: Reservation) -> None:
        """It has an outcome, which is kept in its place."""
        transfer_id, epoch = reservation.ticket.transfer_id, reservation.epoch
        outcome = Outcome.of(reservation.machine.epoch, epoch.nbytes, reservation.cause)
        del self._live[transfer_id]
        if outcome.failure is None and not reservation.awaited:
            self._arrivals[transfer_id] = reservation.arrival
        self._finished[transfer_id] = outcome
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)


def _check_epoch(epoch: int | None, current: int) -> None:
    if epoch not in (None, current):
        raise stale_epoch(f"epoch {epoch} is not the current {current}")
