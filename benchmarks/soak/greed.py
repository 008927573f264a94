"""Clients with a key that want all there is: slots, KV blocks, the router's time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Any

from benchmarks.soak.asks import POISON
from benchmarks.soak.attack import UNEXPLAINED, Attack, Hostile, Wait
from benchmarks.soak.hostile import TEXT, http, named

LONGEST_GREED = 10.0  # seconds
GREEDY, CHOICES = 40, 4  # requests at a time, and choices of each
HOGS, HOG_PROMPTS, HOG_TOKENS = 2, 100, 320  # bodies, prompts of each, tokens of each answer
REFUSED, REFUSED_PROMPTS = 20, 1000  # connections, and prompts of a body: 8 KB


async def greedy(attack: Attack) -> None:
    """Keeps forty requests of four choices in flight; the requests of other clients must not wait
    for them."""
    body = {"prompt": [7] * 40, "max_tokens": 48, "n": CHOICES, "ignore_eos": True}
    await _keep(attack, GREEDY, body)


async def hog(attack: Attack) -> None:
    """Keeps two bodies of a hundred long answers in flight, which need more KV blocks than the
    nodes have; short answers of other clients must not wait for them."""
    prompts = [[7 + number, 8, 9] for number in range(HOG_PROMPTS)]
    body = {"prompt": prompts, "max_tokens": HOG_TOKENS, "ignore_eos": True}
    await _keep(attack, HOGS, {**body, "logit_bias": {str(POISON): -100}})


async def refused(attack: Attack) -> None:
    """Sends bodies of a thousand prompts over twenty connections, again and again, while the
    client's queue is full."""
    body = {"prompt": [[7]] * REFUSED_PROMPTS, "max_tokens": 1}
    await _keep(attack, REFUSED, body)


async def _keep(attack: Attack, count: int, body: Mapping[str, Any]) -> None:
    """Keeps `count` such requests in flight, and hangs up at the end."""
    end = monotonic() + attack.seconds
    async with http(attack.fleet) as session:

        async def ask_on(wait: Wait) -> str:
            status = 0
            try:
                async with asyncio.timeout(max(0.0, end - monotonic())):
                    while True:
                        wait.another()
                        async with session.post(TEXT, json=body, headers=named(wait)) as response:
                            await response.read()
                            status = response.status
            except TimeoutError:
                return UNEXPLAINED if status == 500 else "answered or refused"

        await asyncio.gather(*(attack.ask("client", ask_on) for _ in range(count)))


def _greed(attack: Any) -> Hostile:
    return Hostile(attack, longest=LONGEST_GREED, weight=0.5, crowds=True, greedy=True)


GREED_ATTACKS = {"greedy": _greed(greedy), "hog": _greed(hog), "refused": _greed(refused)}
