"""Measures steps of one rank with a node's own runner and cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pdserve.bench.parts import ORDER, PartTimer
from pdserve.common.config.bench import BenchStepConfig
from pdserve.common.config.compilation import CompilationConfig
from pdserve.common.config.engine import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from pdserve.common.core.host import cpu_name
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.core.step_shape import StepShape
from pdserve.common.engine.kv_pool import NO_BLOCK
from pdserve.common.engine.messages import Peaks
from pdserve.common.model.decoder import CausalLM
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
    """A step to measure."""

    name: str
    chunks: tuple[tuple[int, int], ...]  # per sequence: (tokens in the cache, tokens to compute)
    drafts: int = 0  # how many of a sequence's tokens are draft tokens to verify

    @classmethod
    def decode(cls, batch: int, context: int, drafts: int = 0) -> Cell:
        guesses = f" + {drafts} drafts" if drafts else ""
        chunks = ((context - 1, 1 + drafts),) * batch
        return cls(f"decode {batch} × {context:,}{guesses}", chunks, drafts)

    @classmethod
    def prefill(cls, tokens: int) -> Cell:
        return cls(f"prefill {tokens:,}", ((0, tokens),))

    def shape(self, windows: Iterable[int]) -> StepShape:
        """Returns the step's counts in a model with these sliding windows."""
        return StepShape.of(self.chunks, len(self.chunks) * (1 + self.drafts), windows)

    def num_blocks(self, block_size: int) -> int:
        return sum(-(-sum(chunk) // block_size) for chunk in self.chunks)

    def batch(self, block_size: int, vocab_size: int, groups: Sequence[KVGroup]) -> StepBatch:
        """Returns the step with random tokens in scattered blocks, as in a used block pool."""
        chance = random.Random(0)
        tables = [self._tables(chance, block_size, group) for group in groups]
        sequences = []
        for seq_id, (start, length) in enumerate(self.chunks):
            tokens = tuple(chance.choices(range(vocab_size), k=length))
            greedy = SamplingParams(temperature=0.0)
            certain, drafts = tokens[: length - self.drafts], tokens[length - self.drafts :]
            sequences.append(
                StepSequence(
                    seq_id, certain, start, [each[seq_id] for each in tables], greedy,
                    drafts=drafts, drafts_banned=((),) * self.drafts,
                )
            )  # fmt: skip
        return StepBatch(0, tuple(sequences))

    def _tables(
        self, chance: random.Random, block_size: int, group: KVGroup
    ) -> list[tuple[int, ...]]:
        """Returns each sequence's block table, without blocks before a window; of state blocks only
        those that a chunk reads and writes."""
        tables = []
        for start, length in self.chunks:
            first, end = group.first_block(start, block_size), -(-(start + length) // block_size)
            held = {first, end - 1, max(first, end - 2)} if group.state else range(first, end)
            tables.append([index in held for index in range(end)])
        count = sum(map(sum, tables))
        blocks = iter(chance.sample(range(count), count))
        return [tuple([next(blocks) if held else NO_BLOCK for held in each]) for each in tables]


@dataclass(slots=True)
class Samples:
    """Seconds of one cell by repetition: of the step, and by part from a second, timed step."""

    steps: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one run."""

    runner: ModelRunner
    dtype: str
    cost: StepCost | None  # of a native model
    peaks: Peaks
    cells: dict[Cell, Samples]
    of: Statistic  # how repetitions are combined

    def step(self, cell: Cell) -> float:
        """Returns the seconds of a step."""
        return self.of(self.cells[cell].steps)

    def parts(self, cell: Cell) -> dict[str, float]:
        """Returns the seconds by part, minus the clocks' own cost; the correction can give 0."""
        found = self.cells[cell].parts
        names = dict.fromkeys(name for each in found for name in each)
        return {name: max(0.0, self.of(each.get(name, 0.0) for each in found)) for name in names}

    def floor(self, cost: Cost) -> float:
        """Returns the least seconds that this machine needs for `cost`."""
        return max(cost.flops / self.peaks.flops, cost.bytes / self.peaks.bandwidth)

    def bound(self, cost: Cost) -> str:
        computes = cost.flops / self.peaks.flops > cost.bytes / self.peaks.bandwidth
        return "compute" if computes else "memory"


def measure(
    config: BenchStepConfig,
    cells: Sequence[Cell],
    runner: ModelRunner,
    say: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Runs each cell `repetitions` times, in turns, with and without part timers (a model of
    transformers without), and measures the machine's peaks in between. All ranks call this
    together; each measures itself. Calls `say` with what begins."""
    clock = time.thread_time if config.clock == "cpu" else device_clock(runner.device)
    vocab, block_size = runner.model.spec.vocab_size, config.block_size
    groups = runner.model.spec.kv_groups
    batches = {cell: cell.batch(block_size, vocab, groups) for cell in cells}
    model = runner.model
    meter = PeakMeter(runner.device, model.dtype, model.weights_bytes, model.kernels, clock)
    timer = PartTimer(model, clock) if isinstance(model, CausalLM) else None
    samples: dict[Cell, Samples] = {cell: Samples() for cell in cells}
    peaks: list[Peaks] = []
    for cell, batch in batches.items():
        say(f"warming up {cell.name}")
        runner.run(batch)
    for number in range(config.repetitions):
        # Said before the peaks: printing beside a step would slow it down.
        say(f"repetition {number + 1} of {config.repetitions}: the machine's peaks and all steps")
        peaks.append(meter.measure())
        for cell, batch in batches.items():
            samples[cell].steps.append(_seconds(runner, batch, clock))
            if timer is not None:
                samples[cell].parts.append(_parts(runner, batch, timer))
    dtype = dtype_name(model.dtype)
    footprint = Footprint(
        model.spec, dtype, config.tensor_parallel_size, kv_cache_dtype=config.kv_cache_dtype
    )
    cost = None if timer is None else StepCost.whole(footprint)
    median = config.statistic == "median"
    of, best = (statistics.median,) * 2 if median else (min, max)
    return Measured(runner, dtype, cost, _peaks(peaks, best), samples, of)


def engine_config(config: BenchStepConfig, cells: Iterable[Cell]) -> EngineConfig:
    """Returns the options of a node with as many blocks as the largest cell needs."""
    longest = max(sum(chunk) for cell in cells for chunk in cell.chunks)
    blocks = max(cell.num_blocks(config.block_size) for cell in cells)
    rows = max(len(cell.chunks) for cell in cells)  # a graph is captured for as many
    tokens = max(sum(length for _, length in cell.chunks) for cell in cells)
    return EngineConfig(
        model=replace(resolve_model(config.model), max_model_len=longest),
        parallel=ParallelConfig(
            tensor_parallel_size=config.tensor_parallel_size,
            cpu_threads=config.threads,
            cpu_kernels=config.cpu_kernels,
            device=config.device,
        ),
        cache=CacheConfig(
            block_size=config.block_size,
            num_gpu_blocks_override=blocks,
            kv_cache_dtype=config.kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=tokens),
        compilation=CompilationConfig(enforce_eager=config.enforce_eager),
    )


def _seconds(runner: ModelRunner, batch: StepBatch, clock: Clock) -> float:
    started = clock()
    runner.run(batch)
    return clock() - started


def _parts(runner: ModelRunner, batch: StepBatch, timer: PartTimer) -> dict[str, float]:
    timer.seconds.clear()
    graphs, runner.graphs = runner.graphs, None  # a CUDA graph calls no functions to time
    with timer.installed():
        runner.run(batch)
    runner.graphs = graphs
    return dict(timer.seconds)


def _peaks(peaks: Sequence[Peaks], of: Statistic) -> Peaks:
    return Peaks(of(each.flops for each in peaks), of(each.bandwidth for each in peaks))


# ---- JSON ----


def as_json(config: BenchStepConfig, found: Measured) -> dict[str, Any]:
    """Returns the measurements as JSON data; times are in milliseconds."""
    return {
        "model": config.model.model or "the embedded model",
        "dtype": found.dtype,
        "quantization": config.model.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "tensor_parallel_size": config.tensor_parallel_size,
        "threads": torch.get_num_threads(),
        "clock": config.clock,
        "statistic": config.statistic,
        "repetitions": config.repetitions,
        "device": found.runner.device.type,
        "cpu": cpu_name(),
        "gpu": _gpu_name(found.runner.device),
        "graphs": found.runner.graphs.sizes if found.runner.graphs else [],
        "torch": torch.__version__,
        "peak_gflops": found.peaks.flops / 1e9,
        "read_gb_per_s": found.peaks.bandwidth / 1e9,
        "cells": {cell.name: _cell(found, cell) for cell in found.cells},
    }


def _gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _cell(found: Measured, cell: Cell) -> dict[str, Any]:
    windows = [each.window for each in found.runner.model.spec.kv_groups if each.window]
    shape, step, seconds = cell.shape(windows), found.step(cell), found.parts(cell)
    if found.cost is None:
        samples = _ms(found.cells[cell].steps)
        return {"step": {**_row(found, step, None), "samples_ms": samples}, "parts": {}}
    costs = found.cost.parts(shape)
    names = sorted(seconds, key=ORDER.index)
    parts = {name: _row(found, seconds[name], costs.get(name)) for name in names}
    total = found.cost.total(shape)
    return {
        "step": {**_row(found, step, total), "samples_ms": _ms(found.cells[cell].steps)},
        "mfu": total.flops / step / found.peaks.flops,
        "bandwidth_utilisation": total.bytes / step / found.peaks.bandwidth,
        "parts": parts,
    }


def _row(found: Measured, seconds: float, cost: Cost | None) -> dict[str, Any]:
    row: dict[str, Any] = {"ms": 1e3 * seconds}
    if cost is not None:
        floor = found.floor(cost)
        row |= {"floor_ms": 1e3 * floor, "ratio": seconds / floor, "bound_by": found.bound(cost)}
        row |= {"flops": cost.flops, "bytes": cost.bytes}
    return row


def _ms(seconds: Sequence[float]) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]
