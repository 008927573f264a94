"""The source's control half: it plans a transfer, announces runs to its ranks, commits and keeps
the lease. When the sink finds wrong digests, everything is sent once more under a new epoch.

    begin() ──▶ transfer.ready(run) … ──▶ transfer.commit() or abort()
    when either has an outcome, no rank reads the blocks any more

It belongs to the event loop of the prefill node and drives the `SOURCE` table of `protocol.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.trace import traceparent_var
from pdserve.kv_transfer.commands import Call, RankCalls, transfer_error
from pdserve.kv_transfer.connector import BlockRun, Failed, RunDigest, Sent
from pdserve.kv_transfer.control.announcer import LeaseKeeper, RunAnnouncer
from pdserve.kv_transfer.control.background import Lease, Tasks, new_future
from pdserve.kv_transfer.control.protocol import Action, SourceEvent, source_machine
from pdserve.kv_transfer.control.sink_client import SinkClient
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.layout import Piece, Share, adapted, plan

logger = logging.getLogger(__name__)

RUN_NBYTES = 32 << 20  # in one rank; longer runs are cut, down to one block

T = TypeVar("T")


class KVSource:
    """Speaks to the ranks by the executor's `call` and `on_event`."""

    def __init__(
        self,
        shares: Sequence[Share],
        *,
        fingerprint: str,
        block_size: int,
        lease_s: float,
        call: Call,
        sink: SinkClient,
        block_nbytes: int = 0,
    ) -> None:
        """`block_nbytes`: the size of a block in the largest share."""
        self.shares = tuple(shares)
        self.run_blocks = max(1, RUN_NBYTES // block_nbytes) if block_nbytes else 1 << 20
        self.lease_s = lease_s
        self.sink = sink
        self.counts: Counter[str] = Counter()  # sent, bytes, failed/CODE, late state/event
        self.ranks = RankCalls(call, self.counts, self.shares)
        self.tasks = Tasks(Blame.PREFILL)
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._live: dict[bytes, SendTransfer] = {}

    def begin(self, ticket: Ticket, adapter: str = "") -> SendTransfer:
        """Starts a transfer, which the caller must end by `commit` or `abort`. `adapter` is the
        digest of the LoRA adapter that computes the KV, if any.

        Raises:
            TransferError: FINGERPRINT_MISMATCH, LAYOUT_MISMATCH, or a duplicate ticket.
        """
        try:
            self._check(ticket, adapter)
            pieces = plan(self.shares, [each.share for each in ticket.endpoints])
        except TransferError as error:
            self.counts[f"failed/{error.code}"] += 1
            raise
        self.sink.connect(ticket)
        transfer = self._live[ticket.transfer_id] = SendTransfer(self, ticket, pieces)
        return transfer

    def _check(self, ticket: Ticket, adapter: str) -> None:
        fingerprint = adapted(self._fingerprint, adapter)
        for code, name, ours, theirs in (
            ("FINGERPRINT_MISMATCH", "fingerprint", fingerprint, ticket.fingerprint),
            ("LAYOUT_MISMATCH", "block size", self._block_size, ticket.block_size),
        ):
            if ours != theirs:
                message = (
                    f"{name}: the prefill node has {ours}, the decode node {theirs}; "
                    "give both nodes the same options"
                )
                raise TransferError(message, code=code, blame=Blame.PREFILL, retryable=False)
        groups = {each.group for each in self.shares}
        if groups != set(range(len(ticket.first_blocks))):
            raise TransferError(
                f"the ticket has {len(ticket.first_blocks)} KV groups, the prefill node "
                f"{len(groups)}",
                code="LAYOUT_MISMATCH",
                blame=Blame.DECODE,
                retryable=False,
            )
        if ticket.transfer_id in self._live:
            raise TransferError(
                f"transfer {ticket.transfer_id.hex()} is under way", code="STALE_EPOCH"
            )

    def on_event(self, rank: int, message: bytes) -> None:
        """Handles an event of a rank's connector; called on the event loop."""
        share, event = self.ranks.decode_event(rank, message)
        transfer = self._live.get(event.transfer_id)
        if transfer is None or transfer.ticket.epoch != event.epoch:
            self.counts["late_event"] += 1
        elif isinstance(event, Failed):
            transfer.fail(transfer_error(event))
        else:
            transfer.moved()
            if isinstance(event, Sent):
                transfer.sent(share, event.digests)

    def forget(self, transfer: SendTransfer) -> None:
        del self._live[transfer.ticket.transfer_id]

    async def close(self) -> None:
        """Aborts all transfers and waits until no rank reads their blocks."""
        for transfer in list(self._live.values()):
            await transfer.abort("the prefill node stops")
        await self.tasks.join()


@dataclass(frozen=True, slots=True)
class SendResult:
    nbytes: int
    seconds: float  # from the first run announced to the commit's answer


class SendTransfer:
    """Sends one prompt's KV; `KVSource.begin` makes it."""

    def __init__(self, source: KVSource, ticket: Ticket, pieces: Sequence[Piece]) -> None:
        self.ticket = ticket  # of the present epoch
        self.outcome: asyncio.Future[SendResult] = new_future()  # done: no rank reads the blocks
        self._source = source
        self._machine = source_machine(source.counts)
        self._lease = Lease(source.lease_s, self._lapse)
        self._cause: PdserveError | None = None
        self._first_token = pb.FirstToken()  # as it is committed
        self._nbytes = 0
        self._started: float | None = None
        self._seconds = 0.0
        self._trace = traceparent_var.get()  # the request's; `commit` runs in another task
        groups = [each.group for each in source.shares]
        self._announcer = RunAnnouncer(
            source.ranks, pieces, groups, ticket, source.run_blocks, self._lease
        )
        self._keeper = LeaseKeeper(source.sink, ticket, self._lease)
        self._announcing: asyncio.Task[None] | None = self._start(self._announcer.run())
        self._renewing: asyncio.Task[None] | None = self._start(
            self._keeper.run(partial(self._on, SourceEvent.RENEW_REFUSED))
        )
        self._asking: asyncio.Task[None] | None = None  # the commit, or the new epoch

    def ready(
        self, run: BlockRun, block_ids: Sequence[int], last: bool = False, group: int = 0
    ) -> None:
        """Announces blocks of a KV group that hold final KV: `block_ids` are this node's blocks for
        `run`. A group's runs come in order; blocks that the sink does not ask for are left out. It
        never blocks and has no effect on a transfer that has failed."""
        self._lease.renew()
        self._started = self._started or asyncio.get_running_loop().time()
        try:
            self._announcer.announce(group, run, block_ids, last)
        except TransferError as error:
            self.fail(error)

    def commit(self, first_token: pb.FirstToken) -> asyncio.Future[SendResult]:
        """Asks the sink to take over with `first_token`, after the last run was announced. When the
        future is done no rank reads the blocks: it has a result if the sink took over, else a
        TransferError. Do not cancel it."""
        self._first_token = first_token
        self._lease.renew()
        self._on(SourceEvent.COMMIT)
        return self.outcome

    async def abort(self, reason: str) -> None:
        """Aborts the transfer; returns when no rank reads the blocks. It does not change an
        outcome."""
        error = TransferError(reason, code="ABORTED", blame=Blame.PREFILL, retryable=True)
        self._on(SourceEvent.ABORT, error)
        await asyncio.wait([self.outcome])

    async def watch(self, work: asyncio.Future[T]) -> T:
        """Waits for `work` as long as the transfer has not failed.

        Raises:
            TransferError: why the transfer failed.
        """
        either: list[asyncio.Future[Any]] = [work, self.outcome]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self.outcome.result()
        return work.result()

    def moved(self) -> None:
        """Notes that a rank has moved data."""
        self._keeper.moved()

    def sent(self, share: int, digests: Sequence[RunDigest]) -> None:
        """Notes that a share has sent everything."""
        self._announcer.sent(share, digests)

    def fail(self, error: PdserveError) -> None:
        """Ends the transfer with an error; it does not change an outcome."""
        self._on(SourceEvent.FAILED, error)

    # ---- the machine -------------------------------------------------------------------------

    def _lapse(self) -> None:
        error = TransferError(
            f"the KV transfer made no progress for {self._source.lease_s} s",
            code="LEASE_EXPIRED",
            retryable=True,
        )
        self._on(SourceEvent.LEASE_LAPSED, error)

    def _on(self, event: SourceEvent, error: PdserveError | None = None) -> None:
        actions = self._machine.on(event)
        if Action.REPORT_FAILURE in actions:  # it is the first failure
            self._cause = error
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        counts, tasks = self._source.counts, self._source.tasks
        match action:
            case Action.SEND_COMMIT:
                self._asking = self._start(self._send_commit())
            case Action.SEND_ABORT:
                tasks.start(self._source.sink.abort(self.ticket, str(self._cause)))
            case Action.REPULL:
                counts["repulled"] += 1
                self._asking = self._start(self._repull())
            case Action.RESEND:
                self._keeper.committed = False
                self._announcer.submit(self.ticket)
            case Action.REPORT_SUCCESS:
                counts["sent"] += 1
                counts["bytes"] += self._nbytes
            case Action.REPORT_FAILURE:
                assert self._cause is not None
                counts[f"failed/{self._cause.code}"] += 1
            case Action.QUIESCE:
                self._announcer.stop()
                tasks.start(self._quiesce())
            case Action.FREE:
                self._free()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts `work` in the background; the transfer fails with any error that it raises."""
        return self._source.tasks.start(work, self.fail)

    # ---- its actions -------------------------------------------------------------------------

    async def _send_commit(self) -> None:
        traceparent_var.set(self._trace)
        await self._announcer.announced()
        self._keeper.committed = True  # from now on leases go by what moves
        digests = await self._announcer.digests()
        try:
            sink = self._source.sink
            self._nbytes = await sink.commit(self.ticket, self._first_token, digests)
        except TransferError as error:
            wrong = error.code == "DIGEST_MISMATCH"
            self._on(SourceEvent.MISMATCH if wrong else SourceEvent.COMMIT_REFUSED, error)
        else:
            now = asyncio.get_running_loop().time()
            self._seconds = now - (self._started or now)
            self._on(SourceEvent.COMMIT_ACKED)

    async def _repull(self) -> None:
        logger.warning("transfer %s: wrong digests; sending again", self.ticket.transfer_id.hex())
        await self._announcer.quiesce_ranks()
        try:
            ticket = await self._source.sink.retarget(self.ticket)
            self.ticket.check_successor(ticket)
        except TransferError as error:
            self._on(SourceEvent.COMMIT_REFUSED, error)
        else:
            self.ticket = self._keeper.ticket = ticket
            self._lease.renew()
            self._on(SourceEvent.RETARGETED)

    async def _quiesce(self) -> None:
        assert self._announcing is not None and self._renewing is not None
        self._renewing.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await asyncio.wait([self._announcing])  # no submit may come after the quiesce
        await self._announcer.quiesce_ranks()
        self._on(SourceEvent.QUIESCED)

    def _free(self) -> None:
        self._lease.end()
        # A cancelled task keeps its frames, and they keep this transfer.
        self._announcing = self._renewing = self._asking = None
        self._source.forget(self)
        if self._cause is not None:
            self.outcome.set_exception(self._cause)
        else:
            self.outcome.set_result(SendResult(self._nbytes, self._seconds))
