"""Workloads for the simulator: traces from files, and made ones."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator
from itertools import count, groupby
from pathlib import Path

from pdserve.router.kit.simulator import Arrival

BLOCK = 512  # tokens of a block in Mooncake's traces
_SPREAD = 0x9E3779B97F4A7C15  # odd: block numbers become hashes that fill 64 bits


def read_trace(path: Path, most: int | None = None) -> list[Arrival]:
    """Reads `.jsonl` as Mooncake publishes it, or our `.csv.gz` (timestamp, input_length,
    output_length, runs of hash ids like `0-13 40`). Arrivals of one timestamp, which is in
    milliseconds and coarse, are spread over the time until the next."""
    rows = list(_json_rows(path) if path.suffix == ".jsonl" else _csv_rows(path))[:most]
    batches = [(at, list(rows)) for at, rows in groupby(rows, key=lambda row: row[0])]
    arrivals = []
    for number, (at, batch) in enumerate(batches):
        following = batches[number + 1][0] if number + 1 < len(batches) else at + 3000
        for place, (_, num_tokens, ids) in enumerate(batch):
            time = at + (following - at) * place / len(batch)
            arrivals.append(Arrival(time / 1000, num_tokens, [hash_of(each) for each in ids]))
    return arrivals


Row = tuple[int, int, list[int]]  # timestamp, tokens, ids


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            yield row["timestamp"], row["input_length"], row["hash_ids"]


def _csv_rows(path: Path) -> Iterator[Row]:
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            ids: list[int] = []
            for run in row["hash_ids"].split():
                first, _, last = run.partition("-")
                ids += range(int(first), int(last or first) + 1)
            yield int(row["timestamp"]), int(row["input_length"]), ids


def hash_of(block: int) -> int:
    return (block + 1) * _SPREAD & (1 << 64) - 1


def shared_prompt(
    requests: int, per_s: float, shared: int = 8, own_tokens: int = 1024, seed: int = 0
) -> list[Arrival]:
    """Makes prompts that all begin with the same `shared` blocks and go on with tokens of their
    own, `own_tokens` on the average."""
    rng, fresh, time = random.Random(seed), count(1_000_000), 0.0
    arrivals = []
    for _ in range(requests):
        time += rng.expovariate(per_s)
        own = 16 + int(rng.expovariate(1 / own_tokens))
        blocks = [*range(shared), *(next(fresh) for _ in range(own // BLOCK))]
        arrivals.append(Arrival(time, shared * BLOCK + own, list(map(hash_of, blocks))))
    return arrivals


def conversations(
    requests: int, per_s: float, turns: int = 6, turn_tokens: int = 1024, seed: int = 0
) -> list[Arrival]:
    """Makes conversations: each prompt is an earlier one and another turn, or a new one."""
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
        arrivals.append(Arrival(time, len(blocks) * BLOCK + 16, list(map(hash_of, blocks))))
    return arrivals


def burst(requests: int, shared: int = 1, own_tokens: int = 1024) -> list[Arrival]:
    """Makes one prompt, and long after it many at once that begin with its `shared` blocks."""
    prefix = [hash_of(each) for each in range(shared)]
    first = Arrival(0.0, shared * BLOCK, prefix)
    many = [Arrival(1000.0, shared * BLOCK + own_tokens, list(prefix)) for _ in range(requests)]
    return [first, *many]
