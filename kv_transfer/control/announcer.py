"""What goes on beside a hand-off's machine: ranks are told what to send, leases are kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.kv_transfer.commands import Quiesce, RankCalls, Ready, Submit
from pdserve.kv_transfer.connector import BlockRun, SourceTransfer
from pdserve.kv_transfer.control.background import Lease
from pdserve.kv_transfer.control.sink_client import SinkClient
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest
from pdserve.kv_transfer.layout import Piece

logger = logging.getLogger(__name__)


class RunAnnouncer:
    """Tells the ranks of one hand-off which blocks to send where, in order, and collects the
    digests they make. Each answer renews `lease`."""

    def __init__(
        self,
        ranks: RankCalls,
        pieces: Sequence[Piece],
        ticket: Ticket,
        run_blocks: int,
        lease: Lease,
    ) -> None:
        """Runs of more than `run_blocks` blocks are cut."""
        self._ranks = ranks
        self._pieces = pieces
        self._run_blocks = run_blocks
        self._lease = lease
        self._rank_ids = sorted({piece.source_rank for piece in pieces})
        self._runs: list[Ready] = []
        self._digests: list[RunDigest] = []
        self._commands: asyncio.Queue[dict[int, Submit | Ready]] = asyncio.Queue()
        self._stopped = False
        self.submit(ticket)

    def submit(self, ticket: Ticket) -> None:
        """Begins the ticket's epoch; runs announced before are announced once more."""
        self._ticket = ticket
        self._digests.clear()
        self._commands.put_nowait({rank: Submit(self._transfer(rank)) for rank in self._rank_ids})
        for run in self._runs:
            self._commands.put_nowait(dict.fromkeys(self._rank_ids, run))

    def _transfer(self, rank: int) -> SourceTransfer:
        """What this rank sends, and where to."""
        mine = tuple(
            (piece, self._ticket.endpoints[piece.sink_rank].endpoint)
            for piece in self._pieces
            if piece.source_rank == rank
        )
        return SourceTransfer(self._ticket.transfer_id, self._ticket.epoch, mine)

    def announce(self, run: BlockRun, block_ids: Sequence[int], last: bool) -> None:
        """Runs come in order; blocks the sink has already are left out here."""
        ticket = self._ticket
        skipped = min(run.count, max(0, ticket.first_block - run.first))
        wanted = BlockRun(run.first + skipped, run.count - skipped)
        if self._stopped or not (wanted.count or last):
            return
        for part, ids in _cut(wanted, tuple(block_ids)[skipped:], self._run_blocks):
            ends = last and part.first + part.count == wanted.first + wanted.count
            self._runs.append(Ready(ticket.transfer_id, part, ids, ends, ticket.digests))
            self._commands.put_nowait(dict.fromkeys(self._rank_ids, self._runs[-1]))

    async def run(self) -> None:
        """Passes commands on until `stop`.

        Raises:
            TransferError: a rank's connector refused, or a rank failed.
        """
        while (commands := await self._commands.get()) and not self._stopped:
            await self._send(commands)
            if not self._commands.empty():
                await asyncio.sleep(0)  # a rank of this process may answer at once, each time
            self._commands.task_done()

    async def _send(self, commands: dict[int, Submit | Ready]) -> None:
        try:
            replies = await self._ranks.send_all(commands)
        except TransferError:
            raise
        except PdserveError as error:  # a rank of this node, whatever it may say
            message = f"a rank of the prefill node failed: {error.message}"
            raise TransferError(
                message, code=error.code, blame=Blame.PREFILL, retryable=True
            ) from error
        self._digests += (digest for reply in replies for digest in reply.digests)
        self._lease.renew()

    async def digests(self) -> tuple[RunDigest, ...]:
        """Of all runs announced in this epoch, once the ranks know of them."""
        await self._commands.join()
        return tuple(self._digests)

    def stop(self) -> None:
        """What no rank knows of yet is dropped."""
        self._stopped = True
        self._commands.put_nowait({})

    async def quiesce(self) -> None:
        """Returns when no rank reads the blocks any more."""
        await self._ranks.send_alive(self._rank_ids, Quiesce(self._ticket.transfer_id))


def _cut(
    run: BlockRun, block_ids: tuple[int, ...], most: int
) -> Iterator[tuple[BlockRun, tuple[int, ...]]]:
    """A run in parts of at most `most` blocks; one that is empty stays."""
    for start in range(0, max(1, run.count), most):
        ids = block_ids[start : start + most]
        yield BlockRun(run.first + start, len(ids)), ids


class LeaseKeeper:
    """Keeps both leases of a hand-off, its own one and the sink's.

    While the prompt waits and computes, and digests are made, they hang on the sink's answers. Once
    it is committed, each side's hangs on what moves, at either.
    """

    def __init__(self, sink: SinkClient, ticket: Ticket, lease: Lease) -> None:
        self.ticket = ticket  # of the present epoch
        self.committed = False
        self._sink = sink
        self._lease = lease
        self._moved = False  # since the last renewal
        self._progress = 0  # of the sink

    def moved(self) -> None:
        """A rank says so. The sink may not see it yet: the turn is another transfer's."""
        self._moved = True
        self._lease.renew()

    async def run(self, on_refused: Callable[[TransferError], None]) -> None:
        """Runs until cancelled. `on_refused`: the sink has no more use for the epoch."""
        while True:
            await asyncio.sleep(min(self._lease.seconds, self.ticket.lease_s) / 3)
            try:
                await self._renew()
            except TransferError as error:
                on_refused(error)
            except PdserveError as error:  # unreachable: if it stays so, the lease lapses
                logger.warning("cannot renew a hand-off: %s", error)

    async def _renew(self) -> None:
        if not self.committed:
            await self._sink.renew(self.ticket)
            self._lease.renew()
        elif self._moved:
            self._moved = False
            await self._sink.renew(self.ticket)
        elif (progress := await self._sink.progress(self.ticket)) != self._progress:
            self._progress = progress
            self._lease.renew()
