"""Placement policies on a real cluster: a sample of a trace through three prefill and three decode
nodes of a tiny model.

    python benchmarks/bench_placement_live.py [--rounds 3] [--json FILE] [--plot FILE]
    python benchmarks/bench_placement_live.py --requests 3000 --blocks 4000 --load 0.9

A block of the trace, 512 tokens, is here a block of 16, and a prompt has at most 60 of them, since
the model has a context of 1,024 tokens. Clients ask in the trace's order, each as soon as it is
answered (a closed loop). With --load prompts come at random times, at this multiple of the rate at
which the clients are answered under `least-load`.

Each policy gets a cluster of its own, in turns, and its times are also shown over those of
`least-load` in the same round: the median, least and most of all rounds. Hit ratios do not depend
on the machine; times do, and clients and nodes share it. So the same trace is simulated with nodes
that have cores of their own. `ideal`: one prefill node with the memory and the speed of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_placement import TRACES, UNLIMITED, ideal  # noqa: E402
from benchmarks.fleet import Fleet  # noqa: E402
from benchmarks.live import at_times, closed_loop, first_token, serving  # noqa: E402
from benchmarks.plots import bars  # noqa: E402
from pdserve.common.config.engine import SchedulerConfig  # noqa: E402
from pdserve.common.core.block_hash import short_hash  # noqa: E402
from pdserve.router.cluster.policies import load_policy  # noqa: E402
from pdserve.simulate.calibration import linear  # noqa: E402
from pdserve.simulate.cluster import ROLES, Setup, simulate  # noqa: E402
from pdserve.simulate.outcome import Outcome, table  # noqa: E402
from pdserve.simulate.traces import read_trace  # noqa: E402
from pdserve.simulate.workloads import BLOCK, Arrival, shared_prompt  # noqa: E402

SIZE, MOST_BLOCKS = 16, 60
ANSWER, BATCH = 2, 256  # tokens
TOKENS_PER_S, STEP_S = 2500.0, 0.005  # of a simulated node
TIMES = ("mean", "p50", "p99")
VOCABULARY = range(3, 500)
BASE = "least-load"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_batched_tokens": BATCH,
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
    add("--rounds", type=int, default=1, help="0: only simulate")
    add("--shared-prompt", action="store_true", help="instead of a trace, one that all begin with")
    add("--model", type=Path, default=ROOT / "tests/models/llama-gqa")
    add("--load", type=float, default=0.0, help="of the capacity; 0: a closed loop")
    add("--json", type=Path)
    add("--plot", type=Path)
    args = parser.parse_args(argv)
    trace = [cut(each) for each in arrivals(args)]
    best = ideal(trace, args.nodes, args.blocks, SIZE).hit_ratio
    per_s = capacity(args, trace) if args.load and args.rounds else 0.0
    policies = args.policy or ("round-robin", BASE, "prefix-aware", "cost")
    rows = []
    for number in range(args.rounds):
        for policy in policies if number % 2 == 0 else reversed(policies):
            found = {
                "policy": policy,
                "round": number + 1,
                **served(args, policy, trace, best, per_s),
            }
            rows.append(found)
            print(json.dumps(found), file=sys.stderr)
    if rows:
        print(table(rows))
    simulated = simulated_rows(args, policies, trace)
    ratios = list(compared(rows, simulated))
    print(table(simulated))
    print(table(ratios))
    if args.json:
        kept = {"live": rows, "simulated": simulated}
        args.json.write_text(json.dumps(kept, indent=1) + "\n")
    if args.plot:
        plot(rows, simulated, args.plot)
    return 0


def arrivals(args: argparse.Namespace) -> list[Arrival]:
    if args.shared_prompt:
        return shared_prompt(args.requests, 1.0, MOST_BLOCKS // 2, BLOCK * 4)
    return read_trace(args.trace, args.requests)


def timed(trace: Sequence[Arrival], per_s: float) -> list[Arrival]:
    """Gives the prompts random times (a Poisson process)."""
    chance, time, found = random.Random(0), 0.0, []
    for each in trace:
        time += chance.expovariate(per_s)
        found.append(replace(each, time=time))
    return found


# ---- live ----


def capacity(args: argparse.Namespace, trace: Sequence[Arrival]) -> float:
    """Returns the answers per second of `BASE` in a closed loop."""
    with cluster(args, BASE) as fleet:
        began = time.monotonic()
        asyncio.run(closed_loop(partial(answered, fleet), trace, args.clients))
        return len(trace) / (time.monotonic() - began)


def served(
    args: argparse.Namespace, policy: str, trace: Sequence[Arrival], best: float, per_s: float
) -> dict[str, Any]:
    """`per_s`: the capacity; 0: a closed loop."""
    with cluster(args, policy) as fleet:
        ask = partial(answered, fleet)
        if per_s:
            ttft = asyncio.run(at_times(ask, timed(trace, args.load * per_s)))
        else:
            ttft = asyncio.run(closed_loop(ask, trace, args.clients))
        nodes = [node for node in fleet.state()["nodes"] if node["role"] == "prefill"]
    return summary(nodes, sorted(ttft), best)


# ---- simulated ----


def simulated_rows(
    args: argparse.Namespace, policies: Sequence[str], trace: Sequence[Arrival]
) -> list[dict[str, Any]]:
    """Returns a row for each policy, then that of the ideal. Only the ratios of times mean
    something: nodes compute `TOKENS_PER_S`."""
    asks = [replace(each, output_tokens=ANSWER) for each in trace]
    pooled = f"1P@{args.nodes}+{args.nodes}D"

    def found(
        policy: str, layout: str, blocks: int, asks: Sequence[Arrival], clients: int
    ) -> Outcome:
        of = {role: load_policy(policy, "--policy") for role in ROLES.values()}
        times = linear(TOKENS_PER_S, STEP_S)
        tokens = BATCH * args.nodes if layout == pooled else BATCH  # of a step
        batches = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=tokens)
        setup = Setup(
            layout, times, of, UNLIMITED, batches, blocks, SIZE, event_delay=0.5, clients=clients
        )
        return simulate(setup, asks)

    layout, clients = f"{args.nodes}P{args.nodes}D", args.clients
    if args.load:
        row = found(BASE, layout, args.blocks, asks, clients).row()
        asks, clients = timed(asks, args.load * len(asks) / row["lasted_s"]), 0
    rows = [
        simulated_row(each, found(each, layout, args.blocks, asks, clients)) for each in policies
    ]
    best = found(BASE, pooled, args.nodes * args.blocks, asks, clients)
    return [*rows, simulated_row("ideal", best)]


def simulated_row(policy: str, outcome: Outcome) -> dict[str, Any]:
    row = outcome.row()
    times = {f"ttft_{name}_ms": round(1e3 * row[f"ttft_{name}_s"], 1) for name in TIMES}
    hits = {"hit_ratio": row["hit_ratio"], "imbalance": row["imbalance"]}
    return {"simulated": policy, **hits, **times}


# ---- figures ----


def compared(
    rows: Sequence[dict[str, Any]], simulated: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yields for each policy its times over those of `BASE`: live in the same round, simulated."""
    live, ours = over_base(rows), over_base([{"policy": r["simulated"], **r} for r in simulated])
    for policy in ours:
        yield {
            "policy": policy,
            f"over {BASE}": f"{len(live.get(policy, {}).get('p99', ()))} rounds",
        } | {
            f"{name} {way}": spread(found[policy][name]) if policy in found else None
            for name in TIMES
            for way, found in (("live", live), ("simulated", ours))
        }


def over_base(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Returns by policy and figure the ratio of each round."""
    base = {row.get("round"): row for row in rows if row["policy"] == BASE}
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if (other := base.get(row.get("round"))) is not None:
            for name in TIMES:
                ratios = found.setdefault(row["policy"], {}).setdefault(name, [])
                ratios.append(row[f"ttft_{name}_ms"] / other[f"ttft_{name}_ms"])
    return found


def plot(rows: Sequence[dict[str, Any]], simulated: Sequence[dict[str, Any]], path: Path) -> None:
    live, ours = over_base(rows), over_base([{"policy": r["simulated"], **r} for r in simulated])
    panels = {
        f"TTFT {name}": {
            way: {policy: median(each[name]) for policy, each in found.items()}
            for way, found in (("live", live), ("simulated", ours))
        }
        for name in TIMES
    }
    bars(path, panels, f"over {BASE}")


def spread(ratios: Sequence[float]) -> str:
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
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


def cluster(args: argparse.Namespace, policy: str) -> AbstractContextManager[Fleet]:
    router = {"prefill_policy": policy, "decode_policy": policy, "log_level": "warning"}
    options = {**OPTIONS, "num_gpu_blocks_override": args.blocks}
    return serving(args.model, router, args.nodes, kv_lease=30, **options)


async def answered(fleet: Fleet, session: aiohttp.ClientSession, arrival: Arrival) -> float:
    """Returns the seconds until the first token."""
    body = {"prompt": prompt(arrival), "max_tokens": ANSWER, "temperature": 0}
    seconds = await first_token(session, fleet, body)
    assert seconds is not None
    return seconds


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
