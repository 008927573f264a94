"""The engine loop: admit → schedule → step → apply.

All scheduling state is touched on one event loop only, so there are no locks; the forward
pass runs elsewhere (`common/distributed`), one at a time, or one for each stage of a pipeline.
While it runs, requests may come and go: what a step touches is freed only after it.
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
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Finish, Sequence, Status, check_finish

logger = logging.getLogger(__name__)

_outputs = msgspec.msgpack.Decoder(StepOutput)


class EngineListener(Protocol):
    """What a node is told by its engine; called on the event loop, must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence holds blocks now."""

    def computed(self, sequence: Sequence) -> None:
        """KV of tokens `[0, sequence.num_computed)` is in the sequence's blocks."""

    def sampled(
        self, sequence: Sequence, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        """Tokens were appended to the sequence, of which the last may have ended it: on `finish`
        it is HELD and computed no more."""

    def failed(self, sequence: Sequence, reason: str, code: str) -> None:
        """The sequence is HELD and computed no more. `code` is of the error it ends with:
        SEQUENCE_FAILED, it had no result in a step whose others had one; InvalidRequest's, its own
        parameters forbid every token; INTERNAL, a defect in what is made of its results."""

    def routed(self, load: ExpertLoad) -> None:
        """A step kept a mixture of experts that busy."""


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """How far an engine is, for its watchdog."""

    step: int  # number of the last step begun
    computing: bool  # that step has not returned
    call: tuple[int, int] | None  # the oldest call without an answer: its number, its rank
    admitted: int  # sequences given blocks since start
    freed: int  # blocks given back since start
    waiting: int  # sequences without blocks
    remote: int  # sequences whose blocks another node fills
    needed_blocks: int  # of the first that waits, at most (some may be in the prefix cache)
    free_blocks: int
    total_blocks: int

    @property
    def idle(self) -> bool:
        """Nothing is to be done here. Who waits for blocks while others' KV is on its way waits
        for that: a hand-off without progress loses them with its lease, which is progress here."""
        return not self.computing and (not self.waiting or self.remote > 0)

    @property
    def counters(self) -> tuple[object, ...]:
        """Differs whenever something was done in between. Arrivals are not: they would keep a
        dead engine alive."""
        return self.step, self.computing, self.admitted, self.freed


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that the ranks work on."""

    batch: StepDelta
    sequences: dict[int, Sequence]  # by id
    answer: asyncio.Future[bytes]
    begun: float = field(default_factory=monotonic)


class EngineCore:
    """Computes the sequences added to it until they finish or are stopped."""

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
        self._in_flight: deque[_StepInFlight] = deque()  # the oldest first, which ends first
        self._last_step = 0
        self._step_done: asyncio.Event = asyncio.Event()
        self._work: asyncio.Event = asyncio.Event()
        self._seq_ids = itertools.count()
        self._calls: dict[int, int] = {}  # without an answer: number → rank, the oldest first
        self._call_numbers = itertools.count()

    def new_sequence(self, job: GenerateJob, choice: Choice, *, remote: bool = False) -> Sequence:
        """A sequence of this engine, not yet added."""
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
            priority=job.priority,
            remote=remote,
            prompt_logprobs=[] if wanted and not remote else None,
        )

    def add(self, sequence: Sequence) -> None:
        """It is admitted before this returns, if there are blocks: no step is waited for."""
        self.scheduler.add(sequence)
        self._admit()
        self._work.set()

    def activate(self, sequence: Sequence, first_token: SampledToken) -> Finish | None:
        """The KV of a REMOTE sequence has arrived, with its first token. It is computed on
        unless that token already finished it."""
        self.scheduler.activate(sequence, first_token)
        finish = self._check(sequence)
        self._work.set()
        return finish

    async def stop(self, sequence: Sequence) -> None:
        """When this returns no step touches the sequence any more and none will. It keeps its
        blocks until `release`."""
        sequence.cancelled = True
        self.scheduler.hold(sequence)  # at once, or the next step would take it again
        while self._is_computed(sequence):
            await self._step_done.wait()

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that is stopped, REMOTE, or never ran."""
        if sequence.status is Status.RUNNING or self._is_computed(sequence):
            raise RuntimeError("a running sequence must be stopped before it is released")
        self.scheduler.release(sequence)
        self._admit()
        self._work.set()

    async def call(self, rank: int, message: bytes) -> bytes:
        """As `Executor.call`, under the watchdog's eyes."""
        number = next(self._call_numbers)
        self._calls[number] = rank
        try:
            return await self._executor.call(rank, message)
        finally:
            del self._calls[number]

    def progress(self) -> EngineProgress:
        scheduler, pool = self.scheduler, self.scheduler.pool
        head = scheduler.waiting[0].num_tokens if scheduler.waiting else 0
        return EngineProgress(
            step=self._in_flight[0].batch.step if self._in_flight else self._last_step,
            computing=bool(self._in_flight),
            call=next(iter(self._calls.items()), None),
            admitted=scheduler.num_admitted,
            freed=scheduler.num_freed,
            waiting=len(scheduler.waiting),
            remote=len(scheduler.remote),
            needed_blocks=pool.blocks_for(head),
            free_blocks=pool.num_free,
            total_blocks=pool.num_blocks,
        )

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            NodeError: a rank failed; nothing can be computed any more.
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
            self._step_done.set()

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            self._notify(sequence, self._listener.admitted)

    @property
    def _has_room(self) -> bool:
        """Whether another step may be in flight."""
        return len(self._in_flight) < self.scheduler.micro_batches

    def _is_computed(self, sequence: Sequence) -> bool:
        """Whether a step in flight touches its blocks."""
        return any(sequence.seq_id in step.sequences for step in self._in_flight)

    def _begin(self, batch: StepDelta) -> None:
        ids = {entry.seq_id for entry in batch.sequences}
        sequences = {s.seq_id: s for s in self.scheduler.running if s.seq_id in ids}
        answer = asyncio.ensure_future(self._executor.step(msgspec.msgpack.encode(batch)))
        self._in_flight.append(_StepInFlight(batch, sequences, answer))
        self._last_step = batch.step

    async def _wait(self) -> None:
        """Until the oldest step is done or, if another one could begin, there is new work."""
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

    def _apply(self, step: _StepInFlight, output: StepOutput) -> None:
        ended = monotonic()
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
            if sequence.cancelled:
                continue
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

    def _append(self, sequence: Sequence, drawn: list[SampledToken], num_drafts: int) -> None:
        """The tokens drawn for it, up to one that ends it; all but the last one were drafts."""
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
        """A defect in the listener's work on a sequence is the end of that one, and of no other."""
        try:
            callback(sequence, *args)
        except Exception as error:
            logger.exception("a defect in the work of request %s", sequence.request_id)
            reason = f"its node met a {type(error).__name__}; the traceback is in its log"
            self._fail(sequence, reason, "INTERNAL")

    def _fail(self, sequence: Sequence, reason: str, code: str) -> None:
        sequence.cancelled = True
        if code == InvalidRequest.default_code:
            self.scheduler.hold(sequence)  # its KV is in order, and the node did its work
        else:
            self.scheduler.fail(sequence)
        self._listener.failed(sequence, reason, code)

    def _check(self, sequence: Sequence) -> Finish | None:
        finish = check_finish(sequence, self.scheduler.eos_token_ids, self._max_model_len)
        if finish is not None:
            self.scheduler.hold(sequence)
        return finish
