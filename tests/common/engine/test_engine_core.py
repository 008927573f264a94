"""The engine loop with an executor that computes when told to: who may free what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from checksum_ranks import StepsAlone
from one_group import one_group
from pdserve.common.config.engine import EngineConfig, ParallelConfig, SchedulerConfig
from pdserve.common.config.speculation import SpeculationOptions
from pdserve.common.core.errors import ConfigError, InvalidRequest, NodeError
from pdserve.common.core.request import Choice, FinishReason, GenerateJob
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.core import EngineCore
from pdserve.common.engine.messages import DRAWN, ExpertLoad, StepDelta, StepOutput
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Finish, Status
from pdserve.common.engine.sequence import Sequence as Seq

EOS = 0
SOON = 30.0  # seconds; what is waited for comes at once, unless the machine is slow


async def settle() -> None:
    """Until everybody on the event loop has done what there is to do; no test waits for time."""
    for _ in range(50):
        await asyncio.sleep(0)


class SlowExecutor(StepsAlone):
    """Draws the same token for everybody, once `release` is called for the step."""

    def __init__(self) -> None:
        self.batches: list[StepDelta] = []
        self.token = 7
        self._order = asyncio.Lock()  # steps end in the order in which they began
        self.started = asyncio.Event()
        self.experts: ExpertLoad | None = None
        self.failed: dict[int, str] = {}  # sequences, and why they get no token
        self.forbidden: tuple[int, ...] = ()  # of these: those whose own parameters forbid any
        self._go: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def step(self, message: bytes) -> bytes:
        batch = msgspec.msgpack.decode(message, type=StepDelta)
        self.batches.append(batch)
        self.started.set()
        async with self._order:
            error = await self._go.get()
        if error is not None:
            raise error
        sampled = [e.seq_id for e in batch.sequences if e.samples]
        tokens = tuple((i, SampledToken(self.token)) for i in sampled if i not in self.failed)
        failed = tuple((i, self.failed[i]) for i in sampled if i in self.failed)
        output = StepOutput(batch.step, tokens, self.experts, failed, self.forbidden)
        return msgspec.msgpack.encode(output)

    async def finish_step(self, error: Exception | None = None) -> None:
        """Lets the step under way, or the next one, end."""
        await asyncio.wait_for(self.started.wait(), SOON)
        self.started.clear()
        self._go.put_nowait(error)
        await settle()


class Log:
    """Records what the engine told its listener."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []

    def admitted(self, sequence: Seq) -> None:
        self.lines.append(("admitted", sequence.seq_id))

    def computed(self, sequence: Seq) -> None:
        self.lines.append(("computed", sequence.seq_id, sequence.num_computed))

    def sampled(
        self, sequence: Seq, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        self.lines.append(("sampled", sequence.seq_id, finish.reason if finish else None))

    def failed(self, sequence: Seq, reason: str, code: str) -> None:
        self.lines.append((code, sequence.seq_id, reason))

    def routed(self, load: ExpertLoad) -> None:
        self.lines.append(("routed", load.assignments))


@asynccontextmanager
async def running(
    stages: int = 1, ahead: bool = False
) -> AsyncIterator[tuple[EngineCore, SlowExecutor, Log, asyncio.Task[None]]]:
    executor, log = SlowExecutor(), Log()
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, async_scheduling=ahead)
    scheduler = Scheduler(one_group(16, 4), config, (EOS,), stages, max_model_len=64)
    engine = EngineCore(executor, scheduler, log, max_model_len=64)
    task = asyncio.create_task(engine.run())
    yield engine, executor, log, task
    task.cancel()


def job(length: int = 6, **sampling: Any) -> GenerateJob:
    return GenerateJob("r", tuple(range(1, length + 1)), SamplingParams(**sampling))


async def test_expert_loads_are_reported_with_each_step() -> None:
    async with running() as (engine, executor, log, _):
        executor.experts = ExpertLoad((5, 7), balancedness=0.5)
        engine.add(engine.new_sequence(job(12, max_tokens=1), Choice()))
        for _ in range(2):
            await executor.finish_step()
        assert [line for line in log.lines if line[0] == "routed"] == [("routed", (5, 7))] * 2


async def test_blocks_are_admitted_while_a_step_runs() -> None:
    """When there are too few, as soon as they are given back."""
    async with running() as (engine, executor, log, _):
        engine.add(engine.new_sequence(job(12), Choice()))
        await asyncio.wait_for(executor.started.wait(), SOON)
        whole, waiting = (engine.new_sequence(job(n), Choice(), remote=True) for n in (44, 8))
        engine.add(whole)
        engine.add(waiting)
        assert (whole.status, waiting.status) == (Status.REMOTE, Status.WAITING)
        engine.release(whole)
        assert waiting.status is Status.REMOTE
        assert log.lines == [("admitted", 0), ("admitted", 1), ("admitted", 2)]
        assert len(executor.batches) == 1, "the step is still running"


@pytest.mark.parametrize("stages", [1, 2])
async def test_a_failed_step_ends_the_loop_and_pending_stops_return(stages: int) -> None:
    async with running(stages) as (engine, executor, _, task):
        sequence = engine.new_sequence(job(16), Choice())
        engine.add(sequence)
        await settle()
        stopping = asyncio.create_task(engine.stop(sequence))
        await executor.finish_step(NodeError("rank 0 died"))
        await asyncio.wait_for(stopping, SOON)
        with pytest.raises(NodeError, match="rank 0 died"):
            await task


# ---- a sequence that fails ----


async def test_a_sequence_that_forbids_every_token_takes_no_prefix_from_others() -> None:
    """Its KV is in order: what fails is its own parameters, which is no fault of the node's."""
    async with running() as (engine, executor, log, _):
        engine.add(good := engine.new_sequence(job(8, max_tokens=1), Choice()))
        await executor.finish_step()
        engine.release(good)
        engine.add(odd := engine.new_sequence(job(9), Choice()))
        executor.failed, executor.forbidden = {odd.seq_id: "forbidden"}, (odd.seq_id,)
        await executor.finish_step()
        assert (InvalidRequest.default_code, odd.seq_id, "forbidden") in log.lines
        await engine.stop(odd)
        engine.release(odd)
        engine.add(again := engine.new_sequence(job(9), Choice()))
        assert again.num_cached == 8 and engine.scheduler.num_failed == 0


# ---- a pipeline of two stages ----


async def test_a_sequence_has_stopped_once_no_step_in_flight_has_it() -> None:
    async with running(stages=2) as (engine, executor, _, _):
        engine.add(sequence := engine.new_sequence(job(16), Choice()))
        await settle()
        stopping = asyncio.create_task(engine.stop(sequence))
        for _ in executor.batches[:2]:
            await settle()
            assert not stopping.done()
            executor.started.set()
            await executor.finish_step()
        assert stopping.done()
        engine.release(sequence)


async def test_two_steps_are_in_flight_and_land_in_order() -> None:
    async with running(stages=2) as (engine, executor, log, _):
        engine.add(engine.new_sequence(job(16, max_tokens=1), Choice()))
        await settle()
        assert [batch.step for batch in executor.batches] == [1, 2]
        assert engine.progress().step == 1 and engine.progress().computing
        await executor.finish_step()
        assert log.lines == [("admitted", 0), ("computed", 0, 8)]
        assert engine.progress().step == 2
        engine.add(engine.new_sequence(job(5), Choice()))
        await settle()  # a newcomer does not wait for the step in flight
        assert [batch.sequences[0].seq_id for batch in executor.batches] == [0, 0, 1]
        executor.started.set()
        await executor.finish_step()
        done = [("computed", 0, 16), ("sampled", 0, FinishReason.LENGTH)]
        assert log.lines[2:] == [("admitted", 1), *done]
        executor.started.set()
        await executor.finish_step()
        assert log.lines[5:] == [("computed", 1, 5), ("sampled", 1, None)]


# ---- asynchronous scheduling ----


def computed(executor: SlowExecutor) -> list[tuple[int, ...]]:
    """The tokens of each step."""
    return [sum((each.token_ids for each in batch.sequences), ()) for batch in executor.batches]


async def finish(executor: SlowExecutor) -> None:
    executor.started.set()  # it began before the last one ended
    await executor.finish_step()


async def test_a_step_begins_before_its_tokens_are_known_unless_they_end_a_sequence() -> None:
    async with running(ahead=True) as (engine, executor, log, _):
        engine.add(sequence := engine.new_sequence(job(6, max_tokens=3), Choice()))
        await settle()
        assert computed(executor) == [(1, 2, 3, 4, 5, 6), (DRAWN,)]
        assert engine.progress().step == 1
        await finish(executor)
        assert sequence.token_ids[6:] == [7] and sequence.num_computed == 6
        await finish(executor)
        await finish(executor)
        assert computed(executor)[2:] == [(DRAWN,)], "the third token is the last"
        assert log.lines[-1] == ("sampled", 0, FinishReason.LENGTH)
        assert not engine.progress().computing


async def test_a_token_too_many_is_dropped_and_keeps_the_blocks_until_it_is_computed() -> None:
    async with running(ahead=True) as (engine, executor, log, _):
        engine.add(sequence := engine.new_sequence(job(6, max_tokens=9), Choice()))
        await settle()
        with pytest.raises(RuntimeError, match="stopped before"):
            engine.release(sequence)
        executor.token = EOS
        await finish(executor)
        assert log.lines[-1] == ("sampled", 0, FinishReason.STOP)
        engine.release(sequence)
        engine.release(sequence)
        assert sequence.status is Status.HELD and engine.scheduler.pool.num_free == 14
        told = len(log.lines)
        await finish(executor)
        assert sequence.status is Status.DONE and engine.scheduler.pool.num_free == 16
        assert len(log.lines) == told and sequence.token_ids[6:] == [EOS]
        engine.add(engine.new_sequence(job(4), Choice()))
        await settle()
        assert executor.batches[2].ended == (0,)


async def test_one_that_fails_is_not_heard_of_again() -> None:
    async with running(ahead=True) as (engine, executor, log, _):
        engine.add(sequence := engine.new_sequence(job(6), Choice()))
        await settle()
        executor.failed = {0: "NaN"}
        await finish(executor)
        assert log.lines[-1] == ("SEQUENCE_FAILED", 0, "NaN")
        executor.failed = {}
        stopping = asyncio.create_task(engine.stop(sequence))
        await settle()
        assert not stopping.done()
        await finish(executor)
        assert stopping.done() and log.lines[-1] == ("SEQUENCE_FAILED", 0, "NaN")


@pytest.mark.parametrize(
    ("sampling", "hands_over"),
    [({"grammar": "g"}, False), ({"bad_words_token_ids": ((1, 2),)}, False), ({}, True)],
)
async def test_some_wait_for_their_token(sampling: dict[str, Any], hands_over: bool) -> None:
    """And with them all others: a step of some alone would delay the rest."""
    async with running(ahead=True) as (engine, executor, _, _):
        engine.add(engine.new_sequence(job(4), Choice()))
        engine.add(engine.new_sequence(job(4, **sampling), Choice(), hands_over=hands_over))
        await settle()
        first = (1, 2, 3, 4) * 2
        assert computed(executor) == ([first, (DRAWN,)] if hands_over else [first])
        await finish(executor)
        expected = [(DRAWN,), (DRAWN, 7)] if hands_over else [(7, 7)]
        assert computed(executor)[1:] == expected[: len(computed(executor)) - 1]


async def test_nothing_is_preempted_for_a_step_ahead() -> None:
    async with running(ahead=True) as (engine, executor, _, _):
        for _ in range(2):
            engine.add(engine.new_sequence(job(4, max_tokens=40, min_tokens=40), Choice()))
        engine.add(whole := engine.new_sequence(job(44), Choice(), remote=True))
        assert engine.scheduler.pool.num_free == 3
        await settle()
        while not engine.scheduler.num_preemptions:
            await finish(executor)
            assert len(executor.batches) < 20
        assert whole.status is Status.REMOTE
        assert computed(executor)[-2:] == [(7,), (DRAWN,)]


@pytest.mark.parametrize(
    "other",
    [
        {"parallel": ParallelConfig(pipeline_parallel_size=2)},
        {
            "speculation": SpeculationOptions(
                speculative_config={"num_speculative_tokens": 2, "method": "ngram"}
            )
        },
    ],
    ids=["pipeline", "drafts"],
)
def test_conflicting_options_are_named(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--async-scheduling needs"):
        EngineConfig(scheduler=SchedulerConfig(async_scheduling=True), **other)
