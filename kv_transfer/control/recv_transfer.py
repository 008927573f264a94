"""One transfer on its sink: the blocks it holds, the source whose turn it is, the calls that wait.

It drives the `SINK` table of `protocol.py`. Events come from `KVSink` (the decode session, the
sources, the ranks' reports), from the ranks' answers and from the lease; `_do` executes the
actions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.kv_transfer.commands import (
    Accept,
    Quiesce,
    RankCalls,
    Release,
    Verify,
    all_of,
)
from pdserve.kv_transfer.connector import RunDigest, SinkTransfer
from pdserve.kv_transfer.control.background import Lease, Tasks, new_future
from pdserve.kv_transfer.control.protocol import Action, SinkEvent, SinkState, sink_machine
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import mismatch


@dataclass(frozen=True, slots=True)
class RecvResult:
    """Tells the decode session that all KV is in its blocks."""

    first_token: pb.FirstToken  # as the source committed it
    nbytes: int
    connectors: tuple[str, ...] = ()  # the connectors that moved bytes
    num_digests: int = 0  # the source's digests, each compared with the blocks
    # Seconds from the epoch's ticket:
    data_s: float = 0.0  # until the last byte was in place
    commit_s: float = 0.0  # until the source had committed
    verify_s: float = 0.0  # from the later of both until the digests were compared


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Names the blocks of one KV group that are to be filled: `ids[i]` is the physical block of
    logical block `first + i`."""

    first: int
    ids: tuple[int, ...]


class Epoch:
    """Records one source's turn: its commit and the bytes that have landed so far."""

    def __init__(self) -> None:
        self.landed: dict[int, int] = {}  # share → bytes
        self.connectors: set[str] = set()
        self.times: dict[SinkEvent, float] = {}  # when each event came
        self.first_token = pb.FirstToken()  # as committed
        self.digests: Sequence[RunDigest] = ()
        self.num_compared = 0
        self.ticket: asyncio.Future[Ticket] = new_future()  # for `issued`, `retarget`
        self.committed: asyncio.Future[int] = new_future()  # for `commit`: bytes landed

    @property
    def nbytes(self) -> int:
        return sum(self.landed.values())

    def result(self) -> RecvResult:
        """Makes the result of an epoch that is verified."""
        times = self.times
        landed, committed = times[SinkEvent.RANKS_LANDED], times[SinkEvent.COMMIT]
        return RecvResult(
            self.first_token,
            self.nbytes,
            tuple(sorted(self.connectors)),
            self.num_compared,
            data_s=landed - times[SinkEvent.OPENED],
            commit_s=committed - times[SinkEvent.OPENED],
            verify_s=times[SinkEvent.VERIFIED] - max(landed, committed),
        )


class RecvTransfer:
    """Holds the blocks until the decode session owns them (`arrival` has a result) or they are free
    (`on_freed` was called, `arrival` has an error)."""

    def __init__(
        self,
        ticket: Ticket,
        blocks: Sequence[GroupBlocks],
        ranks: RankCalls,
        tasks: Tasks,
        *,
        on_freed: Callable[[], None],
        on_over: Callable[[RecvTransfer], None],
    ) -> None:
        """Calls `on_over` when it has an outcome, just before `arrival` is done."""
        self.ticket = ticket  # of the current epoch
        self.blocks = tuple(blocks)
        self.epoch = Epoch()
        self.arrival: asyncio.Future[RecvResult] = new_future()
        self.machine = sink_machine(ranks.counts)
        self.cause: PdserveError | None = None  # of the present failure: the first one
        self.progress = 0  # grows as the lease is renewed
        self._ranks = ranks
        self._shares = range(len(ticket.endpoints))
        self._counts = ranks.counts
        self._tasks = tasks
        self._on_freed = on_freed
        self._on_over = on_over
        self._lease = Lease(ticket.lease_s, self._lapse)
        self._open()

    # ---- calls of the decode session and of the sources --------------------------------------

    async def issued(self) -> Ticket:
        """Returns the first epoch's ticket, once every rank takes data.

        Raises:
            TransferError: a rank refused, or another caller requested another epoch meanwhile.
        """
        try:
            return await asyncio.shield(self.epoch.ticket)
        except asyncio.CancelledError:
            self.cancel("while blocks were reserved")
            raise

    async def commit(self, first_token: pb.FirstToken, digests: Sequence[RunDigest]) -> int:
        """Implements `KVSink.commit`, for the current epoch."""
        epoch = self.epoch
        if self.machine.state in (SinkState.RESERVED, SinkState.LANDED):
            epoch.first_token, epoch.digests = first_token, digests
            self.renew()
        self.on(SinkEvent.COMMIT)
        return await asyncio.shield(epoch.committed)

    async def retarget(self, *, preempts: bool) -> Ticket:
        """Implements `KVSink.retarget`. Of several calls that wait for a ticket, the last one that
        `preempts` gets it and the others fail."""
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
        """Ends it because its session ended. The sink does not know whether the client left or the
        router cannot reach this node."""
        message = f"the call that waits for the KV ended {when}"
        error = TransferError(message, code="CANCELLED", blame=Blame.NETWORK, retryable=True)
        self.on(SinkEvent.CANCEL, error)

    def on(
        self, event: SinkEvent, error: PdserveError | None = None, epoch: int | None = None
    ) -> None:
        """Handles an event of an `epoch`; None is the current one. A late event has no effect, so
        the first error stays the cause."""
        actions = self.machine.on(event, epoch)
        if epoch in (None, self.machine.epoch):
            self.epoch.times.setdefault(event, asyncio.get_running_loop().time())
        if actions:
            self.cause = error or self.cause
        for action in actions:
            self._do(action)

    def landed(self, share: int, nbytes: int, connectors: Collection[str]) -> None:
        """Notes that all of the current epoch's data is in this share, by these connectors."""
        self.epoch.landed[share] = nbytes
        self.epoch.connectors |= {*connectors}
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
                self._tasks.start(self._quiesce())
            case Action.FREE:
                self._free()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts `work` for the present epoch, which fails with any error that it raises."""
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
        accepts = [
            Accept(SinkTransfer(ticket.transfer_id, epoch, each.first, each.ids, ticket.digests))
            for each in self.blocks
        ]
        wanted = (accepts[each.group] for each in ticket.endpoints)
        await self._ranks.send_all(dict(enumerate(wanted)))
        self.on(SinkEvent.OPENED, epoch=epoch)
        self._count_landed()  # a rank that needs no block has landed as it accepted

    def _count_landed(self) -> None:
        if len(self.epoch.landed) == len(self._shares):
            self.on(SinkEvent.RANKS_LANDED)

    def _issue(self) -> None:
        self.ticket = replace(self.ticket, epoch=self.machine.epoch)
        self.cause = None
        self.renew()
        self.epoch.ticket.set_result(self.ticket)

    async def _verify(self, epoch: int) -> None:
        """Lets every rank compare its blocks with the source's digests."""
        shares = self._shares if self.ticket.digests else ()
        found = await all_of(self._compare(epoch, share) for share in shares)
        wrong = [each for those in found for each in those]
        if wrong:
            self.on(SinkEvent.MISMATCH, mismatch(wrong), epoch)
        else:
            self.epoch.num_compared = len(self.epoch.digests) if self.ticket.digests else 0
            self.on(SinkEvent.VERIFIED, epoch=epoch)

    async def _compare(self, epoch: int, share: int) -> list[RunDigest]:
        """Returns one share's digests that differ. The rank works in steps, each of which renews
        the lease."""
        transfer_id = self.ticket.transfer_id
        digests = tuple(each for each in self.epoch.digests if each.sink == share)
        wrong: list[RunDigest] = []
        start = 0
        while True:
            reply = await self._ranks.send(share, Verify(transfer_id, epoch, digests, start))
            wrong += reply.digests
            if not reply.left:
                return wrong
            start = len(digests) - reply.left
            self.renew()

    async def _quiesce(self) -> None:
        await asyncio.wait([self._opening])  # no accept may come after the quiesce
        await self._ranks.send_alive(self._shares, Quiesce(self.ticket.transfer_id))
        self.on(SinkEvent.QUIESCED)

    # ---- the ends ----------------------------------------------------------------------------

    def _activate(self) -> None:
        result = self.epoch.result()
        self._counts["landed"] += 1
        self._counts["bytes"] += result.nbytes
        self._end()
        self._tasks.start(self._release())
        self.arrival.set_result(result)

    async def _release(self) -> None:
        await self._ranks.send_alive(self._shares, Release(self.ticket.transfer_id))

    def _free(self) -> None:
        assert self.cause is not None
        self._end()
        try:
            self._on_freed()
        finally:  # even if `on_freed` raises, no call waits forever
            self.arrival.set_exception(self.cause)
            if not self.epoch.ticket.done():
                self.epoch.ticket.set_exception(self.cause)

    def _end(self) -> None:
        self._lease.end()
        self.epoch.digests = ()
        self._on_over(self)


def stale_epoch(message: str) -> TransferError:
    return TransferError(message, code="STALE_EPOCH", blame=Blame.PREFILL, retryable=True)
