"""The engine loop with an executor that computes when told to: who may free what, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from checksum_ranks import StepsAlone
from pdserve.common.config.node import SchedulerConfig
from pdserve.common.core.errors import InvalidRequest, NodeError
from pdserve.common.core.request import Choice, FinishReason, GenerateJob
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.block_pool import BlockPool
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
    """What the engine told its listener."""

    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []
        self.trips_over: tuple[str, int] | None = None  # an event of a sequence it cannot stand

    def admitted(self, sequence: Seq) -> None:
        self._trip("admitted", sequence)
        self.lines.append(("admitted", sequence.seq_id))

    def computed(self, sequence: Seq) -> None:
        self._trip("computed", sequence)
        self.lines.append(("computed", sequence.seq_id, sequence.num_computed))

    def sampled(
        self, sequence: Seq, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        self._trip("sampled", sequence)
        self.lines.append(("sampled", sequence.seq_id, finish.reason if finish else None))

    def failed(self, sequence: Seq, reason: str, code: str) -> None:
        self.lines.append((code, sequence.seq_id, reason))

    def _trip(self, event: str, sequence: Seq) -> None:
        if self.trips_over == (event, sequence.seq_id):
            raise KeyError("a defect")

    def routed(self, load: ExpertLoad) -> None:
        self.lines.append(("routed", load.assignments))


@asynccontextmanager
async def running(
    stages: int = 1,
) -> AsyncIterator[tuple[EngineCore, SlowExecutor, Log, asyncio.Task[None]]]:
    executor, log = SlowExecutor(), Log()
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler = Scheduler(BlockPool(16, 4), config, (EOS,), micro_batches=stages)
    engine = EngineCore(executor, scheduler, log, max_model_len=64)
    task = asyncio.create_task(engine.run())
    yield engine, executor, log, task
    task.cancel()


def job(length: int = 6, **sampling: int) -> GenerateJob:
    return GenerateJob("r", tuple(range(1, length + 1)), SamplingParams(**sampling))


async def test_a_job_s_priority_is_its_sequences() -> None:
    async with running() as (engine, *_):
        urgent = replace(job(), priority=-3)
        assert engine.new_sequence(urgent, Choice()).priority == -3


async def test_what_experts_did_is_told_with_each_step() -> None:
    async with running() as (engine, executor, log, _):
        executor.experts = ExpertLoad((5, 7), balancedness=0.5)
        engine.add(engine.new_sequence(job(12, max_tokens=1), Choice()))
        for _ in range(2):
            await executor.finish_step()
        assert [line for line in log.lines if line[0] == "routed"] == [("routed", (5, 7))] * 2


async def test_a_prompt_is_computed_in_chunks_then_decoded_until_it_ends() -> None:
    async with running() as (engine, executor, log, _):
        engine.add(engine.new_sequence(job(12, max_tokens=2), Choice()))
        for _ in range(3):
            await executor.finish_step()
        assert log.lines == [
            ("admitted", 0),
            ("computed", 0, 8),
            ("computed", 0, 12),
            ("sampled", 0, None),
            ("computed", 0, 13),
            ("sampled", 0, FinishReason.LENGTH),
        ]


async def test_what_a_step_touches_is_freed_after_it() -> None:
    async with running() as (engine, executor, log, _):
        sequence = engine.new_sequence(job(), Choice())
        engine.add(sequence)
        await asyncio.wait_for(executor.started.wait(), SOON)
        stopping = asyncio.create_task(engine.stop(sequence))
        await settle()
        assert not stopping.done() and engine.scheduler.pool.num_free < 16
        with pytest.raises(RuntimeError, match="stopped before"):
            engine.release(sequence)
        await executor.finish_step()
        await stopping
        engine.release(sequence)
        assert engine.scheduler.pool.num_free == 16
        assert log.lines == [("admitted", 0)]  # nobody hears of a step of a stopped sequence


async def test_a_waiting_sequence_stops_at_once() -> None:
    async with running() as (engine, executor, _, _):
        engine.add(engine.new_sequence(job(), Choice()))
        await asyncio.wait_for(executor.started.wait(), SOON)
        late = engine.new_sequence(job(), Choice())
        engine.add(late)
        await asyncio.wait_for(engine.stop(late), SOON)
        engine.release(late)
        assert late.status is Status.DONE


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


async def test_a_failed_step_ends_the_loop_and_nobody_waits_for_ever() -> None:
    async with running() as (engine, executor, _, task):
        sequence = engine.new_sequence(job(), Choice())
        engine.add(sequence)
        await asyncio.wait_for(executor.started.wait(), SOON)
        stopping = asyncio.create_task(engine.stop(sequence))
        await executor.finish_step(NodeError("rank 0 died"))
        await asyncio.wait_for(stopping, SOON)
        with pytest.raises(NodeError, match="rank 0 died"):
            await task


async def test_kv_from_another_node_is_decoded_from_its_first_token() -> None:
    async with running() as (engine, executor, _, _):
        sequence = engine.new_sequence(job(max_tokens=3), Choice(), remote=True)
        engine.add(sequence)
        await settle()
        assert sequence.status is Status.REMOTE and not executor.batches
        assert engine.activate(sequence, SampledToken(5)) is None
        await executor.finish_step()
        (entry,) = executor.batches[0].sequences
        assert (entry.token_ids, entry.start) == ((5,), 6)


async def test_a_first_token_that_ends_the_sequence_computes_nothing() -> None:
    async with running() as (engine, executor, _, _):
        sequence = engine.new_sequence(job(), Choice(), remote=True)
        engine.add(sequence)
        await settle()
        finish = engine.activate(sequence, SampledToken(EOS))
        assert finish is not None and finish.reason is FinishReason.STOP
        await settle()
        assert sequence.status is Status.HELD and not executor.batches


# ---- a sequence that fails ----


async def test_a_failed_row_ends_its_sequence_and_no_other() -> None:
    async with running() as (engine, executor, log, task):
        good, bad = (engine.new_sequence(job(4, max_tokens=2), Choice()) for _ in range(2))
        engine.add(bad)
        engine.add(good)
        executor.failed = {bad.seq_id: "NaN"}
        for _ in range(2):
            await executor.finish_step()
        assert ("SEQUENCE_FAILED", bad.seq_id, "NaN") in log.lines
        assert ("sampled", good.seq_id, FinishReason.LENGTH) in log.lines
        assert bad.status is Status.HELD and engine.scheduler.num_failed == 1
        await asyncio.wait_for(engine.stop(bad), SOON)
        for each in (bad, good):
            engine.release(each)
        assert engine.scheduler.pool.num_free == 16 and not task.done()


async def test_nobody_finds_the_kv_of_a_failed_sequence() -> None:
    """What made its logits NaN may be in its blocks, and would fail all that share its prefix."""
    async with running() as (engine, executor, _, _):
        first = engine.new_sequence(job(8, max_tokens=9), Choice())
        engine.add(first)
        await executor.finish_step()
        executor.failed = {first.seq_id: "NaN"}
        await executor.finish_step()
        await engine.stop(first)
        engine.release(first)
        engine.add(again := engine.new_sequence(job(9), Choice()))
        await executor.finish_step()
        assert again.num_cached == 0


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


@pytest.mark.parametrize("event", ["admitted", "computed", "sampled"])
async def test_a_defect_in_one_sequences_work_ends_that_sequence(event: str) -> None:
    async with running() as (engine, executor, log, task):
        bad, good = (engine.new_sequence(job(4, max_tokens=1), Choice()) for _ in range(2))
        log.trips_over = (event, bad.seq_id)
        engine.add(bad)
        engine.add(good)
        await executor.finish_step()
        reason = "its node raised KeyError; the traceback is in its log"
        assert ("INTERNAL", bad.seq_id, reason) in log.lines
        assert ("sampled", good.seq_id, FinishReason.LENGTH) in log.lines
        await asyncio.wait_for(engine.stop(bad), SOON)
        engine.release(bad)
        engine.release(good)
        assert engine.scheduler.pool.num_free == 16 and not task.done()


async def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """In steps of 8 tokens: all three need 6, the long one alone 5."""
    async with running() as (engine, executor, log, _):
        long = engine.new_sequence(job(40, max_tokens=1), Choice())
        engine.add(long)
        await asyncio.wait_for(executor.started.wait(), SOON)
        short = [engine.new_sequence(job(3 + i, max_tokens=1), Choice()) for i in range(2)]
        for each in short:
            engine.add(each)
        for _ in range(6):
            await executor.finish_step()
    ends = [
        next(batch.step for batch in executor.batches if _samples(batch, each))
        for each in (long, *short)
    ]
    assert ends == [6, 2, 3]
    assert log.lines[-1] == ("sampled", long.seq_id, FinishReason.LENGTH)


def _samples(batch: StepDelta, sequence: Seq) -> bool:
    return any(entry.samples and entry.seq_id == sequence.seq_id for entry in batch.sequences)


# ---- a pipeline of two stages ----


async def test_two_steps_are_in_flight_and_land_in_order() -> None:
    async with running(stages=2) as (engine, executor, log, _):
        engine.add(engine.new_sequence(job(16, max_tokens=1), Choice()))
        await settle()
        assert [batch.step for batch in executor.batches] == [1, 2]
        assert engine.progress().step == 1 and engine.progress().computing
        await executor.finish_step()
        assert log.lines == [("admitted", 0), ("computed", 0, 8)]
        assert engine.progress().step == 2
        executor.started.set()
        await executor.finish_step()
        assert log.lines[2:] == [("computed", 0, 16), ("sampled", 0, FinishReason.LENGTH)]
        assert not engine.progress().computing


async def test_a_newcomer_does_not_wait_for_the_step_in_flight() -> None:
    async with running(stages=2) as (engine, executor, _, _):
        engine.add(engine.new_sequence(job(4), Choice()))
        await settle()
        assert len(executor.batches) == 1
        engine.add(engine.new_sequence(job(5), Choice()))
        await settle()
        assert [batch.sequences[0].seq_id for batch in executor.batches] == [0, 1]


async def test_a_sequence_stops_when_its_last_step_in_flight_has_landed() -> None:
    async with running(stages=2) as (engine, executor, log, _):
        sequence = engine.new_sequence(job(16), Choice())
        engine.add(sequence)
        await settle()
        stopped = asyncio.create_task(engine.stop(sequence))
        for _ in range(2):
            assert not stopped.done()
            with pytest.raises(RuntimeError):
                engine.release(sequence)
            executor.started.set()
            await executor.finish_step()
        await asyncio.wait_for(stopped, SOON)
        engine.release(sequence)
        assert log.lines == [("admitted", 0)] and engine.scheduler.pool.num_free == 16


async def test_the_first_of_two_steps_fails() -> None:
    async with running(stages=2) as (engine, executor, _, task):
        sequence = engine.new_sequence(job(16), Choice())
        engine.add(sequence)
        await settle()
        await executor.finish_step(NodeError("a rank died"))
        with pytest.raises(NodeError, match="a rank died"):
            await task
        await asyncio.wait_for(engine.stop(sequence), SOON)
