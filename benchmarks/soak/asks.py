"""The requests: a seeded mix of all API features, each with a deterministic answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

WAYS = ("streamed", "whole", "grpc")
LENGTHS = ((2, 16), (17, 120), (17, 120), (121, 400))  # of prompts, in tokens
POISON = 499  # the token whose embedding is NaN (`poisoned.py`)
STOP = " the"  # frequent in the stories that the test checkpoints tell
# Greedy, seeded sampling, penalties, several choices, log-probabilities, a stop string. Names
# are those of both APIs.
STYLES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "seed": 7, "ignore_eos": True},
    {"temperature": 0.0, "ignore_eos": True, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 3, "n": 3, "ignore_eos": True},
    {"temperature": 0.0, "ignore_eos": True, "stop": [STOP], "min_tokens": 4},
    {"temperature": 1.0, "top_k": 20, "seed": 11, "logprobs": 1, "min_tokens": 4},
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and the API that it is sent to."""

    way: str
    prompt: tuple[int, ...]
    options: dict[str, Any]

    @property
    def greedy(self) -> bool:
        """Whether the answer is exactly the greedy continuation."""
        return self.options["temperature"] == 0 and "stop" not in self.options


def make_asks(
    count: int, seed: int, max_tokens: Sequence[int], vocab_size: int, never: int | None = None
) -> list[Ask]:
    """Returns requests of all APIs and styles in rotation, with prompts of random token ids.
    `max_tokens`: the smallest and the largest. `never`: a token that no prompt or answer has."""
    rng = random.Random(seed)
    known = [token for token in range(3, vocab_size) if token != never]
    more = {} if never is None else {"logit_bias": {never: -100.0}}
    ways, styles = cycle(WAYS), cycle(STYLES)  # their lengths have no common divisor
    return [
        Ask(
            way,
            tuple(rng.choice(known) for _ in range(rng.randint(*rng.choice(LENGTHS)))),
            {**style, **more, "max_tokens": rng.randint(*max_tokens)},
        )
        for way, style in islice(zip(ways, styles, strict=False), count)
    ]
