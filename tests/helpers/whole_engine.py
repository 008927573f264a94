"""Runs an engine and its ranks in a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import reference
from pdserve.common.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.core import EngineCore
from pdserve.common.engine.kv_pool import NO_BLOCK
from pdserve.common.engine.messages import ExpertLoad
from pdserve.common.engine.sequence import Finish
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.node.model_facts import ModelFacts
from pdserve.common.node.ranks import Ranks, stop_ranks
from tiny_engine import some_tokens

NUM_TOKENS, BLOCK_SIZE, CHUNK = 20, 16, 64
PROMPTS = [tuple(some_tokens(length, seed=length)) for length in (30, 90, 150, 220, 300)]


class Running:
    """A running engine with its listener."""

    def __init__(self, ranks: Ranks) -> None:
        self.scheduler = ranks.scheduler
        self.engine = EngineCore(ranks.executor, ranks.scheduler, self, max_model_len=1024)
        self.most_held = [0] * len(self.scheduler.pool.pools)
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._tokens: dict[int, list[SampledToken]] = {}

    async def generate(self, *prompts: tuple[int, ...]) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        drawn = await asyncio.gather(*(self.sample(prompt, sampling) for prompt in prompts))
        return [[token.token_id for token in each] for each in drawn]

    async def sample(self, prompt: tuple[int, ...], sampling: SamplingParams) -> list[SampledToken]:
        sequence = self.engine.new_sequence(GenerateJob("r", prompt, sampling), Choice())
        self._ended[sequence.seq_id] = ended = asyncio.get_running_loop().create_future()
        tokens: list[SampledToken] = []
        self._tokens[sequence.seq_id] = tokens
        self.engine.add(sequence)
        await ended
        return tokens

    def admitted(self, sequence: EngineSequence) -> None: ...

    def computed(self, sequence: EngineSequence) -> None:
        for i, table in enumerate(sequence.block_tables):
            held = len(table) - table.count(NO_BLOCK)
            self.most_held[i] = max(self.most_held[i], held)

    def sampled(
        self, sequence: EngineSequence, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        self._tokens[sequence.seq_id] += tokens
        if finish is not None:
            self.engine.release(sequence)
            self._ended[sequence.seq_id].set_result(None)

    def failed(self, sequence: EngineSequence, reason: str, code: str) -> None:
        self._ended[sequence.seq_id].set_exception(AssertionError(reason))

    def routed(self, load: ExpertLoad) -> None: ...


@asynccontextmanager
async def running(
    folder: Path, parallel: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Running]:
    engine = EngineConfig(
        model=ModelConfig(model=str(folder), max_model_len=1024),
        parallel=ParallelConfig(device="cpu", cpu_threads=1, **parallel or {}),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=100),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=CHUNK),
    )
    engine = replace(engine, **options)
    ranks = await Ranks.start("node", engine, ModelFacts.read(engine), None, LogConfig())
    it = Running(ranks)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(it.engine.run())
            yield it
            task.cancel()
        assert all(each.num_free == each.num_blocks for each in it.scheduler.pool.pools)
    finally:
        await stop_ranks([ranks])


def expected(folder: Path, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    return [[*reference.greedy(folder, prompt, NUM_TOKENS)] for prompt in prompts]
