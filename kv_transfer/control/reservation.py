"""One transfer as its sink keeps it: the blocks it holds, whose turn it is, who waits for what.

Drives the `SINK` table of `protocol.py`. Events come from `KVSink` (the waiter, the sources, what
ranks report), from the ranks' answers and from the lease; `_do` carries the actions out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.kv_transfer.commands import (
    Accept,
    Borrow,
    Quiesce,
    RankCalls,
    Release,
    Verify,
    VerifyMore,
    all_of,
)
from pdserve.kv_transfer.connector import Borrowed, SinkTransfer
from pdserve.kv_transfer.control.background import Lease, Tasks, new_future
from pdserve.kv_transfer.control.epoch import ArrivedKV, Epoch, stale_epoch
from pdserve.kv_transfer.control.loans import Guests, Lender, Loan
from pdserve.kv_transfer.control.protocol import Action, SinkEvent, SinkState, sink_machine
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest, mismatch


class Reservation:
    """Holds the blocks until the waiter has them (`arrival` has a result) or they are free
    (`on_freed` was called, `arrival` has an error)."""

    def __init__(
        self,
        ticket: Ticket,
        block_ids: Sequence[int],
        ranks: RankCalls,
        tasks: Tasks,
        *,
        guests: Guests,
        on_freed: Callable[[], None],
        on_over: Callable[[Reservation], None],
        on_hosted: Callable[[dict[int, int]], None] | None,
        give_back: Callable[[Lender, Mapping[Loan, Sequence[int]]], None],
    ) -> None:
        """`on_over`: it has an outcome, which is about to be told to whoever waits. `give_back`:
        what was borrowed and is not needed."""
        self.ticket = ticket  # of the current epoch
        self.block_ids = tuple(block_ids)
        self.epoch = Epoch()
        self.arrival: asyncio.Future[ArrivedKV] = new_future()
        self.machine = sink_machine(ranks.counts)
        self.cause: PdserveError | None = None  # of the present failure: the first one
        self.progress = 0  # grows as the lease is renewed
        self.awaited = False  # somebody has `arrival`
        self._ranks = ranks
        self._rank_ids = [each.rank for each in ticket.endpoints]
        self._counts = ranks.counts
        self._tasks = tasks
        self._on_freed = on_freed
        self._on_over = on_over
        self._guests = guests
        self._on_hosted = on_hosted
        self._give_back = give_back
        self._lease = Lease(ticket.lease_s, self._lapse)
        self._open()

    # ---- what others want of it --------------------------------------------------------------

    async def issued(self) -> Ticket:
        """The first epoch's ticket, once every rank takes data.

        Raises:
            TransferError: a rank refused, or somebody else asked for another epoch meanwhile.
        """
        try:
            return await asyncio.shield(self.epoch.ticket)
        except asyncio.CancelledError:
            self.cancel("while blocks were reserved")
            raise

    async def commit(self, first_token: pb.FirstToken, digests: Sequence[RunDigest]) -> int:
        """As `KVSink.commit`, of the current epoch."""
        epoch = self.epoch
        if self.machine.state in (SinkState.RESERVED, SinkState.LANDED):
            epoch.first_token, epoch.digests = first_token, digests
            self.renew()
        self.on(SinkEvent.COMMIT)
        return await asyncio.shield(epoch.committed)

    async def retarget(self, *, preempts: bool) -> Ticket:
        """As `KVSink.retarget`. Of several who wait for a ticket one gets it: the last that
        `preempts` the others, which fail."""
        if self.machine.state is SinkState.DRAINING and self.cause is not None:
            raise self.cause
        superseded = stale_epoch("another prefill node takes over")
        if not self.epoch.ticket.done():
            if not preempts:
                raise superseded
            self.epoch.ticket.set_exception(superseded)
        self.cause = self.cause or superseded
        mine = self.epoch.ticket = new_future()
        self.renew()
        self.on(SinkEvent.RETARGET)
        return await asyncio.shield(mine)

    def cancel(self, when: str) -> None:
        """Nobody waits for it any more. Whether its client left or its router cannot reach this
        node, a sink does not know."""
        message = f"the call that waits for the KV ended {when}"
        error = TransferError(message, code="CANCELLED", blame=Blame.NETWORK, retryable=True)
        self.on(SinkEvent.CANCEL, error)

    def on(
        self, event: SinkEvent, error: PdserveError | None = None, epoch: int | None = None
    ) -> None:
        """`epoch` is the one it happened in; None: the current one. Without effect where it comes
        too late to matter: the first error stays the cause."""
        actions = self.machine.on(event, epoch)
        if epoch in (None, self.machine.epoch):
            self.epoch.times.setdefault(event, asyncio.get_running_loop().time())
        if actions:
            self.cause = error or self.cause
        for action in actions:
            self._do(action)

    def landed(self, rank: int, nbytes: int, borrowed: Borrowed | None = None) -> None:
        """All of the current epoch's data is in this rank, or `borrowed` by it."""
        self.epoch.landed[rank] = nbytes
        if borrowed is not None:
            self.epoch.borrowed[rank] = borrowed
        self._count_landed()

    def renew(self) -> None:
        self.progress += 1
        self._lease.renew()

    # ---- the machine -------------------------------------------------------------------------

    def _lapse(self) -> None:
        error = TransferError(
            f"no KV arrived for {self.ticket.lease_s} s", code="LEASE_EXPIRED", retryable=True
        )
        self.on(SinkEvent.LEASE_LAPSED, self.cause or error)

    def _do(self, action: Action) -> None:
        match action:
            case Action.OPEN:
                self._open()
            case Action.ISSUE_TICKET:
                self._issue()
            case Action.VERIFY:
                borrowed = [self.epoch.borrowed.get(rank) for rank in self._rank_ids]
                self.epoch.stay = self._guests.stay(borrowed, self._on_hosted is not None)
                self._start(self._verify(self.machine.epoch))
            case Action.ACTIVATE:
                self._activate()
            case Action.REPLY_COMMIT:
                self.epoch.committed.set_result(self.epoch.nbytes)
            case Action.REJECT_COMMIT:
                assert self.cause is not None
                self._counts[f"stopped/{self.cause.code}"] += 1
                self.epoch.committed.set_exception(self.cause)
                self.renew()  # another source has a whole lease to take over
            case Action.REPORT_FAILURE:
                assert self.cause is not None
                self._counts[f"failed/{self.cause.code}"] += 1
            case Action.QUIESCE:
                self._unpin()
                self._tasks.start(self._quiesce())
            case Action.FREE:
                self._free()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """On behalf of the present epoch, which fails with what the work raises."""
        epoch = self.machine.epoch
        return self._tasks.start(work, lambda error: self.on(SinkEvent.FAILED, error, epoch))

    def _open(self) -> None:
        waiting = self.epoch.ticket
        self.epoch = Epoch()
        if not waiting.done():
            self.epoch.ticket = waiting
        self._opening = self._start(self._accept(self.machine.epoch))

    async def _accept(self, epoch: int) -> None:
        ticket = self.ticket
        transfer = SinkTransfer(ticket.transfer_id, epoch, ticket.first_block, self.block_ids)
        await self._ranks.send_all(dict.fromkeys(self._rank_ids, Accept(transfer)))
        self.on(SinkEvent.OPENED, epoch=epoch)
        self._count_landed()  # a rank that wants no block has landed as it accepted

    def _count_landed(self) -> None:
        if len(self.epoch.landed) == len(self._rank_ids):
            self.on(SinkEvent.RANKS_LANDED)

    def _issue(self) -> None:
        self.ticket = replace(self.ticket, epoch=self.machine.epoch)
        self.cause = None
        self.renew()
        self.epoch.ticket.set_result(self.ticket)

    async def _verify(self, epoch: int) -> None:
        """Every rank compares what it holds with what the source says it sent."""
        await self._settle(epoch)
        ranks = self._rank_ids if self.ticket.digests else ()
        found = await all_of(self._compare(epoch, rank) for rank in ranks)
        wrong = [each for those in found for each in those]
        if wrong:
            self.on(SinkEvent.MISMATCH, mismatch(wrong), epoch)
        else:
            self.on(SinkEvent.VERIFIED, epoch=epoch)

    def _unpin(self) -> None:
        """The epoch is over."""
        stay, self.epoch.stay = self.epoch.stay, None
        if stay is not None and stay.lender is not None:
            self._guests.unpin(stay.lender)

    async def _settle(self, epoch: int) -> None:
        """What was borrowed gets its place among the blocks of every rank, or is copied."""
        stay = self.epoch.stay
        if stay is None or self.machine.epoch != epoch:
            return
        first = None if stay.lender is None else stay.lender.first
        borrow = Borrow(self.ticket.transfer_id, epoch, first)
        await self._ranks.send_all(dict.fromkeys(self.epoch.borrowed, borrow))

    async def _compare(self, epoch: int, rank: int) -> list[RunDigest]:
        """The digests of one rank that are wrong. It compares step by step, each is progress."""
        transfer_id = self.ticket.transfer_id
        digests = tuple(each for each in self.epoch.digests if each.sink_rank == rank)
        reply = await self._ranks.send(rank, Verify(transfer_id, epoch, digests))
        wrong = list(reply.digests)
        while reply.left:
            self.renew()
            reply = await self._ranks.send(rank, VerifyMore(transfer_id, epoch))
            wrong += reply.digests
        return wrong

    async def _quiesce(self) -> None:
        await asyncio.wait([self._opening])  # or an accept could overtake the quiesce
        await self._ranks.send_alive(self._rank_ids, Quiesce(self.ticket.transfer_id))
        self.on(SinkEvent.QUIESCED)

    # ---- the ends ----------------------------------------------------------------------------

    def _activate(self) -> None:
        arrival = self.epoch.arrival()
        self._counts["landed"] += 1
        self._counts["bytes"] += arrival.nbytes
        self._end()
        self._tasks.start(self._release())
        try:
            self._host()
        except Exception as error:  # nobody waits for ever because of a defect there
            self.arrival.set_exception(error)
            self.epoch.committed.set_exception(error)
            raise
        self.arrival.set_result(arrival)

    async def _release(self) -> None:
        await self._ranks.send_alive(self._rank_ids, Release(self.ticket.transfer_id))

    def _host(self) -> None:
        """What was borrowed is the waiter's now, to be given back when nobody uses it any more."""
        stay = self.epoch.stay
        if stay is None or stay.lender is None or self._on_hosted is None:
            return
        loan = self.ticket.transfer_id, self.machine.epoch
        twice = self._guests.hold(stay.lender, loan, stay.blocks.values())
        self._unpin()
        self._counts["borrowed_blocks"] += len(stay.blocks)
        self._on_hosted(stay.guests)
        if twice:
            self._give_back(stay.lender, {loan: twice})

    def _free(self) -> None:
        assert self.cause is not None
        self._end()
        try:
            self._on_freed()
        finally:  # nobody waits for ever because of a defect there
            self.arrival.set_exception(self.cause)
            if not self.epoch.ticket.done():
                self.epoch.ticket.set_exception(self.cause)

    def _end(self) -> None:
        self._lease.end()
        self.epoch.digests = ()
        self._on_over(self)
