"""Workloads: prompts with arrival times, and synthetic ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from pdserve.common.core.block_hash import BlockHash

BLOCK = 512  # tokens of a block in Mooncake's traces
TURNS, TURN_TOKENS = 6, 1024  # of a synthetic conversation; a turn, or the tokens of one prompt
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
    requests: int, per_s: float, shared: int = 8, own_tokens: int = TURN_TOKENS
) -> list[Arrival]:
    """Makes prompts that share their first `shared` blocks, followed by `own_tokens` unique tokens
    on average."""
    rng, fresh, time = random.Random(0), count(1_000_000), 0.0
    arrivals = []
    for _ in range(requests):
        time += rng.expovariate(per_s)
        own = 16 + int(rng.expovariate(1 / own_tokens))
        blocks = [*range(shared), *(next(fresh) for _ in range(own // BLOCK))]
        arrivals.append(Arrival(time, shared * BLOCK + own, _hashes(blocks)))
    return arrivals


def conversations(requests: int, per_s: float) -> list[Arrival]:
    """Makes conversations: each prompt extends an earlier one by a turn, or is new."""
    rng, fresh, time = random.Random(0), count(1_000_000), 0.0
    open_ones: list[list[int]] = []
    arrivals = []
    for _ in range(requests):
        time += rng.expovariate(per_s)
        if open_ones and rng.random() > 1 / TURNS:
            blocks = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            blocks = []
        blocks = [*blocks, *(next(fresh) for _ in range(TURN_TOKENS // BLOCK))]
        if len(blocks) < TURNS * TURN_TOKENS // BLOCK:
            open_ones.append(blocks)
        arrivals.append(Arrival(time, len(blocks) * BLOCK + 16, _hashes(blocks)))
    return arrivals


def burst(requests: int) -> list[Arrival]:
    """Makes one prompt of a block and, much later, a burst of prompts that begin with it."""
    prefix = _hashes(range(1))
    many = [Arrival(1000.0, BLOCK + TURN_TOKENS, prefix) for _ in range(requests)]
    return [Arrival(0.0, BLOCK, prefix), *many]
