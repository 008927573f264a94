"""One job on the prefill node, from its queue to the acknowledged hand-off.

    queue ──admitted──▶ compute in chunks ──first token──▶ commit ──acknowledged──▶ free
                          │ every chunk's blocks
                          ▼
                     connector ═══▶ the decode node

The blocks are freed by `close` alone: when no step computes into them and the hand-off has
said that no rank reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic

from pdserve.common.core.errors import PdserveError
from pdserve.common.core.request import GenerateJob, TokenEvent
from pdserve.common.engine.sequence import Sequence
from pdserve.common.node.replica import Replica
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.kv_transfer.connector import BlockRun
from pdserve.kv_transfer.control.source import KVSource, SendResult, SendTransfer
from pdserve.kv_transfer.control.ticket import Ticket


class PrefillSession:
    """Prefills one job and hands its KV over. The owner must `close` the session in every case:
    that frees everything.

    `known_token` is the first token that a failed node has sampled and the client has seen: it is
    kept.
    """

    def __init__(
        self,
        replica: Replica[PrefillSession, KVSource],
        job: GenerateJob,
        ticket: Ticket,
        known_token: TokenEvent | None = None,
    ) -> None:
        self._replica = replica
        self._engine = replica.engine
        self._source = replica.transfers
        self._metrics = replica.metrics
        self._job = job
        self._ticket = ticket
        self._sequence = self._engine.new_sequence(job, job.choices[0], hands_over=True)
        self._num_tokens = self._sequence.num_tokens  # tokens with KV to hand over
        self._known_token = known_token
        self._first_token: asyncio.Future[pb.FirstToken]
        self._first_token = asyncio.get_running_loop().create_future()
        self._handoff: SendTransfer | None = None
        self._committed: asyncio.Future[SendResult] | None = None
        self._next_blocks = list(ticket.first_blocks)  # per KV group: the first one not yet sent
        self._arrived = monotonic()
        self._admitted = self._arrived

    # ---- the path, top to bottom ------------------------------------------------------------

    async def events(self) -> AsyncGenerator[pb.PrefillEvent, None]:
        """Yields FirstToken, then HandedOff (unless that token ended the job)."""
        with self._metrics.transfer_errors():
            self._handoff = self._source.begin(self._ticket, self._job.adapter)
            self._replica.adopt(self._sequence, self)
            self._engine.add(self._sequence)
            first = await self._handoff.watch(self._first_token)
            yield pb.PrefillEvent(first_token=first)
            if self._committed is None:
                return  # the token was the last one: `close` ends the hand-off
            result = await asyncio.shield(self._committed)
        self._metrics.observe_transfer(num_bytes=result.nbytes, seconds=result.seconds)
        yield pb.PrefillEvent(handed_off=pb.HandedOff(transfer_s=result.seconds))

    async def close(self) -> None:
        """Ends whatever is still going on and gives all blocks back."""
        await self._engine.stop(self._sequence)
        if self._handoff is not None:
            await self._handoff.abort("the prefill ended early")
        self._engine.release(self._sequence)

    # ---- what the engine says ---------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        self._admitted = monotonic()
        self._send_ready_blocks()

    def computed(self, sequence: Sequence) -> None:
        self._send_ready_blocks()

    def sampled(self, sequence: Sequence, event: TokenEvent) -> None:
        if event.finish_reason is None:
            self._engine.scheduler.hold(sequence)
        if not self._first_token.done():
            self._take(self._known_token or event)

    def _take(self, token: TokenEvent) -> None:
        """Commits the first token in the same turn in which the client gets it. The decode node
        reports it again with all that is known of the prompt, so the router may hear either
        first."""
        assert self._handoff is not None
        first = self._describe(token)
        self._first_token.set_result(first)
        if token.finish_reason is None or len(self._job.choices) > 1:
            self._committed = self._handoff.commit(first)

    def fail(self, error: PdserveError) -> None:
        """Fails the job: the node, or its engine for a sequence of the job, cannot continue."""
        if not self._first_token.done():
            self._first_token.set_exception(error)

    # ---- inside -----------------------------------------------------------------------------

    def _send_ready_blocks(self) -> None:
        """Hands every block that is final to the connector: while the prompt is computed the
        full ones, at its end all."""
        assert self._handoff is not None
        sequence, pool = self._sequence, self._engine.scheduler.pool
        last = sequence.num_computed >= self._num_tokens
        end = (
            pool.blocks_for(self._num_tokens) if last else sequence.num_computed // pool.block_size
        )
        for group, table in enumerate(sequence.block_tables):
            first = self._next_blocks[group]
            count = max(0, end - first)
            if count or last:
                blocks = table[first : first + count]
                self._handoff.ready(BlockRun(first, count), blocks, last, group)
                self._next_blocks[group] += count

    def _describe(self, event: TokenEvent) -> pb.FirstToken:
        return pb.FirstToken(
            token=convert.event_to_pb(event),
            cached_tokens=self._sequence.num_cached or 0,
            queue_s=self._admitted - self._arrived,
            compute_s=monotonic() - self._admitted,
            step_s=self._sequence.times.in_steps,
            prompt_logprobs=convert.prompt_to_pb(self._sequence.take_prompt_logprobs()),
        )
