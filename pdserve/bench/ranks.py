"""Runs `pdserve bench step` on a node's ranks: a worker whose step is the whole measurement."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from pdserve.bench.step import Cell, as_json, engine_config, measure
from pdserve.common.config.bench import BenchStepConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.distributed.executor import Emit, WorkerSpec
from pdserve.common.distributed.launch import make_executor
from pdserve.common.model.device import device_type
from pdserve.common.worker.worker import ModelWorker, WorkerConfig, build_worker, worker_specs

SHUTDOWN = 5.0  # seconds
USUAL_BYTE = 60  # four such bytes are a float32 scale of about 0.01

_steps = msgspec.msgpack.Decoder(tuple[BenchStepConfig, tuple[Cell, ...]])


async def measure_on_ranks(
    config: BenchStepConfig, cells: Sequence[Cell], say: Callable[[str], None]
) -> dict[str, Any]:
    """Returns `as_json` of rank 0's measurement. Calls `say` with what begins.

    Raises:
        ConfigError: the model cannot be loaded or split, or its context is too short.
        NodeError: a rank died.
    """
    name = config.model.model or "the embedded model"
    say(f"reading {name}")
    engine = await asyncio.to_thread(engine_config, config, cells)
    factory = f"{__name__}:build_bench_worker"
    specs = worker_specs(WorkerConfig(engine), log=LogConfig(log_level="warning"))
    specs = [replace(spec, factory=factory) for spec in specs]
    executor = make_executor(specs, engine.parallel, device_type(config.device))
    executor.on_event(lambda rank, event: None if rank else say(event.decode()))
    try:
        say(f"loading {name}, number of ranks: {len(specs)}; compiling kernels that are not cached")
        await executor.start()
        found: dict[str, Any] = json.loads(
            await executor.step(msgspec.msgpack.encode((config, cells)))
        )
        return found
    finally:
        await executor.shutdown(SHUTDOWN)


class BenchWorker:
    """A `pdserve.common.distributed.executor.Worker`."""

    extension = None

    def __init__(self, worker: ModelWorker, emit: Emit) -> None:
        self._worker = worker
        self._emit = emit
        self.ready = worker.ready
        self.close = worker.close
        for cache in worker.runner.caches:  # the first write maps the pages
            if cache.dtype == torch.uint8:
                cache.fill_(USUAL_BYTE)
            else:
                cache.normal_()

    def step(self, message: bytes) -> bytes:
        config, cells = _steps.decode(message)
        found = measure(config, cells, self._worker.runner, lambda text: self._emit(text.encode()))
        return json.dumps(as_json(config, found)).encode()


def build_bench_worker(spec: WorkerSpec, emit: Emit) -> BenchWorker:
    return BenchWorker(build_worker(spec, emit), emit)
