"""Sliding windows over the full context: an engine and its ranks say what transformers says, with
chunks, cached prefixes, preemptions, drafts and stages, and hold no more than they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.common.config.engine import CacheConfig, SchedulerConfig
from pdserve.common.config.speculation import SpeculationOptions
from thinned import only
from tiny_engine import some_tokens
from whole_engine import BLOCK_SIZE, CHUNK, PROMPTS, expected, running
from windowed import CONFIGS, make_windowed

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module", params=only(CONFIGS, ["mistral", "qwen3"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windowed(request.param, tmp_path_factory.mktemp(request.param))


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
