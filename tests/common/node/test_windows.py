"""Sliding windows over the full context: an engine and its ranks say what transformers says, with
chunks, cached prefixes, preemptions, drafts and stages, and hold no more than they need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reference
from pdserve.common.config.node import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.common.config.shared import LogConfig
from pdserve.common.config.speculation import SpeculationOptions
from pdserve.common.core.request import Choice, GenerateJob
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.engine.core import EngineCore
from pdserve.common.engine.kv_pool import NO_BLOCK
from pdserve.common.engine.messages import ExpertLoad
from pdserve.common.engine.sequence import Finish
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.node.model_facts import ModelFacts
from pdserve.common.node.ranks import Ranks, stop_ranks
from thinned import only
from tiny_engine import some_tokens
from windowed import CONFIGS, make_windowed

NUM_TOKENS, BLOCK_SIZE, CHUNK = 20, 16, 64
PROMPTS = [tuple(some_tokens(length, seed=length)) for length in (30, 90, 150, 220, 300)]

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module", params=only(CONFIGS, ["mistral", "qwen3"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windowed(request.param, tmp_path_factory.mktemp(request.param))


class Running:
    """An engine, as its own listener."""

    def __init__(self, ranks: Ranks) -> None:
        self.scheduler = ranks.scheduler
        self.engine = EngineCore(ranks.executor, ranks.scheduler, self, max_model_len=1024)
        self.most_held = [0] * len(self.scheduler.pool.pools)
        self._ended: dict[int, asyncio.Future[list[int]]] = {}
        self._tokens: dict[int, list[int]] = {}

    async def generate(self, *prompts: tuple[int, ...]) -> list[list[int]]:
        ended = []
        for prompt in prompts:
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
            sequence = self.engine.new_sequence(GenerateJob("r", prompt, sampling), Choice())
            future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
            self._ended[sequence.seq_id], self._tokens[sequence.seq_id] = future, []
            self.engine.add(sequence)
            ended.append(future)
        return await asyncio.gather(*ended)

    def admitted(self, sequence: EngineSequence) -> None: ...

    def computed(self, sequence: EngineSequence) -> None:
        for i, table in enumerate(sequence.block_tables):
            held = len(table) - table.count(NO_BLOCK)
            self.most_held[i] = max(self.most_held[i], held)

    def sampled(
        self, sequence: EngineSequence, tokens: tuple[SampledToken, ...], finish: Finish | None
    ) -> None:
        self._tokens[sequence.seq_id] += [each.token_id for each in tokens]
        if finish is not None:
            self.engine.release(sequence)
            self._ended[sequence.seq_id].set_result(self._tokens[sequence.seq_id])

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


async def test_tokens_equal_transformers_beyond_the_window(folder: Path) -> None:
    """Alone in chunks, together, and from the cache: of a prefix that many blocks follow the
    windows' blocks are gone with the time, and then it counts as not cached."""
    async with running(folder) as it:
        for prompt in PROMPTS:
            assert await it.generate(prompt) == expected(folder, [prompt])
        for group, most in zip(it.scheduler.pool.groups, it.most_held, strict=True):
            window = group.window or 10**6
            assert most <= (min(window + CHUNK, 320) + BLOCK_SIZE - 1) // BLOCK_SIZE + 1
        hits = it.scheduler.cache_hits
        assert await it.generate(*PROMPTS) == expected(folder, PROMPTS)
        assert it.scheduler.cache_hits > hits + 300
        longer = [(*prompt, *some_tokens(70, seed=5)) for prompt in PROMPTS]
        hits = it.scheduler.cache_hits
        assert await it.generate(*longer) == expected(folder, longer)
        assert it.scheduler.cache_hits > hits + 100


async def test_preempted_sequences_equal_transformers(folder: Path) -> None:
    cache = CacheConfig(block_size=4, num_gpu_blocks_override=257, enable_prefix_caching=False)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=CHUNK)
    async with running(folder, cache=cache, scheduler=scheduler) as it:
        prompts = [prompt[-130:] for prompt in PROMPTS[1:]] * 2
        pools = it.scheduler.pool.pools
        taken = [(pool, pool.allocate(max(0, pool.num_free - 128))) for pool in pools]
        assert await it.generate(*prompts) == expected(folder, prompts)
        assert it.scheduler.num_preemptions or it.scheduler.pool.groups[0].window
        for pool, blocks in taken:
            pool.free(blocks)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
async def test_drafts_equal_transformers(folder: Path, method: str) -> None:
    """The draft model is the model itself, whose drafts are right if its own windows are."""
    wanted: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}
    if method == "draft_model":
        wanted = {"method": method, "model": str(folder)}
    drafts = SpeculationOptions(speculative_config={**wanted, "num_speculative_tokens": 4})
    async with running(folder, speculation=drafts) as it:
        prompts = [prompt + prompt[-40:] * 2 for prompt in PROMPTS[:4]]
        assert await it.generate(*prompts) == expected(folder, prompts)
        speculator = it.scheduler.speculator
        assert speculator is not None and speculator.num_draft_tokens
        if method == "draft_model":
            assert speculator.num_accepted_tokens > 0.9 * speculator.num_draft_tokens


@pytest.mark.parametrize(
    "parallel",
    [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}],
    ids=["PP", "TP"],
)
async def test_ranks_equal_transformers(folder: Path, parallel: dict[str, Any]) -> None:
    async with running(folder, parallel) as it:
        assert await it.generate(*PROMPTS) == expected(folder, PROMPTS)
        assert await it.generate(*PROMPTS[::-1]) == expected(folder, PROMPTS[::-1])
