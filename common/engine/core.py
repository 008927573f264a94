"""The engine loop: admit → schedule → step → apply.

All scheduling state belongs to one event loop, so there are no locks. The forward pass runs on the
ranks (`common/distributed`), one step at a time, one per pipeline stage, or with --async-scheduling
two: the second waits at the ranks. Requests may arrive and end meanwhile; blocks that a step uses
are freed only after it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

import msgspec

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SampledToken
from pdserve.common.distributed.executor import Executor
from pdserve.common.engine.messages import ExpertLoad, StepDelta, StepOutput
from pdserve.common.engine.rates import MeasuredRates
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Finish, Sequence, Status, check_finish

logger = logging.getLogger(__name__)

_outputs = msgspec.msgpack.Decoder(StepOutput)


class EngineListener(Protocol):
    """The engine's callbacks to its node. They run on the event loop and must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence has got its blocks."""

    def computed(self, sequence: Sequence) -> None:
        """KV of tokens `[0, sequence.num_computed)` is in the sequence's blocks."""

    def sampled(
        self, sequence: Sequence, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        """Tokens were appended to the sequence. With `finish` the last one ended it: it is HELD and
        not computed any more."""

    def failed(self, sequence: Sequence, reason: str, code: str) -> None:
        """The sequence is HELD and not computed any more. `code`: SEQUENCE_FAILED if a step had no
        result for it, InvalidRequest's code if its parameters forbid every token, INTERNAL if a
        listener raised an exception."""

    def routed(self, load: ExpertLoad) -> None:
        """Reports the expert load of a step of an MoE model."""


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """The engine's progress, for its watchdog."""

    step: int  # number of the oldest step in flight, or of the last one
    computing: bool  # a step is in flight
    call: tuple[int, int] | None  # (number, rank) of the oldest unanswered call
    admitted: int  # sequences admitted since start
    freed: int  # blocks freed since start
    waiting: int  # sequences without blocks
    remote: int  # sequences whose blocks another node fills
    # In the KV group that has the least to spare for the first waiting sequence:
    needed_blocks: int  # most blocks the sequence needs (some may be cached)
    free_blocks: int
    total_blocks: int

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute. Sequences that wait for blocks while KV transfers
        run count as idle: a stalled transfer loses its blocks when its lease expires."""
        return not self.computing and (not self.waiting or self.remote > 0)

    @property
    def counters(self) -> tuple[object, ...]:
        """Changes whenever the engine makes progress. Arrivals do not count, or they would hide a
        stuck engine."""
        return self.step, self.computing, self.admitted, self.freed


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that the ranks are computing."""

    batch: StepDelta
    sequences: dict[int, Sequence]  # by id
    answer: asyncio.Future[bytes]
    begun: float = field(default_factory=monotonic)


class EngineCore:
    """Computes the added sequences until they finish or are stopped."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        listener: EngineListener,
        max_model_len: int,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._listener = listener
        self._max_model_len = max_model_len
        self._in_flight: deque[_StepInFlight] = deque()  # oldest first; steps end in order
        self._last_step = 0
        self.rates = MeasuredRates()
        self._ended = 0.0  # when the last step ended; in a pipeline they overlap
        self._released: list[Sequence] = []  # have ended, but are in a step in flight
        self._step_done: asyncio.Event = asyncio.Event()
        self._work: asyncio.Event = asyncio.Event()
        self._seq_ids = itertools.count()
        self._calls: dict[int, int] = {}  # unanswered calls: number → rank, oldest first
        self._call_numbers = itertools.count()

    def new_sequence(
        self, job: GenerateJob, choice: Choice, *, remote: bool = False, hands_over: bool = False
    ) -> Sequence:
        """Returns a new sequence for `choice`; the caller adds it with `add`. `remote` and
        `hands_over`: see `Sequence`."""
        wanted = job.sampling.prompt_logprobs is not None and choice is job.choices[0]
        return Sequence(
            seq_id=next(self._seq_ids),
            sampling=job.sampling,
            token_ids=[*job.prompt_token_ids, *choice.output_token_ids],
            num_prompt_tokens=len(job.prompt_token_ids),
            choice=choice.index,
            request_id=job.request_id,
            cache_salt=job.cache_salt,
            adapter=job.adapter,
            client=job.client,
            router=job.router,
            priority=job.priority,
            remote=remote,
            hands_over=hands_over,
            prompt_logprobs=[] if wanted and not remote else None,
        )

    def add(self, sequence: Sequence) -> None:
        """Queues the sequence, and admits it at once if there are blocks."""
        self.scheduler.add(sequence)
        self._admit()
        self._work.set()

    def activate(self, sequence: Sequence, first_token: SampledToken) -> Finish | None:
        """Starts decoding a REMOTE sequence whose KV has arrived, after `first_token`. Returns a
        Finish if that token ends it."""
        self.scheduler.activate(sequence, first_token)
        finish = self._check(sequence)
        self._work.set()
        return finish

    async def stop(self, sequence: Sequence) -> None:
        """Returns once no step uses the sequence and none will. It keeps its blocks until
        `release`."""
        sequence.cancelled = True
        self.scheduler.hold(sequence)  # before the wait, or the next step would include it
        while self._is_computed(sequence):
            await self._step_done.wait()

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that has ended or is stopped, is REMOTE, or never ran.
        If a step in flight computes a token after its last one, they are freed after that step."""
        if sequence.status is Status.RUNNING:
            raise RuntimeError("a running sequence must be stopped before it is released")
        if self._is_computed(sequence):
            self._released.append(sequence)
            return
        self.scheduler.release(sequence)
        self._admit()
        self._work.set()

    async def call(self, rank: int, message: bytes) -> bytes:
        """Like `Executor.call`, watched by the watchdog."""
        number = next(self._call_numbers)
        self._calls[number] = rank
        try:
            return await self._executor.call(rank, message)
        finally:
            del self._calls[number]

    async def ping(self, rank: int) -> None:
        """Like `Executor.ping`, watched as a call: so a rank that stands still is noticed without
        any work."""
        number = next(self._call_numbers)
        self._calls[number] = rank
        try:
            await self._executor.ping(rank)
        finally:
            del self._calls[number]

    def progress(self) -> EngineProgress:
        scheduler, pool = self.scheduler, self.scheduler.pool
        head = scheduler.waiting[0].num_tokens if scheduler.waiting else 0
        needed, free, total = pool.tightest(head)
        return EngineProgress(
            step=self._in_flight[0].batch.step if self._in_flight else self._last_step,
            computing=bool(self._in_flight),
            call=next(iter(self._calls.items()), None),
            admitted=scheduler.num_admitted,
            freed=scheduler.num_freed,
            waiting=len(scheduler.waiting),
            remote=len(scheduler.remote),
            needed_blocks=needed,
            free_blocks=free,
            total_blocks=total,
        )

    async def run(self) -> None:
        """Runs the engine until cancelled.

        Raises:
            NodeError: a rank failed, so the engine cannot continue.
        """
        try:
            while True:
                self._admit()
                batch = self.scheduler.schedule() if self._has_room else None
                if batch is not None:
                    self._begin(batch)
                elif self._in_flight:
                    await self._wait()
                else:
                    self._work.clear()
                    await self._work.wait()
        finally:
            for step in self._in_flight:
                step.answer.cancel()
            self._in_flight.clear()
            self._release_ended()
            self._step_done.set()

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            self._notify(sequence, self._listener.admitted)

    @property
    def _has_room(self) -> bool:
        """Whether another step may start."""
        return len(self._in_flight) < self.scheduler.steps_in_flight

    def _is_computed(self, sequence: Sequence) -> bool:
        """Returns whether a step in flight uses the sequence's blocks."""
        return any(sequence.seq_id in step.sequences for step in self._in_flight)

    def _begin(self, batch: StepDelta) -> None:
        ids = {entry.seq_id for entry in batch.sequences}
        sequences = {s.seq_id: s for s in self.scheduler.running if s.seq_id in ids}
        answer = asyncio.ensure_future(self._executor.step(msgspec.msgpack.encode(batch)))
        self._in_flight.append(_StepInFlight(batch, sequences, answer))
        self._last_step = batch.step

    async def _wait(self) -> None:
        """Waits until the oldest step is done or, if another step may start, until new work."""
        oldest = self._in_flight[0].answer
        if self._has_room:
            self._work.clear()
            new = asyncio.ensure_future(self._work.wait())
            try:
                await asyncio.wait((oldest, new), return_when=asyncio.FIRST_COMPLETED)
            finally:
                new.cancel()
            if not oldest.done():
                return
        output = _outputs.decode(await oldest)
        step = self._in_flight.popleft()
        if output.step != step.batch.step:
            raise RuntimeError(f"the ranks answered step {output.step}, not {step.batch.step}")
        done, self._step_done = self._step_done, asyncio.Event()
        done.set()
        self._apply(step, output)
        self._release_ended()

    def _release_ended(self) -> None:
        released, self._released = self._released, []
        for sequence in released:
            self.release(sequence)

    def _apply(self, step: _StepInFlight, output: StepOutput) -> None:
        ended = monotonic()
        self._measure(step, ended)
        if output.experts is not None:
            self._listener.routed(output.experts)
        for seq_id, found in output.prompts:
            step.sequences[seq_id].add_prompt_logprobs(found)
        failed = dict(output.failed)
        drawn: defaultdict[int, list[SampledToken]] = defaultdict(list)
        for seq_id, token in output.tokens:
            drawn[seq_id].append(token)
        for entry in step.batch.sequences:
            sequence = step.sequences[entry.seq_id]
            if sequence.cancelled or sequence.status is not Status.RUNNING:
                continue  # stopped, or ended by a token that was not known when the step began
            sequence.times.step(step.begun, ended, entry.samples)
            if entry.seq_id in failed:
                forbidden = entry.seq_id in output.forbidden
                code = InvalidRequest.default_code if forbidden else "SEQUENCE_FAILED"
                self._fail(sequence, failed[entry.seq_id], code)
                continue
            if entry.seq_id in output.deferred:
                self.scheduler.defer(sequence, len(entry.token_ids))
                self._notify(sequence, self._listener.computed)
                continue
            self.scheduler.computed(sequence, len(entry.token_ids))
            self._notify(sequence, self._listener.computed)
            if entry.samples and not sequence.cancelled:
                self._append(sequence, drawn[entry.seq_id], entry.num_drafts)

    def _measure(self, step: _StepInFlight, ended: float) -> None:
        counts = [len(each.token_ids) for each in step.batch.sequences]
        chunks = [count for count in counts if count > 1]
        seconds = ended - max(step.begun, self._ended)
        self.rates.step(sum(chunks), len(counts) - len(chunks), seconds)
        self._ended = ended

    def _append(self, sequence: Sequence, drawn: list[SampledToken], num_drafts: int) -> None:
        """Appends the drawn tokens up to one that ends the sequence. All but the last were
        drafts."""
        tokens: tuple[SampledToken, ...] = ()
        finish = None
        for token in drawn:
            sequence.append(token)
            tokens = (*tokens, token)
            if (finish := self._check(sequence)) is not None:
                break
        self.scheduler.drawn(sequence, len(tokens), num_drafts, len(drawn) - 1)
        self._notify(sequence, self._listener.sampled, tokens, finish)

    def _notify(self, sequence: Sequence, callback: Callable[..., None], *args: object) -> None:
        """Calls the listener; an exception in it fails only this sequence."""
        try:
            callback(sequence, *args)
        except Exception as error:
            logger.exception("request %s failed with an unexpected error", sequence.request_id)
            reason = f"its node raised {type(error).__name__}; the traceback is in its log"
            self._fail(sequence, reason, "INTERNAL")

    def _fail(self, sequence: Sequence, reason: str, code: str) -> None:
        sequence.cancelled = True
        if code == InvalidRequest.default_code:
            self.scheduler.hold(sequence)  # its KV is valid and may stay in the prefix cache
        else:
            self.scheduler.fail(sequence)
        self._listener.failed(sequence, reason, code)

    def _check(self, sequence: Sequence) -> Finish | None:
        finish = check_finish(sequence, self.scheduler.eos_token_ids, self._max_model_len)
        if finish is not None:
            self.scheduler.hold(sequence)
        return finish
