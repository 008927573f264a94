"""One job on the decode node, from the reservation of its blocks to its last token.

    reserve ──reserved──▶ (the prefill node writes) ──landed──▶ decode ──tokens──▶ ended
    compute the prompt here ──prefilled──▶ decode ──tokens──▶ ended

The first choice takes the transferred KV, or computes it. The others share its full blocks through
the prefix cache and compute the rest of their tokens themselves, so n choices cost one prefill and
one transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from time import monotonic
from typing import TypeVar

from pdserve.common.core.errors import PdserveError
from pdserve.common.core.request import Choice, FinishReason, GenerateJob, TokenEvent
from pdserve.common.engine.sequence import Sequence, Status, Times
from pdserve.common.node.replica import Replica
from pdserve.common.rpc import convert
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.decode_node.router_streams import JobWriter
from pdserve.kv_transfer.control.recv_transfer import GroupBlocks, RecvResult
from pdserve.kv_transfer.control.sink import KVSink

T = TypeVar("T")


class DecodeSession:
    """Serves one job. Its creator must always call `close`, which frees all its resources."""

    def __init__(self, replica: Replica[DecodeSession, KVSink], job: GenerateJob) -> None:
        self._replica = replica
        self._engine = replica.engine
        self._sink = replica.transfers
        self._metrics = replica.metrics
        self._job = job
        self._writer: JobWriter  # from `run` on
        self._local_prefill = False  # from `run` on
        self._sequences: list[Sequence] = []
        self._unfinished = len(job.choices)
        self._unwanted: set[int] = set()  # choices that a stop string has ended
        self._arrived = self._admitted_at = monotonic()
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun = asyncio.Event()  # some choice has a token, or has ended
        self._in_place = asyncio.Event()  # all KV has landed
        self._finished = asyncio.Event()  # every choice has ended
        self._decodes_since = 0.0  # monotonic
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transfer_id: bytes | None = None
        self._freed: asyncio.Event | None = None  # set: the hand-off has no more use for its blocks

    @property
    def request_id(self) -> str:
        return self._job.request_id

    @property
    def client(self) -> str:
        return self._job.client

    @property
    def has_kv(self) -> bool:
        """Whether the job can go on without a router: the KV is here, or is computed here."""
        return self._local_prefill or self._in_place.is_set()

    # ---- the path, top to bottom ------------------------------------------------------------

    async def run(self, local_prefill: bool, writer: JobWriter) -> None:
        """Runs until every choice has finished, and writes the job's events in order. Raises the
        job's error, which the caller must report."""
        self._writer, self._local_prefill = writer, local_prefill
        lead, *others = self._job.choices
        first = self._add(lead, remote=not local_prefill)
        if local_prefill:
            await self._unless_failed(self._begun.wait())
        else:
            await self._unless_failed(self._admitted)
            await self._unless_failed(self._reserve(first))
            with self._metrics.transfer_errors():
                await self._unless_failed(self._in_place.wait())
        for choice in others:
            self._add(choice, remote=False)
        for index in tuple(self._unwanted):  # what came before these were there
            await self._unless_failed(self.finish(index))
        await self._unless_failed(self._finished.wait())

    async def finish(self, choice: int) -> None:
        """Stops computing a choice of which the router needs no more."""
        self._unwanted |= {each.index for each in self._job.choices if each.index == choice}
        for sequence in self._sequences:
            awaited = sequence.status is Status.REMOTE or (
                sequence.remote and sequence.status is Status.WAITING
            )
            if sequence.choice == choice and not awaited:
                await self._finish(sequence)

    async def _finish(self, sequence: Sequence) -> None:
        await self._engine.stop(sequence)
        if sequence.status is not Status.DONE:  # it has not ended by itself meanwhile
            self._engine.release(sequence)
            self._tell(sequence, TokenEvent(sequence.choice, (), FinishReason.STOP))

    async def close(self) -> None:
        """Ends all that is still running, and frees all blocks."""
        if self._transfer_id is not None:
            await self._sink.cancel(self._transfer_id)
        elif self._freed is not None:
            await self._freed.wait()
        for sequence in self._sequences:
            if sequence.status is not Status.DONE:
                await self._engine.stop(sequence)
                self._engine.release(sequence)

    # ---- what the engine says ---------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        if not self._admitted.done():
            self._admitted_at = monotonic()
            self._admitted.set_result(None)

    def computed(self, sequence: Sequence) -> None:
        """Does nothing: a decode node sends no KV."""

    def sampled(self, sequence: Sequence, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            self._engine.release(sequence)
        self._tell(sequence, event)

    def fail(self, error: PdserveError) -> None:
        """Fails the job: the node, or its engine for a sequence of the job, cannot continue."""
        self._fail(error)

    # ---- inside -----------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Fails the job, unless it has failed before."""
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # seen, even if the job has ended

    def _tell(self, sequence: Sequence, event: TokenEvent) -> None:
        """Reports tokens that have just been appended to the sequence."""
        if not self._begun.is_set():
            self._begin()
        position = sequence.num_output_tokens - len(event.tokens)
        times = self._times(sequence) if self._job.timed else None
        self._writer.tokens(position, event, times)
        if event.finish_reason is not None:
            self._choice_ended()

    def _choice_ended(self) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self._writer.end()
            self._finished.set()

    def _begin(self) -> None:
        """Notes the first token: the job decodes from now on."""
        self._begun.set()
        if not self._decodes_since:
            self._decodes_since = monotonic()
            self._writer.event(pb.DecodeEvent(prefilled=self._prefilled(self._sequences[0])))

    def _prefilled(self, lead: Sequence) -> pb.Prefilled:
        """Reports a prompt computed here, and resets the times of the lead's steps."""
        in_steps, lead.times = lead.times.in_steps, Times()
        return pb.Prefilled(
            cached_tokens=lead.num_cached or 0,
            queue_s=self._admitted_at - self._arrived,
            compute_s=self._decodes_since - self._admitted_at,
            step_s=in_steps,
            prompt_logprobs=convert.prompt_to_pb(lead.take_prompt_logprobs()),
        )

    def _times(self, sequence: Sequence) -> tuple[float, float, float]:
        spent = sequence.times
        return spent.in_steps, spent.preempted, monotonic() - self._decodes_since

    async def _unless_failed(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`, which is cancelled if the node fails meanwhile: the work
        itself would not end while a rank hangs. `close` and the hand-off free its resources."""
        task = asyncio.ensure_future(work)
        try:
            if not task.done():
                await asyncio.wait((task, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._failed.result()
            return task.result()
        finally:
            task.cancel()

    def _add(self, choice: Choice, remote: bool) -> Sequence:
        sequence = self._engine.new_sequence(self._job, choice, remote=remote)
        self._sequences.append(sequence)
        self._replica.adopt(sequence, self)
        self._engine.add(sequence)
        return sequence

    async def _reserve(self, sequence: Sequence) -> None:
        pool = self._engine.scheduler.pool
        self._freed = asyncio.Event()
        ticket, arrival = await self._sink.reserve(
            num_tokens=sequence.num_tokens,
            blocks=[GroupBlocks(*each) for each in pool.awaited(sequence)],
            on_freed=lambda: self._release(sequence),
            adapter=self._job.adapter,
        )
        self._transfer_id = ticket.transfer_id
        reserved = ticket.to_pb()
        reserved.wait_s = monotonic() - self._arrived
        self._writer.event(pb.DecodeEvent(reserved=reserved))
        arrival.add_done_callback(partial(self._landed, sequence, monotonic()))

    def _release(self, sequence: Sequence) -> None:
        assert self._freed is not None
        self._engine.release(sequence)
        self._freed.set()

    def _landed(
        self, sequence: Sequence, reserved_at: float, landing: asyncio.Future[RecvResult]
    ) -> None:
        """Takes the hand-off's outcome. If the KV has landed, the next step computes the sequence,
        before the router learns it."""
        try:
            arrival = landing.result()
            if sequence.status is not Status.REMOTE:
                return  # closed meanwhile
            self._transfer_id = self._freed = None
            self._decodes_since = monotonic()
            self._activate(sequence, arrival)
            seconds = monotonic() - reserved_at
            self._metrics.observe_transfer(num_bytes=arrival.nbytes, seconds=seconds)
            self._in_place.set()
        except Exception as error:
            self._fail(error)

    def _activate(self, sequence: Sequence, arrival: RecvResult) -> None:
        landed = pb.Landed(
            bytes=arrival.nbytes,
            cached_tokens=sequence.num_cached or 0,
            first_token=arrival.first_token,
            data_s=arrival.data_s,
            commit_s=arrival.commit_s,
            verify_s=arrival.verify_s,
            kv_connectors=arrival.connectors,
            num_digests=arrival.num_digests,
        )
        self._writer.event(pb.DecodeEvent(landed=landed))
        moved = sequence.num_tokens - (sequence.num_cached or 0)
        self._engine.rates.handed_over(moved, max(0.0, arrival.data_s - arrival.commit_s))
        event = convert.event_from_pb(arrival.first_token.token)
        if self._engine.activate(sequence, event.tokens[0]):  # it ends the choice
            self._engine.release(sequence)
            self._choice_ended()
