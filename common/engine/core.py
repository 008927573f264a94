"""The engine loop: admit → schedule → step → apply.

All scheduling state is touched on one event loop only, so there are no locks; the forward
pass runs elsewhere (`common/distributed`), one at a time, or one for each stage of a pipeline.
While it runs, requests may come and go: what a step touches is freed only after it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SampledToken
from pdserve.common.distributed.executor import Executor
from pdserve.common.engine.messages import ExpertLoad, StepDelta, StepOutput
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Finish, Sequence, Status, check_finish
from pdserve.common.engine.watchdog import Work

logger = logging.getLogger(__name__)


class EngineListener(Protocol):
    """What a role hears from its engine; called on the event loop, must not block."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence holds blocks now."""

    def computed(self, sequence: Sequence) -> None:
        """KV of tokens `[0, sequence.num_computed)` is in the sequence's blocks."""

    def sampled(self, sequence: Sequence, token: SampledToken, finish: Finish | None) -> None:
        """A token was appended to the sequence; on `finish` it is HELD and computed no more."""

    def failed(self, sequence: Sequence, reason: str, code: str) -> None:
        """The sequence is HELD and computed no more. `code` is of the error it ends with:
        SEQUENCE_FAILED, it had no result in a step whose others had one; INTERNAL, a defect in
        what is made of its results."""

    def routed(self, load: ExpertLoad) -> None:
        """A step kept a mixture of experts that busy."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that the ranks work on."""

    batch: StepDelta
    sequences: dict[int, Sequence]  # by id
    answer: asyncio.Future[bytes]


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
        self._flights: deque[_Flight] = deque()  # the oldest first, which ends first
        self._last_step = 0
        self._step_done: asyncio.Event = asyncio.Event()
        self._work: asyncio.Event = asyncio.Event()
        self._seq_ids = itertools.count()
        self._calls: dict[int, int] = {}  # without an answer: number → rank, the oldest first
        self._call_numbers = itertools.count()

    def new_sequence(self, job: GenerateJob, choice: Choice, *, remote: bool = False) -> Sequence:
        """A sequence of this engine, not yet added."""
        return Sequence(
            seq_id=next(self._seq_ids),
            sampling=job.sampling,
            token_ids=[*job.prompt_token_ids, *choice.output_token_ids],
            num_prompt_tokens=len(job.prompt_token_ids),
            choice=choice.index,
            request_id=job.request_id,
            cache_salt=job.cache_salt,
            remote=remote,
        )

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
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
        while self._touched(sequence):
            await self._step_done.wait()

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence that is stopped, REMOTE, or never ran."""
        if sequence.status is Status.RUNNING or self._touched(sequence):
            raise RuntimeError("a running sequence must be stopped before it is released")
        self.scheduler.release(sequence)
        self._work.set()

    async def call(self, rank: int, message: bytes) -> bytes:
        """As `Executor.call`, under the watchdog's eyes."""
        number = next(self._call_numbers)
        self._calls[number] = rank
        try:
            return await self._executor.call(rank, message)
        finally:
            del self._calls[number]

    def work(self) -> Work:
        """How far the engine is, for its watchdog."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        head = scheduler.waiting[0].num_tokens if scheduler.waiting else 0
        return Work(
            step=self._flights[0].batch.step if self._flights else self._last_step,
            computing=bool(self._flights),
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
                for sequence in self.scheduler.admit():
                    self._tell(sequence, self._listener.admitted, sequence)
                batch = self.scheduler.schedule() if self._has_room else None
                if batch is not None:
                    self._begin(batch)
                elif self._flights:
                    await self._wait()
                else:
                    self._work.clear()
                    await self._work.wait()
        finally:
            for flight in self._flights:
                flight.answer.cancel()
            self._flights.clear()
            self._step_done.set()

    @property
    def _has_room(self) -> bool:
        """Whether another step may be in flight."""
        return len(self._flights) < self.scheduler.micro_batches

    def _touched(self, sequence: Sequence) -> bool:
        return any(sequence.seq_id in flight.sequences for flight in self._flights)

    def _begin(self, batch: StepDelta) -> None:
        ids = {entry.seq_id for entry in batch.sequences}
        sequences = {s.seq_id: s for s in self.scheduler.running if s.seq_id in ids}
        step = self._executor.step(msgspec.msgpack.encode(batch))
        self._flights.append(_Flight(batch, sequences, asyncio.ensure_future(step)))
        self._last_step = batch.step

    async def _wait(self) -> None:
        """Until the oldest step has landed or, if another one could begin, there is new work."""
        oldest = self._flights[0].answer
        if self._has_room:
            self._work.clear()
            new = asyncio.ensure_future(self._work.wait())
            try:
                await asyncio.wait((oldest, new), return_when=asyncio.FIRST_COMPLETED)
            finally:
                new.cancel()
            if not oldest.done():
                return
        answer = await oldest
        self._land(msgspec.msgpack.decode(answer, type=StepOutput))

    def _land(self, output: StepOutput) -> None:
        flight = self._flights.popleft()
        landed, self._step_done = self._step_done, asyncio.Event()
        landed.set()
        self._apply(flight.batch, flight.sequences, output)

    def _apply(self, batch: StepDelta, sequences: dict[int, Sequence], output: StepOutput) -> None:
        if output.experts is not None:
            self._listener.routed(output.experts)
        tokens, failed = dict(output.tokens), dict(output.failed)
        for entry in batch.sequences:
            sequence = sequences[entry.seq_id]
            if sequence.cancelled:
                continue
            if entry.seq_id in failed:
                self._fail(sequence, failed[entry.seq_id])
                continue
            self.scheduler.computed(sequence, len(entry.token_ids))
            self._tell(sequence, self._listener.computed, sequence)
            if entry.samples and not sequence.cancelled:
                token = tokens[entry.seq_id]
                sequence.append(token)
                finish = self._check(sequence)
                self._tell(sequence, self._listener.sampled, sequence, token, finish)

    def _tell(self, sequence: Sequence, hear: Callable[..., None], *news: object) -> None:
        """A defect in what is made of the news is the end of the sequence, and of no other."""
        try:
            hear(*news)
        except Exception as error:
            logger.exception("a defect in the work of request %s", sequence.request_id)
            reason = f"its node met a {type(error).__name__}; the traceback is in its log"
            self._fail(sequence, reason, "INTERNAL")

    def _fail(self, sequence: Sequence, reason: str, code: str = "SEQUENCE_FAILED") -> None:
        sequence.cancelled = True
        self.scheduler.fail(sequence)
        self._listener.failed(sequence, reason, code)

    def _check(self, sequence: Sequence) -> Finish | None:
        finish = check_finish(sequence, self.scheduler.eos_token_ids, self._max_model_len)
        if finish is not None:
            self.scheduler.hold(sequence)
        return finish
