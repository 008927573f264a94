"""A node's engine on a virtual clock: the production scheduler and KV pool, steps with durations
from a calibration, and dummy tokens.

    admit → schedule → (time passes) → computed, sampled          as in `common.engine.core`

While all running sequences decode and none waits, consecutive steps are equal until a sequence
ends. They are simulated as one run; an arrival ends the run after the current step.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from pdserve.common.core.sampling import SampledToken
from pdserve.common.engine.messages import StepDelta
from pdserve.common.engine.rates import MeasuredRates
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence, check_finish
from pdserve.simulate.calibration import Times, Work
from pdserve.simulate.host import Host, Turn

_FIRST = SampledToken(0)
MOST_TOKENS = 2**31  # larger than any prompt of a trace
MOST_STEPS = 64  # steps per run, because their blocks are allocated first


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class Job:
    """A sequence on an engine, and its progress."""

    sequence: Sequence
    on_computed: Callable[[int], None]
    admitted: asyncio.Future[None] = field(default_factory=_future)
    first: asyncio.Future[float] = field(default_factory=_future)  # time of the first token
    ended: asyncio.Future[float] = field(default_factory=_future)  # time of the last token
    last: float = 0.0  # time of its latest token; set by the caller for another node's


@dataclass(slots=True)
class _Run:
    """A run of equal steps in flight."""

    batch: StepDelta
    begun: float
    seconds: float  # per step, if no other node of its host computes
    steps: int
    turn: Turn


class SimulatedEngine:
    """Computes jobs in virtual time."""

    def __init__(
        self,
        scheduler: Scheduler,
        times: Times,
        host: Host,
        chance: random.Random,
        on_gap: Callable[[float, int], None],
    ) -> None:
        """`chance` scatters the steps' durations. `on_gap(seconds, count)`: `count` tokens came
        `seconds` after the token before."""
        self.scheduler = scheduler
        self._host = host
        self.computed_tokens = 0  # of prompts
        self._times = times
        self._chance = chance
        self._on_gap = on_gap
        self.rates = MeasuredRates()
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, Job] = {}
        self._run: _Run | None = None

    def add(self, job: Job) -> None:
        self._jobs[job.sequence.seq_id] = job
        self.scheduler.add(job.sequence)
        if self._admit():
            self._changed()

    def activate(self, job: Job) -> None:
        """Starts decoding a remote sequence whose KV has arrived, after its first token."""
        self.scheduler.activate(job.sequence, _FIRST)
        self._check(job, self._loop.time())
        self._changed()

    def release(self, job: Job) -> None:
        """Frees the blocks of a job that has ended or is remote."""
        del self._jobs[job.sequence.seq_id]
        self.scheduler.release(job.sequence)
        if self._admit():
            self._changed()

    @property
    def computing(self) -> bool:
        """Whether a step is in flight."""
        return self._run is not None

    # ---- inside -----------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Returns whether there is more to compute."""
        found = self.scheduler.admit()
        for sequence in found:
            job = self._jobs[sequence.seq_id]
            if not job.admitted.done():  # admitted for the first time
                job.admitted.set_result(None)
            job.on_computed(sequence.num_computed)
        return not all(each.remote for each in found)

    def _changed(self) -> None:
        """Starts a step, or ends the run in flight after its current step."""
        run = self._run
        if run is None:
            self._begin()
        elif run.steps > 1:
            left = ceil(self._host.left(run.turn) / run.seconds)
            later = min(run.steps, max(1, left)) - 1
            run.steps -= later
            self._host.shorten(run.turn, later * run.seconds)

    def _begin(self) -> None:
        self._admit()
        batch = self.scheduler.schedule()
        if batch is None:
            return
        work = _work(batch)
        steps = 1 if work.chunk_tokens else self._steps_alike(work)
        seconds = self._times.step(work)
        if steps > 1:
            grown = Work(sequences=work.sequences, context=work.context + steps * work.sequences)
            seconds = (seconds + self._times.step(grown)) / 2
        alone, beside = self._times.scattered(work, self._chance.random())
        seconds *= alone
        turn = self._host.start(steps * seconds, beside, self._end)
        self._run = _Run(batch, self._loop.time(), seconds, steps, turn)

    def _steps_alike(self, work: Work) -> int:
        """Returns how many steps equal this one, and allocates their blocks."""
        running = self.scheduler.running
        if work.sequences < len(running):
            return 1
        left = min(each.sampling.max_tokens - each.num_output_tokens for each in running)
        steps = min(left, MOST_STEPS)
        pool = self.scheduler.pool
        size = pool.block_size
        if 2 * len(running) * -(-steps // size) > pool.num_free:
            return 1
        return steps if all(pool.grow(each, each.num_tokens + steps - 1) for each in running) else 1

    def _end(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        now = self._loop.time()
        took = (now - run.begun) / run.steps
        work = _work(run.batch)
        self.rates.step(work.chunk_tokens, work.sequences, took)
        steady = 0  # tokens that came one step after the token before
        for entry in run.batch.sequences:
            job = self._jobs[entry.seq_id]
            steady += self._apply(job, len(entry.token_ids), entry.samples, run, took)
        if steady:
            self._on_gap(took, steady)
        self._begin()

    def _apply(self, job: Job, count: int, samples: bool, run: _Run, took: float) -> int:
        """Applies a run, whose steps took `took` seconds each, to a sequence; returns how many of
        its tokens came one step after the token before."""
        now = self._loop.time()
        sequence, scheduler = job.sequence, self.scheduler
        scheduler.computed(sequence, count)
        if sequence.num_output_tokens == 0:
            self.computed_tokens += count
            job.on_computed(sequence.num_computed)
        if not samples:
            return 0
        sequence.token_ids.extend([sequence.seq_id] * run.steps)
        if run.steps > 1:
            sequence.num_scheduled += run.steps - 1
            scheduler.computed(sequence, run.steps - 1)
        scheduler.drawn(sequence, run.steps)
        if not job.first.done():
            job.first.set_result(now)
        gap = run.begun + took - job.last
        late = bool(job.last) and gap > 1.001 * took
        if late:
            self._on_gap(gap, 1)
        steady = run.steps - (late or not job.last)
        job.last = now
        self._check(job, now)
        return steady

    def _check(self, job: Job, now: float) -> None:
        if check_finish(job.sequence, (), MOST_TOKENS) is not None:
            self.scheduler.hold(job.sequence)
            job.ended.set_result(now)


def _work(batch: StepDelta) -> Work:
    work = Work()
    for entry in batch.sequences:
        count = len(entry.token_ids)
        if count == 1 and entry.samples:
            work.sequences += 1
            work.context += entry.start + 1
        else:
            work.chunk_tokens += count
            work.chunk_cached += entry.start * count
    return work
