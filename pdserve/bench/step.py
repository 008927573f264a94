"""Steps of a rank as a node runs them: its worker, its runner, its cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.bench.parts import PartTimer
from pdserve.common.config.bench import BenchStepConfig
from pdserve.common.config.compilation import CompilationConfig
from pdserve.common.config.node import CacheConfig, EngineConfig, ParallelConfig
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.core.step_shape import StepShape
from pdserve.common.engine.messages import Peaks
from pdserve.common.model.device import dtype_name
from pdserve.common.planning.footprint import Footprint
from pdserve.common.planning.step_cost import Cost, StepCost
from pdserve.common.worker.input_batch import StepBatch, StepSequence
from pdserve.common.worker.peaks import Clock, PeakMeter, device_clock
from pdserve.common.worker.runner import ModelRunner
from pdserve.demo_model.embedded import resolve_model

Statistic = Callable[[Iterable[float]], float]


@dataclass(frozen=True, slots=True)
class Cell:
    """A step to measure: for each sequence the tokens in the cache and those computed now."""

    name: str
    chunks: tuple[tuple[int, int], ...]
    drafts: int = 0  # of the tokens that each computes, guesses to be verified

    @classmethod
    def decode(cls, batch: int, context: int, drafts: int = 0) -> Cell:
        guesses = f" + {drafts} drafts" if drafts else ""
        chunks = ((context - 1, 1 + drafts),) * batch
        return cls(f"decode {batch} × {context:,}{guesses}", chunks, drafts)

    @classmethod
    def prefill(cls, tokens: int) -> Cell:
        return cls(f"prefill {tokens:,}", ((0, tokens),))

    @property
    def shape(self) -> StepShape:
        return StepShape.of(self.chunks, sampled=len(self.chunks) * (1 + self.drafts))

    def num_blocks(self, block_size: int) -> int:
        return sum(-(-sum(chunk) // block_size) for chunk in self.chunks)

    def batch(self, block_size: int, vocab_size: int) -> StepBatch:
        """Random tokens in scattered blocks, as in a pool that has been in use."""
        chance = random.Random(0)
        blocks = chance.sample(range(count := self.num_blocks(block_size)), count)
        sequences = []
        for seq_id, (start, length) in enumerate(self.chunks):
            table = tuple(blocks.pop() for _ in range(-(-(start + length) // block_size)))
            tokens = tuple(chance.choices(range(vocab_size), k=length))
            greedy = SamplingParams(temperature=0.0)
            certain, drafts = tokens[: length - self.drafts], tokens[length - self.drafts :]
            sequences.append(
                StepSequence(
                    seq_id, certain, start, table, greedy,
                    drafts=drafts, drafts_banned=((),) * self.drafts,
                )
            )  # fmt: skip
        return StepBatch(0, tuple(sequences))


@dataclass(slots=True)
class Samples:
    """Seconds of one cell, by repetition: of the step as it is, and of its parts in another one
    that has clocks in it."""

    steps: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Measured:
    """All of one run."""

    runner: ModelRunner
    dtype: str
    cost: StepCost
    peaks: Peaks
    cells: dict[Cell, Samples]
    of: Statistic  # which of the repetitions counts

    def step(self, cell: Cell) -> float:
        """Seconds."""
        return self.of(self.cells[cell].steps)

    def parts(self, cell: Cell) -> dict[str, float]:
        """Seconds by part; what the clocks themselves cost is taken off, which may be too much."""
        found = self.cells[cell].parts
        names = dict.fromkeys(name for each in found for name in each)
        return {name: max(0.0, self.of(each.get(name, 0.0) for each in found)) for name in names}

    def floor(self, cost: Cost) -> float:
        """Seconds that no program on this machine can go below."""
        return max(cost.flops / self.peaks.flops, cost.bytes / self.peaks.bandwidth)

    def bound(self, cost: Cost) -> str:
        computes = cost.flops / self.peaks.flops > cost.bytes / self.peaks.bandwidth
        return "compute" if computes else "memory"


def measure(config: BenchStepConfig, cells: Sequence[Cell], runner: ModelRunner) -> Measured:
    """Runs each cell `repetitions` times in turns, without and with clocks in it, and between
    them measures the machine. All ranks do so together, and each of them for itself."""
    clock = time.thread_time if config.clock == "cpu" else device_clock(runner.device)
    vocab, block_size = runner.model.spec.vocab_size, config.block_size
    batches = {cell: cell.batch(block_size, vocab) for cell in cells}
    meter = PeakMeter(runner.device, runner.model.dtype, runner.model.weights_bytes, clock)
    timer = PartTimer(runner.model, clock)
    samples: dict[Cell, Samples] = {cell: Samples() for cell in cells}
    peaks: list[Peaks] = []
    for batch in batches.values():
        runner.run(batch)
    for _ in range(config.repetitions):
        peaks.append(meter.measure())
        for cell, batch in batches.items():
            samples[cell].steps.append(_seconds(runner, batch, clock))
            samples[cell].parts.append(_parts(runner, batch, timer))
    dtype = dtype_name(runner.model.dtype)
    cost = StepCost.whole(Footprint(runner.model.spec, dtype, config.tensor_parallel_size))
    median = config.statistic == "median"
    of, best = (statistics.median,) * 2 if median else (min, max)
    return Measured(runner, dtype, cost, _peaks(peaks, best), samples, of)


def engine_config(config: BenchStepConfig, cells: Iterable[Cell]) -> EngineConfig:
    """Of a node with as many blocks as the largest cell needs."""
    longest = max(sum(chunk) for cell in cells for chunk in cell.chunks)
    blocks = max(cell.num_blocks(config.block_size) for cell in cells)
    return EngineConfig(
        model=replace(resolve_model(config.model), max_model_len=longest),
        parallel=ParallelConfig(
            tensor_parallel_size=config.tensor_parallel_size,
            cpu_threads=config.threads,
            cpu_kernels=config.cpu_kernels,
            device=config.device,
        ),
        cache=CacheConfig(block_size=config.block_size, num_gpu_blocks_override=blocks),
        compilation=CompilationConfig(compile=config.compile),
    )


def _seconds(runner: ModelRunner, batch: StepBatch, clock: Clock) -> float:
    started = clock()
    runner.run(batch)
    return clock() - started


def _parts(runner: ModelRunner, batch: StepBatch, timer: PartTimer) -> dict[str, float]:
    timer.seconds.clear()
    graphs, runner.graphs = runner.graphs, None  # a graph's parts have no functions
    with timer.installed():
        runner.run(batch)
    runner.graphs = graphs
    return dict(timer.seconds)


def _peaks(peaks: Sequence[Peaks], of: Statistic) -> Peaks:
    return Peaks(of(each.flops for each in peaks), of(each.bandwidth for each in peaks))
