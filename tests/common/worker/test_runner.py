"""Ranks' workers end to end on a small trained model, which test_model.py compares with
transformers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from echo_worker import MODEL, config
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.distributed.launch import make_executor
from pdserve.common.engine.messages import RankReady
from pdserve.common.worker.worker import worker_specs
from tiny_engine import greedy, load, single_threaded_inference
from whole_steps import Steps, whole

GREEDY = SamplingParams(temperature=0.0)
PROMPT = (5, 17, 33, 60, 12, 9, 41)
NUM_TOKENS = 12


pytestmark = pytest.mark.usefixtures("forked_ranks")


async def generate(steps: Steps, chunks: Sequence[tuple[int, ...]]) -> list[int]:
    """Greedy tokens after the chunks' tokens, in scattered blocks."""
    table, start, tokens = (9, 2, 14, 5, 7), 0, []
    while len(tokens) < NUM_TOKENS:
        chunk = chunks[0] if chunks else (tokens[-1],)
        chunks = chunks[1:]
        drawn = await steps.drawn(whole(1, chunk, start, table, None if chunks else GREEDY))
        assert (1 in drawn) is not bool(chunks)
        start += len(chunk)
        tokens += [token.token_id for token in drawn.values()]
    return tokens


@pytest.mark.parametrize("size", [1, 2])
async def test_ranks_draw_what_a_model_alone_says_for_any_chunking(size: int) -> None:
    with single_threaded_inference():
        expected = greedy(load(MODEL), list(PROMPT), NUM_TOKENS, [0, 1])
    executor = make_executor(worker_specs(config(size)))
    try:
        ready = [msgspec.msgpack.decode(r, type=RankReady) for r in await executor.start()]
        assert [r.caches[0].num_blocks for r in ready] == [16] * size
        assert [(r.caches[0].head_start, r.caches[0].head_end) for r in ready] == (
            [(0, 2)] if size == 1 else [(0, 1), (1, 2)]
        )
        assert [r.extension_info for r in ready] == [b"%d \x00\xff" % r for r in range(size)]
        steps = Steps(executor)
        assert await generate(steps, [PROMPT]) == expected
        assert await generate(steps, [PROMPT[:3], PROMPT[3:4], PROMPT[4:]]) == expected
        assert await executor.call(size - 1, b"14") == b"used"
        assert await executor.call(size - 1, b"11") == b"unused"
    finally:
        await executor.shutdown(5.0)


@pytest.mark.parametrize("size", [1, 2])
async def test_too_small_a_cache_is_a_config_error(size: int) -> None:
    executor = make_executor(worker_specs(config(size, num_gpu_blocks_override=11)))
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override to 12"):
        await executor.start()
    await executor.shutdown(1.0)


async def test_ranks_that_would_serve_other_models_are_named() -> None:
    """So it is on two hosts whose folders differ."""
    first, second = worker_specs(config(2))
    second.config["engine"]["model"]["max_model_len"] = 32
    executor = make_executor([first, second])
    with pytest.raises(NodeError, match=r"disagree on dtype and context window: .*48.*32"):
        await executor.start()
