"""The sink's control half: reserves, counts ranks, keeps leases, answers commits.

    reserve() ──▶ ticket ──▶ … ──▶ wait() returns: the waiter owns the blocks
                                   wait() raises:  on_freed() was called, the blocks are free

Lives on the event loop of the decode node; drives the `SINK` table of `protocol.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.core.errors import Blame, Cancelled, PdserveError, TransferError
from common.core.ids import new_transfer_id
from kv_transfer.connector import Failed, Landed, SinkTransfer
from kv_transfer.lease import Lease
from kv_transfer.protocol import SINK, Action, Machine, SinkEvent, SinkState
from kv_transfer.rank import (
    Accept,
    Call,
    Quiesce,
    Release,
    call_living,
    call_ranks,
    decode_event,
    failure,
)
from kv_transfer.tasks import Tasks
from kv_transfer.ticket import RankEndpoint, Ticket

REMEMBERED = 1024  # finished transfers whose outcome a late commit still learns


@dataclass(frozen=True, slots=True)
class Arrival:
    """All KV is in place."""

    first_token: Any  # what the source passed to the commit
    nbytes: int


@dataclass(slots=True)
class Reservation:
    """One transfer the sink holds blocks for."""

    ticket: Ticket
    machine: Machine[SinkState, SinkEvent]
    on_freed: Callable[[], None]
    arrival: asyncio.Future[Arrival]  # resolved last: the blocks are the waiter's, or free
    committed: asyncio.Future[int]
    lease: Lease | None = None
    accepting: asyncio.Task[None] | None = None
    landed: dict[int, int] = field(default_factory=dict)  # rank → bytes
    payload: Any = None
    cause: PdserveError | None = None  # the first one


class KVSink:
    """`call` and `on_event` are the executor's; `address` is where sources commit."""

    def __init__(
        self,
        ranks: Sequence[RankEndpoint],
        *,
        fingerprint: str,
        connector: str,
        block_size: int,
        address: str,
        lease_s: float,
        call: Call,
    ) -> None:
        self._ranks = tuple(ranks)
        self._rank_ids = [each.rank for each in ranks]
        self._fingerprint = fingerprint
        self._connector = connector
        self._block_size = block_size
        self._address = address
        self._lease_s = lease_s
        self._call = call
        self._live: dict[bytes, Reservation] = {}
        self._finished: OrderedDict[bytes, Reservation] = OrderedDict()
        self._tasks = Tasks()
        self.counts: Counter[str] = Counter()  # landed, bytes, failed/CODE, late state/event

    async def reserve(
        self,
        num_prompt_tokens: int,
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
        ticket = self._ticket(num_prompt_tokens, first_block)
        entry = self._open(ticket, on_freed)
        transfer = SinkTransfer(ticket.transfer_id, ticket.epoch, first_block, tuple(block_ids))
        command = dict.fromkeys(self._rank_ids, Accept(transfer))
        entry.accepting = self._tasks.start(call_ranks(self._call, command))
        try:
            await asyncio.shield(entry.accepting)
        except PdserveError as error:
            self._fail(entry, SinkEvent.FAILED, error)
        except asyncio.CancelledError:
            self._fail(entry, SinkEvent.ABORT, Cancelled("cancelled while blocks were reserved"))
            raise
        if entry.cause is not None:
            await self.wait(ticket.transfer_id)  # raises, once the blocks are free
        return ticket

    def _ticket(self, num_prompt_tokens: int, first_block: int) -> Ticket:
        return Ticket(
            transfer_id=new_transfer_id(),
            epoch=1,
            lease_s=self._lease_s,
            address=self._address,
            fingerprint=self._fingerprint,
            connector=self._connector,
            block_size=self._block_size,
            num_prompt_tokens=num_prompt_tokens,
            first_block=first_block,
            endpoints=self._ranks,
        )

    def _open(self, ticket: Ticket, on_freed: Callable[[], None]) -> Reservation:
        loop = asyncio.get_running_loop()
        machine = Machine(SINK, SinkState.RESERVED, self.counts)
        entry = Reservation(ticket, machine, on_freed, loop.create_future(), loop.create_future())
        entry.lease = Lease(self._lease_s, lambda: self._lapse(entry))
        for future in (entry.arrival, entry.committed):  # nobody need be waiting when it fails
            future.add_done_callback(lambda done: done.exception())
        self._live[ticket.transfer_id] = entry
        return entry

    async def wait(self, transfer_id: bytes) -> Arrival:
        """Waits until the transfer is committed and has landed on every rank. From then on
        the blocks are the caller's.

        Raises:
            TransferError, Cancelled: it failed; `on_freed` was called before this raises.
        """
        return await asyncio.shield(self._find(transfer_id).arrival)

    async def commit(self, transfer_id: bytes, epoch: int, payload: Any) -> int:
        """The source has handed over everything and passes `payload`. Returns the bytes that
        landed, once the sequence is runnable. A repeated commit gets the same answer.

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why the transfer failed.
        """
        entry = self._find(transfer_id, epoch)
        if entry.machine.state in (SinkState.RESERVED, SinkState.LANDED):
            entry.payload = payload
            self._renew(entry)
        self._on(entry, SinkEvent.COMMIT)
        return await asyncio.shield(entry.committed)

    def renew(self, transfer_id: bytes, epoch: int) -> None:
        """The source works on it though nothing moves yet (queued, computing).

        Raises:
            TransferError: UNKNOWN_TRANSFER, STALE_EPOCH, or why the transfer failed.
        """
        entry = self._find(transfer_id, epoch)
        if entry.cause is not None:
            raise entry.cause
        if entry.lease is not None:
            entry.lease.renew()

    def abort(self, transfer_id: bytes, epoch: int, reason: str) -> None:
        """The source gives up; raises TransferError (UNKNOWN_TRANSFER, STALE_EPOCH)."""
        error = TransferError(
            f"the prefill node gave up: {reason}",
            code="ABORTED",
            blame=Blame.PREFILL,
            retryable=True,
        )
        self._fail(self._find(transfer_id, epoch), SinkEvent.ABORT, error)

    async def cancel(self, transfer_id: bytes) -> bool:
        """The client left. Returns True once the blocks are free; False when they are the
        waiter's already, who must free them. Unknown transfers are free."""
        entry = self._live.get(transfer_id) or self._finished.get(transfer_id)
        if entry is None:
            return True
        self._fail(entry, SinkEvent.ABORT, Cancelled("the client left during the hand-off"))
        await asyncio.wait([entry.arrival])
        return entry.arrival.exception() is not None

    def on_event(self, rank: int, message: bytes) -> None:
        """A rank's connector reports; on the event loop."""
        event = decode_event(message)
        entry = self._live.get(event.transfer_id)
        if entry is None or entry.ticket.epoch != event.epoch:
            self.counts["late_event"] += 1
            return
        match event:
            case Failed():
                self._fail(entry, SinkEvent.FAILED, failure(event))
            case Landed(_, _, nbytes):
                self._rank_landed(entry, rank, nbytes)
        self._renew(entry)

    def _renew(self, entry: Reservation) -> None:
        if entry.lease is not None:
            entry.lease.renew()

    async def close(self) -> None:
        """Cancels what is under way and waits until all blocks are handed back."""
        await asyncio.gather(*(self.cancel(transfer_id) for transfer_id in list(self._live)))
        await self._tasks.join()

    def _find(self, transfer_id: bytes, epoch: int | None = None) -> Reservation:
        entry = self._live.get(transfer_id) or self._finished.get(transfer_id)
        if entry is None:
            raise TransferError(
                f"no transfer {transfer_id.hex()} here",
                code="UNKNOWN_TRANSFER",
                blame=Blame.PREFILL,
            )
        if epoch is not None and epoch != entry.ticket.epoch:
            raise TransferError(
                f"epoch {epoch} is not the current {entry.ticket.epoch}",
                code="STALE_EPOCH",
                blame=Blame.PREFILL,
            )
        return entry

    def _rank_landed(self, entry: Reservation, rank: int, nbytes: int) -> None:
        entry.landed[rank] = nbytes
        if len(entry.landed) == len(self._ranks):
            self._on(entry, SinkEvent.RANKS_LANDED)

    def _lapse(self, entry: Reservation) -> None:
        error = TransferError(
            f"no KV arrived for {self._lease_s} s", code="LEASE_EXPIRED", retryable=True
        )
        self._fail(entry, SinkEvent.LEASE_LAPSED, error)

    def _fail(self, entry: Reservation, event: SinkEvent, error: PdserveError) -> None:
        actions = entry.machine.on(event)
        if actions:  # else it is too late to matter: the first cause stays
            entry.cause = error
        self._run(entry, actions)

    def _on(self, entry: Reservation, event: SinkEvent) -> None:
        self._run(entry, entry.machine.on(event))

    def _run(self, entry: Reservation, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(entry, action)

    def _do(self, entry: Reservation, action: Action) -> None:
        match action:
            case Action.ACTIVATE:
                self._activate(entry)
            case Action.REPLY_COMMIT:
                entry.committed.set_result(sum(entry.landed.values()))
            case Action.REJECT_COMMIT:
                assert entry.cause is not None
                entry.committed.set_exception(entry.cause)
            case Action.REPORT_FAILURE:
                assert entry.cause is not None
                self.counts[f"failed/{entry.cause.code}"] += 1
            case Action.QUIESCE:
                self._tasks.start(self._quiesce(entry))
            case Action.FREE:
                self._free(entry)

    def _activate(self, entry: Reservation) -> None:
        nbytes = sum(entry.landed.values())
        self.counts["landed"] += 1
        self.counts["bytes"] += nbytes
        self._finish(entry)
        entry.arrival.set_result(Arrival(entry.payload, nbytes))
        self._tasks.start(self._on_ranks(Release(entry.ticket.transfer_id)))

    async def _quiesce(self, entry: Reservation) -> None:
        if entry.accepting is not None:  # or an accept could overtake the quiesce
            await asyncio.wait([entry.accepting])
        await self._on_ranks(Quiesce(entry.ticket.transfer_id))
        self._on(entry, SinkEvent.QUIESCED)

    async def _on_ranks(self, command: Quiesce | Release) -> None:
        dead = await call_living(self._call, dict.fromkeys(self._rank_ids, command))
        self.counts["dead_rank"] += dead

    def _free(self, entry: Reservation) -> None:
        assert entry.cause is not None
        self._finish(entry)
        entry.on_freed()
        entry.arrival.set_exception(entry.cause)

    def _finish(self, entry: Reservation) -> None:
        if entry.lease is not None:
            entry.lease.end()
        del self._live[entry.ticket.transfer_id]
        self._finished[entry.ticket.transfer_id] = entry
        while len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
