"""Measures how well pipeline stages overlap: one prompt through the engine, in m chunks.

Every rank records when it computed which micro-batch, on the monotonic clock that all processes of
a host share. The bubble is the share of the stages' time in which they computed nothing, between
the first stage's start and the last stage's end. The optimum is GPipe's (arXiv:1811.06965),
(p - 1) / (m + p - 1), for stages and chunks of equal duration. The same chunks are run on one rank;
its time divided by p is the floor. The last rows decode: each sequence has one token in flight, so
fewer sequences than stages leave 1 - sequences / p of the time idle.

    python benchmarks/bench_pipeline.py [--pp 2] [--chunks 2,4,8] [--gantt FILE.png] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pdserve.common.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.distributed.executor import Emit, Executor, WorkerSpec
from pdserve.common.distributed.launch import make_executor
from pdserve.common.engine.core import EngineCore
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.messages import CacheShape, RankReady
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Finish
from pdserve.common.engine.sequence import Sequence as Seq
from pdserve.common.worker.runner import StageLink
from pdserve.common.worker.worker import ModelWorker, WorkerConfig, build_worker, worker_specs
from pdserve.demo_model.embedded import ensure_embedded_model

ROUNDS = 3  # of each case; the fastest counts, since other programs may run


class Span(msgspec.Struct):
    """The time in which a rank computed a step, in seconds of the host's monotonic clock."""

    rank: int
    step: int
    start: float
    end: float


# ---- in the ranks ----


def build_traced_worker(spec: WorkerSpec, emit: Emit) -> TracedWorker:
    return TracedWorker(build_worker(spec, emit), spec.rank, emit)


class TracedWorker:
    """A rank that reports when it computed: its steps without waiting for other stages."""

    def __init__(self, worker: ModelWorker, rank: int, emit: Emit) -> None:
        self._worker, self._rank, self._emit = worker, rank, emit
        self._steps = 0
        self._waits: list[tuple[float, float]] = []
        self.extension = worker.extension
        self.ready = worker.ready
        self.close = worker.close
        if worker.runner.neighbours is not None:
            worker.runner.neighbours = TimedStageLink(worker.runner.neighbours, self._waits)

    def step(self, message: bytes) -> bytes:
        self._waits.clear()
        start = time.monotonic()
        answer = self._worker.step(message)
        end = time.monotonic()
        for wait_start, wait_end in self._waits:  # at the step's start or end
            start, end = (wait_end, end) if wait_end < (start + end) / 2 else (start, wait_start)
        self._steps += 1
        self._emit(msgspec.msgpack.encode(Span(self._rank, self._steps, start, end)))
        return answer


class TimedStageLink(StageLink):
    def __init__(self, inner: StageLink, waits: list[tuple[float, float]]) -> None:
        self._inner, self._noted = inner, waits

    def receive(self, num_tokens: int) -> Tensor:
        start = time.monotonic()
        hidden = self._inner.receive(num_tokens)
        self._noted.append((start, time.monotonic()))
        return hidden

    def send(self, hidden: Tensor) -> None:
        start = time.monotonic()
        self._inner.send(hidden)
        self._noted.append((start, time.monotonic()))


# ---- in the engine's process ----


@dataclass(frozen=True)
class Result:
    """`bubble` and `at_best` are shares of the stages' time; `floor_s` is one rank's time / p."""

    what: str
    stages: int
    micro_batches: int
    seconds: float
    floor_s: float
    bubble: float
    at_best: float


class Ends:
    """An engine listener that waits for the end of all sequences."""

    def __init__(self, engine_ends: int) -> None:
        self.left = engine_ends
        self.done = asyncio.Event()
        self.spans: list[Span] = []

    def admitted(self, sequence: Seq) -> None: ...

    def computed(self, sequence: Seq) -> None: ...

    def sampled(
        self, sequence: Seq, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        self.left -= finish is not None
        if not self.left:
            self.done.set()

    def on_event(self, rank: int, event: bytes) -> None:
        self.spans.append(msgspec.msgpack.decode(event, type=Span))


@dataclass(frozen=True)
class Work:
    """Prompts, computed in chunks of `chunk` tokens, and tokens to decode after each."""

    what: str
    prompts: int
    prompt_len: int
    chunk: int
    output_len: int


async def measure(model: Path, stages: int, works: Sequence[Work]) -> list[list[list[Span]]]:
    """Returns the spans per work and round, ordered by time."""
    config = engine_config(model, stages, works)
    specs = worker_specs(WorkerConfig(config), log=LogConfig(log_level="warning"))
    executor = make_executor(
        [replace(spec, factory="bench_pipeline:build_traced_worker") for spec in specs]
    )
    try:
        answers = await executor.start()
        (shape,) = msgspec.msgpack.decode(answers[0], type=RankReady).caches
        return [
            [await one_round(executor, shape, stages, work) for _ in range(ROUNDS)]
            for work in works
        ]
    finally:
        await executor.shutdown(5.0)


async def one_round(executor: Executor, shape: CacheShape, stages: int, work: Work) -> list[Span]:
    ends = Ends(work.prompts)
    executor.on_event(ends.on_event)
    group = KVGroup((0,), 1, 1)
    pool = KVPool([group], [shape.num_blocks], shape.block_size, prefix_caching=False)
    config = SchedulerConfig(max_num_batched_tokens=work.chunk, max_num_seqs=work.prompts)
    scheduler = Scheduler(pool, config, (), micro_batches=stages)
    engine = EngineCore(executor, scheduler, ends, work.prompt_len + work.output_len)
    await run(engine, ends, work)
    return sorted(ends.spans, key=lambda span: span.start)


async def run(engine: EngineCore, ends: Ends, work: Work) -> None:
    sampling = SamplingParams(max_tokens=work.output_len, temperature=0, ignore_eos=True)
    for _ in range(work.prompts):
        job = GenerateJob("bench", tuple(7 * i % 500 for i in range(work.prompt_len)), sampling)
        engine.add(engine.new_sequence(job, Choice()))
    running = asyncio.create_task(engine.run())
    done = asyncio.create_task(ends.done.wait())
    await asyncio.wait((running, done), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()  # it ends only with an error
    await asyncio.sleep(0.05)  # until the last spans have arrived
    running.cancel()


def bubble_of(spans: Sequence[Span], stages: int) -> tuple[float, float]:
    """Returns (seconds from the first start to the last end, idle share of the stages)."""
    total = max(span.end for span in spans) - min(span.start for span in spans)
    busy = sum(span.end - span.start for span in spans)
    return total, 1 - busy / (stages * total)


def engine_config(model: Path, stages: int, works: Sequence[Work]) -> EngineConfig:
    longest = max(work.prompt_len + work.output_len for work in works)
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", max_model_len=longest),
        parallel=ParallelConfig(pipeline_parallel_size=stages, cpu_threads=1, device="cpu"),
        cache=CacheConfig(num_gpu_blocks_override=256),
    )


def compare(
    work: Work, stages: int, alone: Sequence[Sequence[Span]], rounds: Sequence[Sequence[Span]]
) -> tuple[Result, Sequence[Span]]:
    spans = min(rounds, key=lambda spans: bubble_of(spans, stages)[0])
    seconds, bubble = bubble_of(spans, stages)
    floor = min(bubble_of(each, 1)[0] for each in alone) / stages
    first = min(span.step for span in spans)
    count = max(span.step for span in spans) - first + 1
    if work.output_len == 1:
        at_best = (stages - 1) / (count + stages - 1)
    else:
        at_best = 1 - min(work.prompts, stages) / stages
    return Result(work.what, stages, count, seconds, floor, bubble, at_best), spans


def draw(spans: Sequence[Span], stages: int, path: Path) -> None:
    """Draws a row per stage, with a bar per micro-batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 0.5 * stages))
    axes = figure.subplots()
    origin, first = min(span.start for span in spans), min(span.step for span in spans)
    for span in spans:
        number = span.step - first + 1
        left, width = (span.start - origin) * 1e3, (span.end - span.start) * 1e3
        axes.barh(span.rank, width, left=left, color=f"C{number % 10}", edgecolor="white")
        axes.text(left + width / 2, span.rank, str(number), ha="center", va="center", size=8)
    axes.set(xlabel="ms", yticks=range(stages), yticklabels=[f"stage {i}" for i in range(stages)])
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def show(results: Sequence[Result]) -> None:
    table = Table("", "stages", "steps", "ms", "of the floor", "bubble", "at best")
    for each in results:
        table.add_row(
            *(each.what, str(each.stages), str(each.micro_batches), f"{each.seconds * 1e3:.0f}"),
            *(f"× {each.seconds / each.floor_s:.2f}", f"{each.bubble:.0%}", f"{each.at_best:.0%}"),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--pp", type=int, default=2, help="stages")
    parser.add_argument("--chunks", default="2,4,8", help="micro-batches, separated by commas")
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--gantt", metavar="FILE", help="draw the last prompt there")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    model = Path(args.model) if args.model else ensure_embedded_model()
    works = [
        Work(f"prompt of {args.prompt_len}", 1, args.prompt_len, -(-args.prompt_len // chunks), 1)
        for chunks in map(int, args.chunks.split(","))
    ]
    prompts = len(works)
    works += [
        Work(f"{count} decoding", count, 16, max(64, count), 24)
        for count in (1, args.pp, 4 * args.pp)
    ]
    alone = asyncio.run(measure(model, 1, works))
    staged = asyncio.run(measure(model, args.pp, works))
    compared = [
        compare(work, args.pp, *rounds) for work, *rounds in zip(works, alone, staged, strict=True)
    ]
    results = [result for result, _ in compared]
    if args.gantt:
        draw(compared[prompts - 1][1], args.pp, Path(args.gantt))
    show(results)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(each) for each in results], indent=2))


if __name__ == "__main__":
    main()
