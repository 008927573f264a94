"""Placement policies on a real cluster: a sample of a trace through three prefill and three decode
nodes of a tiny model.

    python benchmarks/bench_placement_live.py [--requests 600] [--rounds 3] [--json FILE]

A block of the trace, 512 tokens, is here a block of 16, and a prompt has at most 60 of them, since
the model has a context of 1,024 tokens. Clients ask in the trace's order, each as soon as it is
answered (a closed loop). Each policy gets a cluster of its own, in turns, and its times are also
shown over those of `least-load` in the same round: the median, least and most of all rounds. Hit
ratios do not depend on the machine; times do, and clients and nodes share it. `ideal`: one cache as
large as all, simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_placement import TRACES, ideal  # noqa: E402
from benchmarks.fleet import Fleet  # noqa: E402
from pdserve.common.core.block_hash import short_hash  # noqa: E402
from pdserve.simulate.outcome import table  # noqa: E402
from pdserve.simulate.traces import read_trace  # noqa: E402
from pdserve.simulate.workloads import BLOCK, Arrival, shared_prompt  # noqa: E402

SIZE, MOST_BLOCKS = 16, 60
VOCABULARY = range(3, 500)
BASE = "least-load"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "cpu_threads": 1,
    "peak_tflops": 0.05,  # not measured, which takes half of a node's start
    "peak_bandwidth": 10,
    "log_level": "warning",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--trace", type=Path, default=TRACES / "mooncake_conversation.csv.gz")
    add("--requests", type=int, default=600)
    add("--clients", type=int, default=8)
    add("--nodes", type=int, default=3, help="of each role")
    add("--blocks", type=int, default=1000, help="in a node's cache")
    add("--policy", action="append", default=[])
    add("--rounds", type=int, default=1)
    add("--shared-prompt", action="store_true", help="instead of a trace, one that all begin with")
    add("--model", type=Path, default=ROOT / "tests/models/llama-gqa")
    add("--json", type=Path)
    args = parser.parse_args(argv)
    trace = [cut(each) for each in arrivals(args)]
    best = ideal(trace, args.nodes, args.blocks, SIZE).hit_ratio
    policies = args.policy or ("round-robin", BASE, "prefix-aware", "cost")
    rows = []
    for number in range(args.rounds):
        for policy in policies if number % 2 == 0 else reversed(policies):
            found = {"policy": policy, "round": number + 1, **served(args, policy, trace, best)}
            rows.append(found)
            print(json.dumps(found), file=sys.stderr)
    print(table(rows))
    print(table(list(compared(rows))))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def arrivals(args: argparse.Namespace) -> list[Arrival]:
    if args.shared_prompt:
        return shared_prompt(args.requests, 1.0, MOST_BLOCKS // 2, BLOCK * 4)
    return read_trace(args.trace, args.requests)


def served(
    args: argparse.Namespace, policy: str, trace: Sequence[Arrival], best: float
) -> dict[str, Any]:
    with serving(args, policy) as fleet:
        ttft = asyncio.run(replay(fleet, trace, args.clients))
        nodes = [node for node in fleet.state()["nodes"] if node["role"] == "prefill"]
    return summary(nodes, ttft, best)


def compared(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields for each policy its times over those of `BASE` in the same round."""
    base = {row["round"]: row for row in rows if row["policy"] == BASE}
    for policy in dict.fromkeys(row["policy"] for row in rows if row["round"] in base):
        own = [row for row in rows if row["policy"] == policy]
        yield {"policy": policy, f"over {BASE}": f"{len(own)} rounds"} | {
            name: spread([row[name] / base[row["round"]][name] for row in own])
            for name in ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms")
        }


def spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def cut(arrival: Arrival) -> Arrival:
    blocks = arrival.blocks[:MOST_BLOCKS]
    return Arrival(arrival.time, len(blocks) * SIZE + 1, blocks)


def prompt(arrival: Arrival) -> list[int]:
    """Returns token ids that begin alike where the trace's blocks do."""
    tokens = []
    for block in arrival.blocks:
        for place in range(SIZE):
            tokens.append(VOCABULARY[(short_hash(block) >> 3 * place) % len(VOCABULARY)])
    return [*tokens, VOCABULARY[0]]


@contextmanager
def serving(args: argparse.Namespace, policy: str) -> Iterator[Fleet]:
    router = {"prefill_policy": policy, "decode_policy": policy, "log_level": "warning"}
    options = {**OPTIONS, "num_gpu_blocks_override": args.blocks}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(args.model, Path(folder) / "log", os.environ, router, kv_lease=30, **options)
        try:
            fleet.start_router()
            for _ in range(args.nodes):
                fleet.start_node("prefill")
                fleet.start_node("decode")
            fleet.wait_ready()
            yield fleet
        finally:
            fleet.stop()


async def replay(fleet: Fleet, trace: Sequence[Arrival], clients: int) -> list[float]:
    """Returns the seconds until each first token, ascending."""
    url, ttft = f"http://127.0.0.1:{fleet.ports['http']}/v1/completions", []
    body = {"model": fleet.model.name, "max_tokens": 2, "temperature": 0, "ignore_eos": True}

    async def client(session: aiohttp.ClientSession, left: Iterator[Arrival]) -> None:
        for arrival in left:
            ask = {**body, "prompt": prompt(arrival)}
            async with session.post(url, json=ask, headers={"X-PDServe-Timeline": "1"}) as answer:
                answer.raise_for_status()
                ttft.append((await answer.json())["pdserve"]["timeline"]["first_token"])

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        left = iter(trace)
        for _ in range(clients):
            group.create_task(client(session, left))
    return sorted(ttft)


def summary(nodes: Sequence[dict[str, Any]], ttft: Sequence[float], best: float) -> dict[str, Any]:
    """Returns a row: of the prefill nodes what they found cached and how even their work was."""
    computed = [node["prompt_tokens"] - node["cached_tokens"] for node in nodes]
    hit = sum(node["cached_tokens"] for node in nodes) / sum(n["prompt_tokens"] for n in nodes)
    return {
        "hit_ratio": round(hit, 4),
        "of_ideal": round(hit / best, 4),
        "imbalance": round(max(computed) / fmean(computed), 3),
        "ttft_mean_ms": round(1e3 * fmean(ttft), 1),
        "ttft_p50_ms": round(1e3 * ttft[len(ttft) // 2], 1),
        "ttft_p99_ms": round(1e3 * ttft[int(0.99 * len(ttft))], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
