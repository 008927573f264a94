"""Models with a recurrent state: an engine and its ranks say what transformers says, with chunks,
cached prefixes, preemptions and stages, and a sequence holds few states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.common.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.common.config.speculation import SpeculationOptions
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.kv_groups import STATES_HELD
from pdserve.common.node.model_facts import ModelFacts
from thinned import only, slow
from tiny_engine import some_tokens
from whole_engine import BLOCK_SIZE, CHUNK, PROMPTS, expected, running
from windowed import STATES, make_windowed

ROOMY: dict[str, Any] = {
    "cache": CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=960),  # and 60 states
    "scheduler": SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=CHUNK),
}

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module", params=only(STATES, ["qwen3-next"]))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windowed(request.param, tmp_path_factory.mktemp(request.param))


async def test_tokens_equal_transformers(folder: Path) -> None:
    """Alone in chunks, together, from the cache, and as the next turn of a talk, which goes on at
    the last full block of the answer before."""
    async with running(folder, **ROOMY) as it:
        answers = [await it.generate(prompt) for prompt in PROMPTS]
        assert answers == [expected(folder, [prompt]) for prompt in PROMPTS]
        assert it.most_held[1] <= STATES_HELD
        hits = it.scheduler.cache_hits
        assert await it.generate(*PROMPTS) == expected(folder, PROMPTS)
        assert it.scheduler.cache_hits - hits == sum((len(each) - 1) // 16 * 16 for each in PROMPTS)
        turns = [
            (*prompt, *said[0], *some_tokens(20, seed=5))
            for prompt, said in zip(PROMPTS, answers, strict=True)
        ]
        hits = it.scheduler.cache_hits
        assert await it.generate(*turns) == expected(folder, turns)
        most = sum((len(prompt) + 19) // 16 * 16 for prompt in PROMPTS)
        assert it.scheduler.cache_hits - hits == most


@pytest.mark.slow
async def test_a_prefix_whose_state_is_gone_is_computed_again(folder: Path) -> None:
    """Within a prompt there are states only where chunks ended."""
    async with running(folder, **ROOMY) as it:
        await it.generate(PROMPTS[4])
        for length, cached in ((200, 192), (150, 128), (40, 0)):
            prompt = (*PROMPTS[4][:length], *some_tokens(30, seed=length))
            hits = it.scheduler.cache_hits
            assert await it.generate(prompt) == expected(folder, [prompt])
            assert it.scheduler.cache_hits - hits == cached


@pytest.mark.slow
async def test_preempted_sequences_equal_transformers(folder: Path) -> None:
    cache = CacheConfig(block_size=4, num_gpu_blocks_override=1600, enable_prefix_caching=False)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=CHUNK)
    async with running(folder, cache=cache, scheduler=scheduler) as it:
        prompts = [prompt[-130:] for prompt in PROMPTS[1:]] * 2
        pool = it.scheduler.pool.pools[0]
        taken = pool.allocate(pool.num_free - 128)
        assert await it.generate(*prompts) == expected(folder, prompts)
        assert it.scheduler.num_preemptions
        pool.free(taken)


@pytest.mark.parametrize(
    "parallel",
    [slow({"pipeline_parallel_size": 2}, id="PP"), slow({"tensor_parallel_size": 2}, id="TP")],
)
async def test_ranks_equal_transformers(folder: Path, parallel: dict[str, Any]) -> None:
    async with running(folder, parallel) as it:
        assert await it.generate(*PROMPTS) == expected(folder, PROMPTS)
        assert await it.generate(*PROMPTS[::-1]) == expected(folder, PROMPTS[::-1])


def test_options_that_need_a_state_to_go_back_are_refused(folder: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    engine = EngineConfig(
        model=ModelConfig(model=str(folder), max_model_len=64),
        speculation=SpeculationOptions(speculative_config=drafts),
    )
    with pytest.raises(ConfigError, match=r"--speculative-config: .* linear attention"):
        ModelFacts.read(engine)
