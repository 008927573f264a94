"""Placement policies on request traces: how much of the prompts is found cached, how even the work
is, and how long the first token takes, among simulated prefill nodes (`pdserve.router.kit`).

    python benchmarks/bench_placement.py                        # the samples beside this file
    python benchmarks/bench_placement.py --trace FILE.jsonl --blocks 10000 --json out.json

The clock is virtual, so that a busy machine changes nothing. `ideal` is one node with the memory of
all. The samples are from Mooncake's traces (FAST'25; Apache-2.0, github.com/kvcache-ai/Mooncake),
the first quarter of the requests, with runs of hash ids shortened to their ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdserve.router.cluster.policy import BUILT_IN, load_policy
from pdserve.router.kit.simulator import Arrival, Outcome, ideal, simulate
from pdserve.router.kit.workloads import BLOCK, read_trace, shared_prompt

TRACES = Path(__file__).parent / "traces"
SHARED_RATE = 26.0  # prompts a second: 80 % of what four nodes compute of `shared_prompt`


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    traces = {path.name.partition(".")[0]: read_trace(path) for path in args.trace}
    if not args.trace:
        traces = {path.name.partition(".")[0]: read_trace(path) for path in samples()}
        traces["one system prompt"] = shared_prompt(4000, SHARED_RATE)
    rows = [row for name, trace in traces.items() for row in compare(name, trace, args)]
    print(table(rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def samples() -> list[Path]:
    return sorted(TRACES.glob("*.csv.gz"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--trace", type=Path, action="append", default=[], help="Mooncake .jsonl, or .csv.gz")
    add("--policy", action="append", default=[], help="one, or module:Class (default: all)")
    add("--nodes", type=int, default=4)
    add("--blocks", type=int, default=2500, help=f"of {BLOCK} tokens, in a node's cache")
    add("--tokens-per-s", type=float, default=10_000.0, help="that a node computes")
    add("--json", help="file for the rows")
    return parser.parse_args(argv)


def compare(name: str, trace: list[Arrival], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each policy, after that of the ideal."""
    best = ideal(trace, args.nodes, args.blocks)
    rows = [row(name, "ideal", best, best)]
    for policy in args.policy or BUILT_IN:
        outcome = simulate(
            load_policy(policy, "--policy"),
            trace,
            nodes=args.nodes,
            num_blocks=args.blocks,
            tokens_per_s=args.tokens_per_s,
        )
        rows.append(row(name, policy, outcome, best))
    return rows


def row(trace: str, policy: str, outcome: Outcome, best: Outcome) -> dict[str, Any]:
    of_ideal = outcome.hit_ratio / best.hit_ratio if best.hit_ratio else 1.0
    times: dict[str, float | None] = {
        "ttft_mean_s": outcome.mean,
        "ttft_p50_s": outcome.percentile(0.5),
        "ttft_p99_s": outcome.percentile(0.99),
    }
    if policy == "ideal":
        times = dict.fromkeys(times)
    return {
        "trace": trace,
        "policy": policy,
        "hit_ratio": round(outcome.hit_ratio, 4),
        "of_ideal": round(of_ideal, 4),
        "imbalance": round(outcome.imbalance, 3),
        **{name: value and round(value, 3) for name, value in times.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [f"| {' | '.join(rows[0])} |", "|" + "---|" * len(rows[0])]
    lines += [f"| {' | '.join('–' if v is None else str(v) for v in r.values())} |" for r in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
