"""Clients do not read: that is bounded over all of them, and the one that has most gives way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdserve.common.core.errors import Cancelled
from pdserve.common.core.request import FinishReason, Timeline
from pdserve.common.core.sampling import SampledToken, SamplingParams, TokenLogprobs
from pdserve.router.requests import generation as generation_module
from pdserve.router.requests.generation import (
    COUNTED,
    UPDATE_NBYTES,
    GenerationRequest,
    GenerationStats,
    Put,
    TextDelta,
    Updates,
    generate,
)
from pdserve.router.requests.queue_bounds import Batch
from pdserve.router.requests.unread import Unread
from waiting import eventually

TOKENS = 10 * COUNTED  # of an answer
ANSWER = TOKENS * UPDATE_NBYTES  # bytes that it takes


async def talk(request: GenerationRequest, put: Put) -> GenerationStats:
    """An answer of many tokens, some at a time."""
    for number in range(TOKENS):
        put(TextDelta(0, "x", (SampledToken(number),)))
        if not number % 8:
            await asyncio.sleep(0)
    put(TextDelta(0, ".", (), FinishReason.STOP))
    return GenerationStats(1, TOKENS, 0, Timeline())


def stream(unread: Unread, client: str) -> AsyncGenerator[Updates, None]:
    request = GenerationRequest("r", (1,), SamplingParams(), batch=Batch(client))
    return generate([request], talk, unread=unread)


async def text(updates: AsyncGenerator[Updates, None]) -> str:
    async with aclosing(updates):
        return "".join(
            [
                update.text
                async for batch in updates
                for _, update in batch
                if isinstance(update, TextDelta)
            ]
        )


async def begun(streams: list[AsyncGenerator[Updates, None]]) -> None:
    """Their first updates are taken, and no more."""
    for each in streams:
        await anext(each)


async def test_a_client_with_many_unread_streams_gives_way_and_no_other() -> None:
    unread = Unread(3 * ANSWER)
    hostile = [stream(unread, "hostile") for _ in range(20)]
    slow = stream(unread, "slow")
    await begun([slow, *hostile])
    await eventually(lambda: unread.nbytes > 2 * ANSWER)
    for _ in range(50):
        assert unread.nbytes <= 3 * ANSWER
        assert await text(stream(unread, "honest")) == "x" * TOKENS + "."
    told = await asyncio.gather(*map(text, hostile), return_exceptions=True)
    assert sum(isinstance(each, Cancelled) for each in told) >= 17
    assert {each.code for each in told if isinstance(each, Cancelled)} == {"CLIENT_TOO_SLOW"}
    assert len(await text(slow)) > TOKENS - COUNTED  # it has less than the hostile one
    assert unread.nbytes == 0


async def test_a_client_that_keeps_up_is_not_counted() -> None:
    unread = Unread(0)
    assert await text(stream(unread, "honest")) == "x" * TOKENS + "."


async def test_a_closed_stream_is_not_counted_as_unread() -> None:
    unread = Unread(9 * ANSWER)
    left = stream(unread, "leaves")
    await begun([left])
    await eventually(lambda: unread.nbytes > ANSWER / 2)
    await left.aclose()
    assert unread.nbytes == 0


@pytest.mark.parametrize("tops", [0, 20])
def test_alternatives_count(tops: int) -> None:
    logprobs = TokenLogprobs(-1.0, tuple((each, -2.0) for each in range(tops)))
    delta = TextDelta(0, "x", (SampledToken(1, logprobs),))
    assert generation_module._nbytes(delta) == UPDATE_NBYTES + tops * generation_module.TOP_NBYTES
