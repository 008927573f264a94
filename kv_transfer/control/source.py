"""The source's control half: plans, announces runs to its ranks, commits, keeps the lease. When
the sink says that digests are wrong, everything is sent once more under a new epoch.

    begin() ──▶ handoff.ready(run) … ──▶ handoff.commit() or abort()
    when either has returned or raised, no rank reads the blocks any more

Lives on the event loop of the prefill node; drives the `SOURCE` table of `protocol.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.kv_transfer.commands import (
    Call,
    Quiesce,
    Ready,
    Submit,
    call_living,
    call_ranks,
    decode_event,
    failure,
)
from pdserve.kv_transfer.connector import BlockRun, Failed, SourceTransfer
from pdserve.kv_transfer.control.lease import Lease
from pdserve.kv_transfer.control.protocol import Action, SourceEvent, source_machine
from pdserve.kv_transfer.control.tasks import Tasks, as_typed
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import Piece, Rect, plan

logger = logging.getLogger(__name__)

RUN_NBYTES = 32 << 20  # of one rank, and at least a block: longer runs are cut

T = TypeVar("T")


class SinkNode(Protocol):
    """The decode node behind a ticket. Calls raise PdserveError: TransferError when the sink
    refuses, others when it is out of reach."""

    async def commit(self, ticket: Ticket, payload: Any, digests: Sequence[RunDigest]) -> int:
        """Returns the bytes that landed, once the sequence is runnable there."""

    async def renew(self, ticket: Ticket) -> None: ...

    async def progress(self, ticket: Ticket) -> int:
        """Grows as the sink gets on with what was committed."""

    async def abort(self, ticket: Ticket, reason: str) -> None: ...

    async def retarget(self, ticket: Ticket) -> Ticket:
        """The ticket of a new epoch, in place of this one."""


@dataclass(frozen=True, slots=True)
class HandoffResult:
    nbytes: int
    seconds: float  # from the first run announced to the commit's answer


class KVSource:
    """`call` and `on_event` are the executor's."""

    def __init__(
        self,
        rank_rects: Sequence[Rect],
        *,
        fingerprint: str,
        block_size: int,
        lease_s: float,
        call: Call,
        sink: SinkNode,
        block_nbytes: int = 0,
    ) -> None:
        """`block_nbytes`: of a block in the rank that has most of it."""
        self.rank_rects = tuple(rank_rects)
        self.run_blocks = max(1, RUN_NBYTES // block_nbytes) if block_nbytes else 1 << 20
        self.lease_s = lease_s
        self.call = call
        self.sink = sink
        self.tasks = Tasks()
        self.counts: Counter[str] = Counter()  # sent, bytes, failed/CODE, late state/event
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._live: dict[bytes, Handoff] = {}

    def begin(self, ticket: Ticket) -> Handoff:
        """Starts a hand-off. Whoever begins one ends it, by `commit` or `abort`.

        Raises:
            TransferError: FINGERPRINT_MISMATCH, LAYOUT_MISMATCH, or a duplicate ticket.
        """
        try:
            self._check(ticket)
            pieces = plan(self.rank_rects, [each.rect for each in ticket.endpoints])
        except TransferError as error:
            self.counts[f"failed/{error.code}"] += 1
            raise
        handoff = self._live[ticket.transfer_id] = Handoff(self, ticket, pieces)
        return handoff

    def _check(self, ticket: Ticket) -> None:
        ours, theirs = self._fingerprint, ticket.fingerprint
        if theirs != ours:
            raise _mismatch("FINGERPRINT_MISMATCH", "fingerprint", ours, theirs)
        if ticket.block_size != self._block_size:
            raise _mismatch("LAYOUT_MISMATCH", "block size", self._block_size, ticket.block_size)
        if ticket.transfer_id in self._live:
            raise TransferError(
                f"transfer {ticket.transfer_id.hex()} is under way", code="STALE_EPOCH"
            )

    def on_event(self, rank: int, message: bytes) -> None:
        """A rank's connector reports; on the event loop."""
        event = decode_event(message)
        handoff = self._live.get(event.transfer_id)
        if handoff is None or handoff.ticket.epoch != event.epoch:
            self.counts["late_event"] += 1
        elif isinstance(event, Failed):
            handoff.fail(SourceEvent.FAILED, failure(event))
        else:
            handoff.moved()

    def forget(self, handoff: Handoff) -> None:
        del self._live[handoff.ticket.transfer_id]

    async def close(self) -> None:
        """Aborts what is under way and waits until all blocks are handed back."""
        for handoff in list(self._live.values()):
            await handoff.abort("the prefill node stops")
        await self.tasks.join()


class Handoff:
    """One transfer under way."""

    def __init__(self, source: KVSource, ticket: Ticket, pieces: Sequence[Piece]) -> None:
        self.ticket = ticket  # of the present epoch
        self.quiet = asyncio.Event()  # no rank reads the blocks any more
        self._source = source
        self._pieces = pieces
        self._machine = source_machine(source.counts)
        self._lease = Lease(source.lease_s, self._lapse)
        self._cause: PdserveError | None = None
        self._nbytes = 0
        self._payload: Any = None
        self._started: float | None = None
        self._seconds = 0.0
        self._runs: list[Ready] = []
        self._digests: list[RunDigest] = []
        self._ranks = sorted({piece.source_rank for piece in pieces})
        self._commands: asyncio.Queue[dict[int, Submit | Ready]] = asyncio.Queue()
        self._committed = False  # the commit is on its way: all digests are made
        self._moved = False  # since the last renewal
        self._submit()
        self._announcing = self._start(self._announce())
        self._renewing = self._start(self._keep_renewing())
        self._asking: asyncio.Task[None] | None = None  # the commit, or the new epoch

    def ready(self, run: BlockRun, block_ids: Sequence[int], last: bool = False) -> None:
        """These blocks hold final KV: `block_ids` are this node's blocks for `run`. Runs come
        in order; blocks the sink has already are left out here. Never blocks; without effect
        on a hand-off that has failed."""
        self.renew()
        self._started = self._started or asyncio.get_running_loop().time()
        ticket = self.ticket
        skipped = min(run.count, max(0, ticket.first_block - run.first))
        wanted = BlockRun(run.first + skipped, run.count - skipped)
        if not wanted.count and not last:
            return
        for part, ids in _cut(wanted, tuple(block_ids)[skipped:], self._source.run_blocks):
            ends = last and part.first + part.count == wanted.first + wanted.count
            self._runs.append(Ready(ticket.transfer_id, part, ids, ends, ticket.digests))
            self._commands.put_nowait(dict.fromkeys(self._ranks, self._runs[-1]))

    async def commit(self, payload: Any) -> HandoffResult:
        """The last run was announced: asks the sink to take over with `payload`. Returns when
        it has and no rank reads the blocks any more.

        Raises:
            TransferError: why the hand-off failed; the ranks are quiet then, too.
        """
        self._payload = payload
        self.renew()
        self._on(SourceEvent.COMMIT)
        await self.quiet.wait()
        if self._cause is not None:
            raise self._cause
        return HandoffResult(self._nbytes, self._seconds)

    async def abort(self, reason: str) -> None:
        """Gives up; returns when no rank reads the blocks any more. Without effect on the
        outcome of a hand-off that has one."""
        error = TransferError(reason, code="ABORTED", blame=Blame.PREFILL, retryable=True)
        self.fail(SourceEvent.ABORT, error)
        await self.quiet.wait()

    async def watch(self, work: asyncio.Future[T]) -> T:
        """Waits for `work` while the hand-off stands.

        Raises:
            TransferError: why the hand-off failed.
        """
        quiet = asyncio.ensure_future(self.quiet.wait())
        try:
            either: list[asyncio.Future[Any]] = [work, quiet]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            quiet.cancel()
        if not work.done() and self._cause is not None:
            raise self._cause
        return work.result()

    def renew(self) -> None:
        """Progress: the lease starts anew."""
        self._lease.renew()

    def moved(self) -> None:
        """A rank says so. The sink may not see it yet: the turn is another transfer's."""
        self._moved = True
        self.renew()

    def fail(self, event: SourceEvent, error: PdserveError) -> None:
        actions = self._machine.on(event)
        if actions:  # else it is too late to matter: the first cause stays
            self._cause = error
        self._run(actions)

    def _lapse(self) -> None:
        error = TransferError(
            f"the hand-off made no progress for {self._source.lease_s} s",
            code="LEASE_EXPIRED",
            retryable=True,
        )
        self.fail(SourceEvent.LEASE_LAPSED, error)

    def _on(self, event: SourceEvent) -> None:
        self._run(self._machine.on(event))

    def _run(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        counts, tasks = self._source.counts, self._source.tasks
        match action:
            case Action.SEND_COMMIT:
                self._asking = self._start(self._send_commit())
            case Action.SEND_ABORT:
                tasks.start(self._send_abort())
            case Action.REPULL:
                counts["repulled"] += 1
                self._asking = self._start(self._repull())
            case Action.RESEND:
                self._resend()
            case Action.REPORT_SUCCESS:
                counts["sent"] += 1
                counts["bytes"] += self._nbytes
            case Action.REPORT_FAILURE:
                assert self._cause is not None
                counts[f"failed/{self._cause.code}"] += 1
            case Action.QUIESCE:
                tasks.start(self._quiesce())
            case Action.FREE:
                self._free()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In the background; the hand-off fails with what the work raises."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self.fail(SourceEvent.FAILED, as_typed(error, Blame.PREFILL))

        return self._source.tasks.start(run())

    # ---- talking to the ranks ---------------------------------------------------------------

    def _submit(self) -> None:
        self._commands.put_nowait({rank: Submit(self._share(rank)) for rank in self._ranks})

    def _share(self, rank: int) -> SourceTransfer:
        """What this rank sends, and where to."""
        mine = tuple(
            (piece, self.ticket.endpoints[piece.sink_rank].endpoint)
            for piece in self._pieces
            if piece.source_rank == rank
        )
        return SourceTransfer(self.ticket.transfer_id, self.ticket.epoch, mine)

    async def _announce(self) -> None:
        """Passes commands to the ranks in order; collects digests."""
        while commands := await self._commands.get():
            if self._cause is None:
                await self._pass_on(commands)
            self._commands.task_done()

    async def _pass_on(self, commands: dict[int, Submit | Ready]) -> None:
        try:
            replies = await call_ranks(self._source.call, commands)
        except TransferError as error:
            self.fail(SourceEvent.FAILED, error)
        except PdserveError as error:  # a rank of this node, whatever it may say
            self.fail(SourceEvent.FAILED, _of_this_node(error))
        else:
            self._digests += (digest for reply in replies for digest in reply.digests)
            self.renew()

    def _resend(self) -> None:
        self._digests.clear()
        self._committed = False
        self._submit()
        for run in self._runs:
            self._commands.put_nowait(dict.fromkeys(self._ranks, run))

    async def _quiesce(self) -> None:
        self._renewing.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        self._commands.put_nowait({})
        await asyncio.wait([self._announcing])  # or a submit could overtake the quiesce
        await self._quiet_ranks()
        self._on(SourceEvent.QUIESCED)

    async def _quiet_ranks(self) -> None:
        command = Quiesce(self.ticket.transfer_id)
        dead = await call_living(self._source.call, dict.fromkeys(self._ranks, command))
        self._source.counts["dead_rank"] += dead

    # ---- talking to the sink ----------------------------------------------------------------

    async def _keep_renewing(self) -> None:
        """While the prompt waits and computes, and digests are made, both leases hang on the
        sink's answers. After that each side's hangs on what moves, at either."""
        seen = 0
        while True:
            await asyncio.sleep(min(self._source.lease_s, self.ticket.lease_s) / 3)
            try:
                if not self._committed:
                    await self._source.sink.renew(self.ticket)
                    self.renew()
                elif self._moved:
                    self._moved = False
                    await self._source.sink.renew(self.ticket)
                elif (progress := await self._source.sink.progress(self.ticket)) != seen:
                    seen = progress
                    self.renew()
            except TransferError as error:
                self._refused(SourceEvent.RENEW_REFUSED, error)
            except PdserveError as error:  # out of reach: if it stays so, the lease lapses
                logger.warning("cannot renew a hand-off: %s", error)

    async def _send_commit(self) -> None:
        await self._commands.join()  # every digest is here
        self._committed = True
        try:
            sink, digests = self._source.sink, tuple(self._digests)
            self._nbytes = await sink.commit(self.ticket, self._payload, digests)
        except TransferError as error:
            wrong = error.code == "DIGEST_MISMATCH"
            self._refused(SourceEvent.MISMATCH if wrong else SourceEvent.COMMIT_REFUSED, error)
        except PdserveError as error:
            self.fail(SourceEvent.FAILED, error)
        else:
            now = asyncio.get_running_loop().time()
            self._seconds = now - (self._started or now)
            self._on(SourceEvent.COMMIT_ACKED)

    def _refused(self, event: SourceEvent, error: TransferError) -> None:
        actions = self._machine.on(event)
        if Action.REPORT_FAILURE in actions:
            self._cause = error
        self._run(actions)

    async def _repull(self) -> None:
        logger.warning("transfer %s: wrong digests; sending again", self.ticket.transfer_id.hex())
        await self._quiet_ranks()
        try:
            self.ticket = await self._source.sink.retarget(self.ticket)
        except TransferError as error:
            self.fail(SourceEvent.COMMIT_REFUSED, error)
        except PdserveError as error:
            self.fail(SourceEvent.FAILED, error)
        else:
            self.renew()
            self._on(SourceEvent.RETARGETED)

    async def _send_abort(self) -> None:
        await self._source.sink.abort(self.ticket, str(self._cause))

    def _free(self) -> None:
        self._lease.end()
        self._source.forget(self)
        self.quiet.set()


def _cut(
    run: BlockRun, block_ids: tuple[int, ...], most: int
) -> Iterator[tuple[BlockRun, tuple[int, ...]]]:
    """A run in parts of at most `most` blocks; one that is empty stays."""
    for start in range(0, max(1, run.count), most):
        ids = block_ids[start : start + most]
        yield BlockRun(run.first + start, len(ids)), ids


def _of_this_node(error: PdserveError) -> TransferError:
    message = f"a rank of the prefill node failed: {error.message}"
    return TransferError(message, code=error.code, blame=Blame.PREFILL, retryable=True)


def _mismatch(code: str, name: str, ours: object, theirs: object) -> TransferError:
    return TransferError(
        f"{name}: the prefill node has {ours}, the decode node {theirs}; "
        "give both nodes the same options",
        code=code,
        blame=Blame.PREFILL,
        retryable=False,
    )
