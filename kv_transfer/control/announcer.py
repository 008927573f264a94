"""The background work of a `SendTransfer`: it announces runs to the ranks and keeps leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.kv_transfer.commands import Quiesce, RankCalls, Ready, Submit
from pdserve.kv_transfer.connector import BlockRun, RunDigest, SourceTransfer
from pdserve.kv_transfer.control.background import Lease
from pdserve.kv_transfer.control.sink_client import SinkClient
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.layout import Piece

logger = logging.getLogger(__name__)


class RunAnnouncer:
    """Announces the runs of one transfer to its source ranks, in order, and collects the digests
    they make. Each answer renews `lease`."""

    def __init__(
        self,
        ranks: RankCalls,
        pieces: Sequence[Piece],
        groups: Sequence[int],
        ticket: Ticket,
        run_blocks: int,
        lease: Lease,
    ) -> None:
        """`groups`: the KV group of each share. A run of more than `run_blocks` blocks is cut."""
        self._ranks = ranks
        self._pieces = pieces
        self._run_blocks = run_blocks
        self._lease = lease
        self._shares = sorted({piece.source for piece in pieces})
        self._groups = groups
        self._runs: list[tuple[int, Ready]] = []  # (KV group, run)
        self._digests: list[RunDigest] = []  # that came with answers
        self._hashing: set[int] = set()  # shares whose connectors hash as they send
        self._sent: dict[int, Sequence[RunDigest]] = {}  # by share that has sent all
        self._has_sent = asyncio.Event()
        self._commands: asyncio.Queue[dict[int, Submit | Ready]] = asyncio.Queue()
        self._stopped = False
        self.submit(ticket)

    def submit(self, ticket: Ticket) -> None:
        """Begins the ticket's epoch and announces the runs so far once more."""
        self._ticket = ticket
        self._digests.clear()
        self._hashing.clear()
        self._sent.clear()
        self._commands.put_nowait({share: Submit(self._transfer(share)) for share in self._shares})
        for group, run in self._runs:
            self._put(group, run)

    def _put(self, group: int, run: Ready) -> None:
        if mine := [share for share in self._shares if self._groups[share] == group]:
            self._commands.put_nowait(dict.fromkeys(mine, run))

    def _transfer(self, share: int) -> SourceTransfer:
        """Returns the pieces that are sent of this share, with their endpoints."""
        mine = tuple(
            (piece, self._ticket.endpoints[piece.sink].endpoint)
            for piece in self._pieces
            if piece.source == share
        )
        return SourceTransfer(self._ticket.transfer_id, self._ticket.epoch, mine)

    def announce(self, group: int, run: BlockRun, block_ids: Sequence[int], last: bool) -> None:
        """Queues a run; runs of a group come in order. Blocks that the sink does not need are left
        out.

        Raises:
            TransferError: LAYOUT_MISMATCH, the sink asks for a block that is not there any more.
        """
        ticket = self._ticket
        skipped = min(run.count, max(0, ticket.first_blocks[group] - run.first))
        wanted = BlockRun(run.first + skipped, run.count - skipped)
        if self._stopped or not (wanted.count or last):
            return
        wanted_ids = tuple(block_ids)[skipped:]
        if min(wanted_ids, default=0) < 0:
            raise TransferError(
                f"the decode node asks for blocks of KV group {group} before its window",
                code="LAYOUT_MISMATCH",
                blame=Blame.DECODE,
                retryable=False,
            )
        for part, ids in _cut(wanted, wanted_ids, self._run_blocks):
            ends = last and part.first + part.count == wanted.first + wanted.count
            ready = Ready(ticket.transfer_id, part, ids, ends, ticket.digests)
            self._runs.append((group, ready))
            self._put(group, ready)

    async def run(self) -> None:
        """Sends the queued commands to the ranks until `stop`.

        Raises:
            TransferError: a rank's connector refused, or a rank failed.
        """
        while (commands := await self._commands.get()) and not self._stopped:
            await self._send(commands)
            if not self._commands.empty():
                await asyncio.sleep(0)  # a rank of this process may answer without yielding
            self._commands.task_done()

    async def _send(self, commands: dict[int, Submit | Ready]) -> None:
        try:
            replies = await self._ranks.send_all(commands)
        except TransferError:
            raise
        except PdserveError as error:  # a rank of this node failed
            message = f"a rank of the prefill node failed: {error.message}"
            raise TransferError(
                message, code=error.code, blame=Blame.PREFILL, retryable=True
            ) from error
        for share, reply in zip(commands, replies, strict=True):
            self._digests += reply.digests
            if reply.hashed_as_sent:
                self._hashing.add(share)
        self._lease.renew()

    def sent(self, share: int, digests: Sequence[RunDigest]) -> None:
        """Notes that a share has sent all runs of this epoch, with the digests that it made."""
        self._sent[share] = digests
        self._has_sent.set()

    async def announced(self) -> None:
        """Returns when the ranks have taken all runs."""
        await self._commands.join()

    async def digests(self) -> tuple[RunDigest, ...]:
        """Returns the digests of the runs that were announced, in order, once they are made."""
        while not self._hashing <= self._sent.keys():
            self._has_sent.clear()
            await self._has_sent.wait()
        made = [*self._digests, *(each for share in self._hashing for each in self._sent[share])]
        return tuple(sorted(made, key=lambda digest: digest.run.first))

    def stop(self) -> None:
        """Drops the commands that were not sent yet."""
        self._stopped = True
        self._commands.put_nowait({})

    async def quiesce_ranks(self) -> None:
        """Returns when no rank reads the blocks any more."""
        await self._ranks.send_alive(self._shares, Quiesce(self._ticket.transfer_id))


def _cut(
    run: BlockRun, block_ids: tuple[int, ...], most: int
) -> Iterator[tuple[BlockRun, tuple[int, ...]]]:
    """Cuts a run into parts of at most `most` blocks; an empty run is one part."""
    for start in range(0, max(1, run.count), most):
        ids = block_ids[start : start + most]
        yield BlockRun(run.first + start, len(ids)), ids


class LeaseKeeper:
    """Renews both leases of a transfer, the source's and the sink's.

    Before the commit the sink's answers renew both. After it each side's lease is renewed by data
    that moves on either side.
    """

    def __init__(self, sink: SinkClient, ticket: Ticket, lease: Lease) -> None:
        self.ticket = ticket  # of the present epoch
        self.committed = False
        self._sink = sink
        self._lease = lease
        self._moved = False  # since the last renewal
        self._progress = 0  # of the sink

    def moved(self) -> None:
        """Notes that a rank reports progress, which the sink may not see yet: the connection may be
        sending another transfer's frame."""
        self._moved = True
        self._lease.renew()

    async def run(self, on_refused: Callable[[TransferError], None]) -> None:
        """Runs until cancelled. Calls `on_refused` when the sink has given up the epoch."""
        while True:
            await asyncio.sleep(min(self._lease.seconds, self.ticket.lease_s) / 3)
            try:
                await self._renew()
            except TransferError as error:
                on_refused(error)
            except PdserveError as error:  # the sink is unreachable; the lease may lapse
                logger.warning("cannot renew the lease of a KV transfer: %s", error)

    async def _renew(self) -> None:
        if not self.committed:
            await self._sink.renew(self.ticket)
            self._lease.renew()
        elif self._moved:
            self._moved = False
            await self._sink.renew(self.ticket)
        elif (progress := await self._sink.renew(self.ticket, committed=True)) != self._progress:
            self._progress = progress
            self._lease.renew()
