"""The engine loop with an executor that computes when told to: who may free what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from checksum_ranks import StepsAlone
from one_group import one_group
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.core.errors import InvalidRequest, NodeError
from pdserve.common.core.request import Choice, FinishReason, GenerateJob
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.core import EngineCore
from pdserve.common.engine.messages import ExpertLoad, StepDelta, StepOutput
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
    """Draws token 7 for everybody, once `release` is called for the step."""

    def __init__(self) -> None:
        self.batches: list[StepDelta] = []
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
        tokens = tuple((i, SampledToken(7)) for i in sampled if i not in self.failed)
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
    stages: int = 1,
) -> AsyncIterator[tuple[EngineCore, SlowExecutor, Log, asyncio.Task[None]]]:
    executor, log = SlowExecutor(), Log()
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler = Scheduler(one_group(16, 4), config, (EOS,), micro_batches=stages)
    engine = EngineCore(executor, scheduler, log, max_model_len=64)
    task = asyncio.create_task(engine.run())
    yield engine, executor, log, task
    task.cancel()


def job(length: int = 6, **sampling: int) -> GenerateJob:
    return GenerateJob("r", tuple(range(1, length + 1)), SamplingParams(**sampling))


async def test_what_experts_did_is_told_with_each_step() -> None:
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
async def test_a_failed_step_ends_the_loop_and_nobody_waits_for_ever(stages: int) -> None:
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
