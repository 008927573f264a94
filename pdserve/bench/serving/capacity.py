"""Searches the highest request rate at which enough requests meet the latency limits: goodput as
DistServe defines it (arXiv:2401.09670)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MAX_RUNS = 24


@dataclass(frozen=True, slots=True)
class Step:
    """One run: requests per second, and the share of them that met the limits."""

    rate: float
    share: float


Measure = Callable[[float], Awaitable[float]]


async def find_capacity(
    measure: Measure, start: float, enough: float, precision: float
) -> tuple[float, list[Step]]:
    """Returns (the highest rate whose share was at least `enough`, all runs in order); the rate is
    0.0 if none was. Doubles or halves the rate from `start` until two rates bracket the capacity,
    then bisects until their ratio is at most `precision` (1.1: 10 %)."""
    steps: list[Step] = []

    async def meets(rate: float) -> bool:
        steps.append(Step(rate, await measure(rate)))
        return steps[-1].share >= enough

    low, high = 0.0, 0.0
    rate = start
    while not (low and high) and len(steps) < MAX_RUNS:
        if await meets(rate):
            low, rate = rate, 2 * rate
        else:
            high, rate = rate, rate / 2
    while low and high / low > precision and len(steps) < MAX_RUNS:
        middle = (low * high) ** 0.5
        if await meets(middle):
            low = middle
        else:
            high = middle
    return low, steps
