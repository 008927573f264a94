"""Sends requests by a schedule (open loop) or whenever an earlier one ends (closed loop)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import groupby

import numpy as np

from pdserve.bench.serving.client import Client, Record
from pdserve.bench.serving.datasets import Prompt


def gamma_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Returns arrival times in seconds, the first at 0: `rate` per second, gamma-distributed gaps.

    `burstiness` is the shape of the gamma distribution: 1 is a Poisson process, less is
    burstier, more is more even. An infinite rate puts every arrival at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[:1] = 0.0
    return [float(offset) for offset in np.cumsum(gaps)]


def trace_arrivals(timestamps: Sequence[float], speedup: float) -> list[float]:
    """Returns the arrival times of a trace (seconds, ascending), `speedup` times as fast.

    Published traces round their timestamps (Mooncake's to about 3 s), which would replay as
    artificial bursts. So requests with equal timestamps are spread evenly over the time to the
    next timestamp; the last group keeps its own.
    """
    groups = [(stamp, len(list(group))) for stamp, group in groupby(timestamps)]
    following = [stamp for stamp, _ in groups[1:]] + [groups[-1][0]]
    spread = [
        stamp + (after - stamp) * i / size
        for (stamp, size), after in zip(groups, following, strict=True)
        for i in range(size)
    ]
    return [(stamp - spread[0]) / speedup for stamp in spread]


async def run_load(
    client: Client,
    prompts: Sequence[Prompt],
    offsets: Sequence[float] | None,
    max_concurrency: int | None,
    on_done: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Sends every prompt and returns their records, in order.

    Open loop: prompt i is due at `offsets[i]` seconds whether or not earlier ones are answered.
    If `max_concurrency` delays it, its arrival stays the time it was due, so that the wait counts
    in its latency. Closed loop (`offsets` is None): a request arrives when it is sent.
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
