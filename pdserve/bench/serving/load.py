"""Sends the requests at the right time: open loop by a schedule, closed loop by free places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from pdserve.bench.serving.client import Client, Record
from pdserve.bench.serving.datasets import Prompt


async def run_load(
    client: Client,
    prompts: Sequence[Prompt],
    offsets: Sequence[float] | None,
    max_concurrency: int | None,
    on_done: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Sends every prompt and returns their records, in order.

    Open loop: prompt i is due at `offsets[i]` seconds whether or not earlier ones are
    answered. With `max_concurrency` it may have to wait for a place; its arrival stays the
    time it was due, so that the wait counts in its latency.
    Closed loop (`offsets` is None): a request arrives when a place is free.
    """
    place: AbstractAsyncContextManager[object] = nullcontext()
    if max_concurrency is not None:
        place = asyncio.Semaphore(max_concurrency)

    async def one(prompt: Prompt, arrival: float | None) -> Record:
        async with place:
            record = await client.send(prompt, arrival)
        on_done()
        return record

    async with asyncio.TaskGroup() as group:
        if offsets is None:
            tasks = [group.create_task(one(prompt, None)) for prompt in prompts]
        else:
            tasks = []
            start = time.perf_counter()
            for prompt, offset in zip(prompts, offsets, strict=True):
                await _sleep_until(start + offset)
                tasks.append(group.create_task(one(prompt, start + offset)))
    return [task.result() for task in tasks]


async def _sleep_until(when: float) -> None:
    delay = when - time.perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)
