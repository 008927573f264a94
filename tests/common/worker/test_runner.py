"""A rank's worker end to end on a small trained model: greedy output equals transformers', for
any chunking and any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from echo_worker import MODEL, config
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.distributed.launch import make_executor
from pdserve.common.engine.messages import RankReady, SequenceDelta
from pdserve.common.worker.worker import worker_specs
from whole_steps import Steps, whole

GREEDY = SamplingParams(temperature=0.0)
PROMPT = (5, 17, 33, 60, 12, 9, 41)
NUM_TOKENS = 12


pytestmark = pytest.mark.usefixtures("forked_ranks")


async def step(steps: Steps, *sequences: SequenceDelta) -> dict[int, int]:
    drawn = await steps.drawn(*sequences)
    return {seq_id: token.token_id for seq_id, token in drawn.items()}


async def generate(steps: Steps, chunks: Sequence[tuple[int, ...]]) -> list[int]:
    """Greedy tokens after the chunks' tokens, in scattered blocks."""
    table = (9, 2, 14, 5, 7)
    start, tokens = 0, []
    for i, chunk in enumerate(chunks):
        last = i == len(chunks) - 1
        drawn = await step(steps, whole(1, chunk, start, table, GREEDY if last else None))
        assert (1 in drawn) == last
        start += len(chunk)
    tokens.append(drawn[1])
    while len(tokens) < NUM_TOKENS:
        drawn = await step(steps, whole(1, (tokens[-1],), start, table, GREEDY))
        tokens.append(drawn[1])
        start += 1
    return tokens


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What transformers generates."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    output = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("size", [1, 2])
async def test_greedy_equals_transformers(size: int, expected: list[int]) -> None:
    executor = make_executor(worker_specs(config(size)))
    try:
        ready = [msgspec.msgpack.decode(r, type=RankReady) for r in await executor.start()]
        assert [r.cache.num_blocks for r in ready] == [16] * size
        assert [(r.cache.head_start, r.cache.head_end) for r in ready] == (
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
    """As on two hosts whose folders differ."""
    first, second = worker_specs(config(2))
    second.config["engine"]["model"]["max_model_len"] = 32
    executor = make_executor([first, second])
    with pytest.raises(NodeError, match=r"disagree on dtype and context window: .*48.*32"):
        await executor.start()
