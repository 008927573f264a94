"""Ranks that continue with tokens their node does not know yet draw the same, to the last bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paths import MODELS
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.core.sampling import SampledToken, SamplingParams
from pdserve.common.worker import token_feed
from thinned import slow
from tiny_engine import some_tokens
from whole_engine import running

pytestmark = pytest.mark.usefixtures("forked_ranks")

VOCAB = 512
LONG: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "logprobs": 3}
PARAMS: list[dict[str, Any]] = [
    {**LONG, "temperature": 0.0},
    {**LONG, "temperature": 1.5, "top_p": 0.9},
    {**LONG, "temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {**LONG, "temperature": 0.0, "presence_penalty": 2.0, "max_tokens": 12},
    {**LONG, "temperature": 2.0, "stop_token_ids": tuple(range(0, VOCAB, 9)), "min_tokens": 5},
    {**LONG, "temperature": 2.0, "stop_token_ids": tuple(range(0, VOCAB, 5))},
    {**LONG, "temperature": 1.5, "bad_words_token_ids": ((3,), (5, 7)), "max_tokens": 4},
    {**LONG, "temperature": 1.5, "max_tokens": 1},
]
PROMPTS = [tuple(some_tokens(5 + 11 * i, seed=i)) for i in range(len(PARAMS))]


async def drawn(size: int, ahead: bool) -> list[list[SampledToken]]:
    """Each alone, then all at once."""
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=ahead)
    parallel = {"tensor_parallel_size": size}
    async with running(MODELS / "llama-gqa", parallel, scheduler=scheduler) as it:

        async def sample(number: int) -> list[SampledToken]:
            params = SamplingParams(seed=number, **PARAMS[number])
            return await it.sample(PROMPTS[number], params)

        alone = [await sample(number) for number in range(len(PARAMS))]
        return alone + await asyncio.gather(*map(sample, range(len(PARAMS))))


@pytest.mark.parametrize("size", [1, slow(2)])
async def test_tokens_and_log_probabilities_are_those_of_steps_one_by_one(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await drawn(size, ahead=False)
    filled: list[int] = []
    fill = token_feed.TokenFeed.fill
    monkeypatch.setattr(
        token_feed.TokenFeed,
        "fill",
        lambda feed, ids, drawn: filled.append(len(drawn)) or fill(feed, ids, drawn),
    )
    assert await drawn(size, ahead=True) == expected
    assert size > 1 or (max(filled) > 4 and len(filled) > 100)
    assert len({len(each) for each in expected}) > 3, "some were stopped"
