"""The sink's control half: reserves, counts ranks, keeps leases, checks digests, answers commits.

    reserve() ──▶ ticket ──▶ … ──▶ wait() returns: the waiter owns the blocks
       retarget() ──▶ ticket        wait() raises:  on_freed() was called, the blocks are free

Lives on the event loop of the decode node; drives the `SINK` table of `protocol.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.core.ids import new_transfer_id
from pdserve.kv_transfer.commands import (
    Accept,
    Call,
    Quiesce,
    Release,
    Verify,
    all_of,
    call_living,
    call_rank,
    call_ranks,
    decode_event,
    failure,
)
from pdserve.kv_transfer.connector import Failed, Landed, SinkTransfer
from pdserve.kv_transfer.control.lease import Lease
from pdserve.kv_transfer.control.protocol import Action, SinkEvent, SinkState, sink_machine
from pdserve.kv_transfer.control.reservation import Arrival, Epoch, Outcome, Reservation, new_future
from pdserve.kv_transfer.control.tasks import Tasks, as_typed
from pdserve.kv_transfer.control.ticket import RankEndpoint, Ticket
from pdserve.kv_transfer.digest import RunDigest, mismatch

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
    ) -> None:
        self._ranks = tuple(ranks)
        self._rank_ids = [each.rank for each in ranks]
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._address = address
        self._lease_s = lease_s
        self._call = call
        self._digests = digests
        self._live: dict[bytes, Reservation] = {}
        self._arrivals: dict[bytes, asyncio.Future[Arrival]] = {}  # activated, not waited for yet
        self._finished: OrderedDict[bytes, Outcome] = OrderedDict()
        self._tasks = Tasks()
        self.counts: Counter[str] = Counter()  # landed, bytes, failed/CODE, late state/event

    # ---- the waiter's side: reserve, wait, cancel --------------------------------------------

    async def reserve(
        self,
        num_tokens: int,
        first_block: int,
        block_ids: Sequence[int],
        on_freed: Callable[[], None],
    ) -> Ticket:
        """Takes charge of `block_ids` (logical blocks `first_block …`): from this call on they
        are freed by `on_freed` alone, called once, unless `wait` returns. When the ticket is
        returned, every rank takes data.

        Raises:
            TransferError: a rank refused.
        """
        ticket = self._ticket(num_tokens, first_block)
        machine = sink_machine(self.counts)
        entry = Reservation(ticket, tuple(block_ids), machine, on_freed)
        entry.lease = Lease(self._lease_s, lambda: self._lapse(entry))
        self._live[ticket.transfer_id] = entry
        self._open(entry)
        try:
            issued: Ticket = await asyncio.shield(entry.epoch.ticket)
        except asyncio.CancelledError:
            self._fail(entry, SinkEvent.CANCEL, _cancelled("while blocks were reserved"))
            raise
        return issued

    def _ticket(self, num_tokens: int, first_block: int) -> Ticket:
        return Ticket(
            transfer_id=new_transfer_id(),
            epoch=1,
            lease_s=self._lease_s,
            address=self._address,
            fingerprint=self._fingerprint,
            block_size=self._block_size,
            num_tokens=num_tokens,
            first_block=first_block,
            endpoints=self._ranks,
            digests=self._digests,
        )

    async def wait(self, transfer_id: bytes) -> Arrival:
        """Waits until the transfer is committed, has landed on every rank and is what was sent.
        From then on the blocks are the caller's.

        Raises:
            TransferError: it failed; `on_freed` was called before this raises.
        """
        landing = self._arrivals.get(transfer_id)
        arrival: Arrival = await asyncio.shield(landing or self._find(transfer_id).arrival)
        self._arrivals.pop(transfer_id, None)
        return arrival

    async def cancel(self, transfer_id: bytes) -> bool:
        """Nobody waits for it any more. Returns True once the blocks are free; False when they are
        the waiter's already, who must free them. Unknown transfers are free."""
        entry = self._live.get(transfer_id)
        if entry is not None:
            self._fail(entry, SinkEvent.CANCEL, _cancelled("during the hand-off"))
            await asyncio.wait([entry.arrival])
        self._arrivals.pop(transfer_id, None)
        outcome = self._finished.get(transfer_id)
        return outcome is None or outcome.failure is not None

    async def close(self) -> None:
        """Cancels what is under way and waits until all blocks are handed back."""
        await asyncio.gather(*(self.cancel(transfer_id) for transfer_id in list(self._live)))
        await self._tasks.join()

    # ---- the sources' side: commit, renew, abort, retarget -----------------------------------

    async def commit(
        self, transfer_id: bytes, epoch: int, payload: Any, digests: Sequence[RunDigest] = ()
    ) -> int:
        """The source has handed over everything and passes `payload`. Returns the bytes that
        landed, once the sequence is runnable. A repeated commit gets the same answer.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, DIGEST_MISMATCH, or why the transfer
                failed.
        """
        if (outcome := self._over(transfer_id, epoch)) is not None:
            return outcome.nbytes
        entry = self._find(transfer_id, epoch)
        turn = entry.epoch
        if entry.machine.state in (SinkState.RESERVED, SinkState.LANDED):
            turn.payload, turn.digests = payload, digests
            entry.renew()
        self._on(entry, SinkEvent.COMMIT, epoch)
        nbytes: int = await asyncio.shield(turn.committed)
        return nbytes

    def renew(self, transfer_id: bytes, epoch: int) -> None:
        """The source works on it though nothing moves yet (queued, computing).

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why the transfer failed.
        """
        if (entry := self._standing(transfer_id, epoch)) is not None:
            entry.renew()

    def progress(self, transfer_id: bytes, epoch: int) -> int:
        """Grows as long as it goes on here: KV lands, digests are compared. Raises as `renew`."""
        entry = self._standing(transfer_id, epoch)
        return 0 if entry is None else entry.progress

    def _standing(self, transfer_id: bytes, epoch: int) -> Reservation | None:
        """None: it has landed. Raises as `renew`."""
        if self._over(transfer_id, epoch) is not None:
            return None
        entry = self._find(transfer_id, epoch)
        if entry.cause is not None:
            raise entry.cause
        return entry

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
            self._fail(self._find(transfer_id, epoch), SinkEvent.ABORT, error, epoch)
        else:  # it comes late
            _check_epoch(epoch, outcome.epoch)

    async def retarget(self, transfer_id: bytes, epoch: int = 0) -> Ticket:
        """Begins the next epoch and returns its ticket: what the source of the last one still
        sends is refused. `epoch` is the one to replace; 0: whichever is current. Of the router's
        calls (0) the last one gets the ticket; a source's own next try gives way to any.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, ALREADY_LANDED (there is no need), or
                why the transfer failed.
        """
        if self._over(transfer_id, epoch or None) is not None:
            raise TransferError("all KV has landed", code="ALREADY_LANDED")
        entry = self._find(transfer_id, epoch or None)
        if entry.machine.state is SinkState.DRAINING and entry.cause is not None:
            raise entry.cause
        superseded = _stale("another prefill node takes over")
        if not entry.epoch.ticket.done():
            if epoch:  # or a source that was given up could outbid the one that takes over
                raise superseded
            entry.epoch.ticket.set_exception(superseded)
        entry.cause = entry.cause or superseded
        mine = entry.epoch.ticket = new_future()
        entry.renew()
        self._on(entry, SinkEvent.RETARGET)
        ticket: Ticket = await asyncio.shield(mine)
        return ticket

    def knows(self, transfer_id: bytes) -> bool:
        """Whether it has issued a ticket of this transfer, and remembers it."""
        return transfer_id in self._live or transfer_id in self._finished

    # ---- what ranks report ------------------------------------------------------------------

    def on_event(self, rank: int, message: bytes) -> None:
        """A rank's connector reports; on the event loop."""
        event = decode_event(message)
        entry = self._live.get(event.transfer_id)
        if entry is None or entry.machine.epoch != event.epoch:
            self.counts["late_event"] += 1
            return
        match event:
            case Failed():
                self._fail(entry, SinkEvent.FAILED, failure(event), event.epoch)
            case Landed(_, _, nbytes):
                self._rank_landed(entry, rank, nbytes)
        entry.renew()

    def _rank_landed(self, entry: Reservation, rank: int, nbytes: int) -> None:
        entry.epoch.landed[rank] = nbytes
        self._count_landed(entry)

    def _count_landed(self, entry: Reservation) -> None:
        if len(entry.epoch.landed) == len(self._ranks):
            self._on(entry, SinkEvent.RANKS_LANDED)

    # ---- inside -----------------------------------------------------------------------------

    def _find(self, transfer_id: bytes, epoch: int | None = None) -> Reservation:
        """One that is under way.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why it failed.
        """
        entry = self._live.get(transfer_id)
        if entry is None:
            self._over(transfer_id, epoch)
            raise _unknown(transfer_id)
        _check_epoch(epoch, entry.machine.epoch)
        return entry

    def _over(self, transfer_id: bytes, epoch: int | None) -> Outcome | None:
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

    def _lapse(self, entry: Reservation) -> None:
        error = TransferError(
            f"no KV arrived for {self._lease_s} s", code="LEASE_EXPIRED", retryable=True
        )
        self._fail(entry, SinkEvent.LEASE_LAPSED, entry.cause or error)

    def _fail(
        self,
        entry: Reservation,
        event: SinkEvent,
        error: PdserveError,
        epoch: int | None = None,
    ) -> None:
        actions = entry.machine.on(event, epoch)
        if actions:  # else it is too late to matter: the first cause stays
            entry.cause = error
        self._run(entry, actions)

    def _on(self, entry: Reservation, event: SinkEvent, epoch: int | None = None) -> None:
        self._run(entry, entry.machine.on(event, epoch))

    def _run(self, entry: Reservation, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(entry, action)

    def _do(self, entry: Reservation, action: Action) -> None:
        match action:
            case Action.OPEN:
                self._open(entry)
            case Action.ISSUE_TICKET:
                self._issue(entry)
            case Action.VERIFY:
                self._start(entry, self._verify(entry, entry.machine.epoch))
            case Action.ACTIVATE:
                self._activate(entry)
            case Action.REPLY_COMMIT:
                entry.epoch.committed.set_result(entry.nbytes)
            case Action.REJECT_COMMIT:
                assert entry.cause is not None
                self.counts[f"stopped/{entry.cause.code}"] += 1
                entry.epoch.committed.set_exception(entry.cause)
                entry.renew()  # another source has a whole lease to take over
            case Action.REPORT_FAILURE:
                assert entry.cause is not None
                self.counts[f"failed/{entry.cause.code}"] += 1
            case Action.QUIESCE:
                self._tasks.start(self._quiesce(entry))
            case Action.FREE:
                self._free(entry)

    def _open(self, entry: Reservation) -> None:
        waiting = entry.epoch.ticket
        entry.epoch = Epoch()
        entry.epoch.ticket = waiting if not waiting.done() else entry.epoch.ticket
        entry.opening = self._start(entry, self._accept(entry, entry.machine.epoch))

    def _start(self, entry: Reservation, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """On behalf of the present epoch, which fails with what the work raises."""
        epoch = entry.machine.epoch

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._fail(entry, SinkEvent.FAILED, as_typed(error, Blame.DECODE), epoch)

        return self._tasks.start(run())

    async def _accept(self, entry: Reservation, epoch: int) -> None:
        ticket = entry.ticket
        transfer = SinkTransfer(ticket.transfer_id, epoch, ticket.first_block, entry.block_ids)
        await call_ranks(self._call, dict.fromkeys(self._rank_ids, Accept(transfer)))
        self._on(entry, SinkEvent.OPENED, epoch)
        self._count_landed(entry)  # a rank that wants no block has landed as it accepted

    def _issue(self, entry: Reservation) -> None:
        entry.ticket = replace(entry.ticket, epoch=entry.machine.epoch)
        entry.cause = None
        entry.renew()
        entry.epoch.ticket.set_result(entry.ticket)

    async def _verify(self, entry: Reservation, epoch: int) -> None:
        """Every rank compares what it holds with what the source says it sent."""
        ranks = self._rank_ids if self._digests else ()
        found = await all_of(self._differing(entry, epoch, rank) for rank in ranks)
        wrong = [each for those in found for each in those]
        if wrong:
            self._fail(entry, SinkEvent.MISMATCH, mismatch(wrong), epoch)
        else:
            self._on(entry, SinkEvent.VERIFIED, epoch)

    async def _differing(self, entry: Reservation, epoch: int, rank: int) -> list[RunDigest]:
        """Those of one rank. It compares step by step, and each is progress."""
        transfer_id = entry.ticket.transfer_id
        digests = tuple(each for each in entry.epoch.digests if each.sink_rank == rank)
        reply = await call_rank(self._call, rank, Verify(transfer_id, digests))
        wrong = list(reply.digests)
        while reply.left:
            entry.renew()
            reply = await call_rank(self._call, rank, Verify(transfer_id, (), epoch))
            wrong += reply.digests
        return wrong

    def _activate(self, entry: Reservation) -> None:
        self.counts["landed"] += 1
        self.counts["bytes"] += entry.nbytes
        self._finish(entry)
        self._arrivals[entry.ticket.transfer_id] = entry.arrival
        entry.arrival.set_result(Arrival(entry.epoch.payload, entry.nbytes))
        self._tasks.start(self._on_ranks(Release(entry.ticket.transfer_id)))

    async def _quiesce(self, entry: Reservation) -> None:
        if entry.opening is not None:  # or an accept could overtake the quiesce
            await asyncio.wait([entry.opening])
        await self._on_ranks(Quiesce(entry.ticket.transfer_id))
        self._on(entry, SinkEvent.QUIESCED)

    async def _on_ranks(self, command: Quiesce | Release) -> None:
        dead = await call_living(self._call, dict.fromkeys(self._rank_ids, command))
        self.counts["dead_rank"] += dead

    def _free(self, entry: Reservation) -> None:
        assert entry.cause is not None
        self._finish(entry)
        try:
            entry.on_freed()
        finally:  # nobody waits for ever because of a defect there
            entry.arrival.set_exception(entry.cause)
            if not entry.epoch.ticket.done():
                entry.epoch.ticket.set_exception(entry.cause)

    def _finish(self, entry: Reservation) -> None:
        if entry.lease is not None:
            entry.lease.end()
        entry.epoch.digests = ()
        del self._live[entry.ticket.transfer_id]
        self._finished[entry.ticket.transfer_id] = Outcome.of(entry)
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)


def _unknown(transfer_id: bytes) -> TransferError:
    message = f"no transfer {transfer_id.hex()} here"
    return TransferError(message, code="UNKNOWN_TRANSFER", blame=Blame.PREFILL)


def _check_epoch(epoch: int | None, current: int) -> None:
    if epoch not in (None, current):
        raise _stale(f"epoch {epoch} is not the current {current}")


def _stale(message: str) -> TransferError:
    return TransferError(message, code="STALE_EPOCH", blame=Blame.PREFILL, retryable=True)


def _cancelled(when: str) -> TransferError:
    """Whether its client left or its router cannot reach this node, a sink does not know."""
    message = f"the call that waits for the KV ended {when}"
    return TransferError(message, code="CANCELLED", blame=Blame.NETWORK, retryable=True)
