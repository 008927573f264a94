"""Placement policies on request traces: how much of the prompts is found cached, how even the work
is, and how long the first token takes, by `pdserve simulate`'s virtual clock.

    python benchmarks/bench_placement.py                        # the samples beside this file
    python benchmarks/bench_placement.py --trace FILE.jsonl --skip 3000 --blocks 10000

`ideal` is one prefill node with the memory of all, that computes in no time. The samples are from
Mooncake's traces (FAST'25; Apache-2.0, github.com/kvcache-ai/Mooncake), the first 3,000
and 1,500 requests, with runs of hash ids shortened to their ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.plots import bars
from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.router import RoutingConfig
from pdserve.router.cluster.policies import BUILT_IN, load_policy
from pdserve.simulate.calibration import linear
from pdserve.simulate.cluster import ROLES, Setup, read_layout, simulate
from pdserve.simulate.outcome import Outcome, table
from pdserve.simulate.traces import read_trace
from pdserve.simulate.workloads import BLOCK, Arrival, shared_prompt

TRACES = Path(__file__).parent / "traces"
UNLIMITED = RoutingConfig(
    max_concurrent_requests=10**6, max_queued_requests=10**6, max_client_share=1.0
)
SHARED_RATE = 26.0  # prompts a second: 80 % of what four nodes compute of `shared_prompt`


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    most = args.skip + args.requests if args.requests else None
    traces = {name_of(path): read_trace(path, most)[args.skip :] for path in args.trace}
    if not args.trace:
        traces = {name_of(path): read_trace(path, most) for path in samples()}
        traces["one system prompt"] = shared_prompt(args.requests or 4000, SHARED_RATE)
    rows = [row for name, trace in traces.items() for row in compare(name, trace, args)]
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return 0


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["policy"] != "ideal":
            labels = panels.setdefault(row["trace"], {"mean": {}, "p99": {}})
            for label, values in labels.items():
                values[row["policy"]] = row[f"ttft_{label}_s"]
    bars(path, panels, "TTFT, s")


def name_of(trace: Path) -> str:
    return trace.name.partition(".")[0]


def samples() -> list[Path]:
    return sorted(TRACES.glob("*.csv.gz"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--trace", type=Path, action="append", default=[], help="Mooncake .jsonl, or .csv.gz")
    add("--policy", action="append", default=[], help="one, or module:Class (default: all)")
    add("--layout", default="4P4D", help="as pdserve simulate --layout")
    add("--skip", type=int, default=0, help="requests at the beginning that are left out")
    add("--blocks", type=int, default=2500, help=f"of {BLOCK} tokens, in a node's cache")
    add("--tokens-per-s", type=float, default=10_000.0, help="that a node computes")
    add("--event-delay", type=float, default=0.0, help="s until the router hears of cached blocks")
    add("--join", default="", help="nodes, as --layout, that come later and have nothing cached")
    add("--join-after", type=float, default=600.0, help="s")
    add("--requests", type=int, default=0, help="most requests of each trace (0: all)")
    add("--json", help="file for the rows")
    add("--plot", type=Path, help="file for a picture")
    return parser.parse_args(argv)


def compare(name: str, trace: list[Arrival], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each policy, after that of the ideal."""
    prefills = sum(role == ROLES["P"] for role, _ in read_layout(args.layout))
    best = ideal(trace, prefills, args.blocks)
    rows = [row(name, "ideal", best, best)]
    for policy in args.policy or BUILT_IN:
        late = {
            "event_delay": args.event_delay,
            "joining": args.join,
            "join_after": args.join_after,
        }
        found = place(policy, trace, args.layout, args.blocks, args.tokens_per_s, **late)
        rows.append(row(name, policy, found, best))
    return rows


def place(
    policy: str,
    trace: Sequence[Arrival],
    layout: str,
    num_blocks: int,
    tokens_per_s: float,
    block_size: int = BLOCK,
    **late: Any,
) -> Outcome:
    """Serves a trace without limits of admission, by nodes of so many tokens a second. `late`: of
    `Setup`, what comes late."""
    policies = {role: load_policy(policy, "--policy") for role in ROLES.values()}
    batches = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    times = linear(tokens_per_s)
    setup = Setup(layout, times, policies, UNLIMITED, batches, num_blocks, block_size, **late)
    return simulate(setup, trace)


def ideal(
    trace: Sequence[Arrival], nodes: int, num_blocks: int, block_size: int = BLOCK
) -> Outcome:
    """One prefill node that has the memory of all and computes in no time."""
    return place("least-load", trace, "1P1D", nodes * num_blocks, 1e12, block_size)


def row(trace: str, policy: str, outcome: Outcome, best: Outcome) -> dict[str, Any]:
    found = outcome.row()
    of_ideal = outcome.hit_ratio / best.hit_ratio if best.hit_ratio else 1.0
    names = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s")
    return {
        "trace": trace,
        "policy": policy,
        "hit_ratio": found["hit_ratio"],
        "of_ideal": round(of_ideal, 4),
        "imbalance": found["imbalance"],
        **{name: None if policy == "ideal" else found[name] for name in names},
    }


if __name__ == "__main__":
    sys.exit(main())
