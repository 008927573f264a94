"""Workloads: prompts with arrival times, and synthetic ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from pdserve.common.core.block_hash import BlockHash

BLOCK = 512  # tokens of a block in Mooncake's traces
_SPREAD = 0x9E3779B97F4A7C15  # an odd factor, which spreads block numbers over 64 bits


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and its arrival time."""

    time: float  # seconds
    num_tokens: int  # prompt tokens
    blocks: Sequence[BlockHash]  # hashes of the prompt's full blocks
    output_tokens: int = 1
    session: str = ""
    client: str = ""
    priority: int = 0


def hash_of(block: int) -> BlockHash:
    """Returns the hash of block number `block`."""
    return ((block + 1) * _SPREAD & (1 << 64) - 1).to_bytes(16, "big")


def _hashes(blocks: Iterable[int]) -> list[BlockHash]:
    return list(map(hash_of, blocks))


def shared_prompt(
    requests: int, per_s: float, shared: int = 8, own_tokens: int = 1024, seed: int = 0
) -> list[Arrival]:
    """Makes prompts that share their first `shared` blocks, followed by `own_tokens` unique tokens
    on average."""
    rng, fresh, time = random.Random(seed), count(1_000_000), 0.0
    arrivals = []
    for _ in range(requests):
        time += rng.expovariate(per_s)
        own = 16 + int(rng.expovariate(1 / own_tokens))
        blocks = [*range(shared), *(next(fresh) for _ in range(own // BLOCK))]
        arrivals.append(Arrival(time, shared * BLOCK + own, _hashes(blocks)))
    return arrivals


def conversations(
    requests: int, per_s: float, turns: int = 6, turn_tokens: int = 1024, seed: int = 0
) -> list[Arrival]:
    """Makes conversations: each prompt extends an earlier one by a turn, or is new."""
    rng, fresh, time = random.Random(seed), count(1_000_000), 0.0
    open_ones: list[list[int]] = []
    arrivals = []
    for _ in range(requests):
        time += rng.expovariate(per_s)
        if open_ones and rng.random() > 1 / turns:
            blocks = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            blocks = []
        blocks = [*blocks, *(next(fresh) for _ in range(turn_tokens // BLOCK))]
        if len(blocks) < turns * turn_tokens // BLOCK:
            open_ones.append(blocks)
        arrivals.append(Arrival(time, len(blocks) * BLOCK + 16, _hashes(blocks)))
    return arrivals


def burst(requests: int, shared: int = 1, own_tokens: int = 1024) -> list[Arrival]:
    """Makes one prompt and, much later, a burst of prompts that share its first blocks."""
    prefix = _hashes(range(shared))
    first = Arrival(0.0, shared * BLOCK, prefix)
    many = [Arrival(1000.0, shared * BLOCK + own_tokens, prefix) for _ in range(requests)]
    return [first, *many]
