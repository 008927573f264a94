"""Compares predictions of `pdserve simulate` with real clusters of the same layouts on this host.

    python benchmarks/bench_simulated_live.py [--layouts 1P1D,2P1D] [--requests 101] [--json FILE]
    python benchmarks/bench_simulated_live.py --again FILE

Each layout gets a cluster of its own and the same made prompts, in an open loop: they come at their
times whether or not others are answered. The first ones, which come at once, do not count: nodes
are cold. The layout's own nodes are measured before and after; its prediction is by both, so that
a machine whose speed drifts is followed. Nothing else should run on the machine. With the defaults
it takes about 14 minutes on two cores.

`--json` keeps the answers and the measurements; `--again` simulates a kept run anew, without
clusters. ITL is the mean of an answer. Of 101 requests, p99 is the second largest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec

from pdserve import LLM
from pdserve.common.config.router import RoutingConfig
from pdserve.common.config.simulate import CalibrateConfig
from pdserve.common.core.block_hash import hash_blocks
from pdserve.common.core.host import usable_cores
from pdserve.router.cluster.placement import load_policies
from pdserve.simulate.calibrate import (
    ONE_OF_EACH,
    VOCABULARY,
    Points,
    calibration,
    measured,
)
from pdserve.simulate.calibration import Calibration
from pdserve.simulate.cluster import ROLES, Setup, read_layout, simulate
from pdserve.simulate.outcome import Answered, percentile, table
from pdserve.simulate.workloads import Arrival

SIZE = 16  # tokens of a block
COLD, WARM_AFTER = 12, 10.0  # prompts that come at once and do not count; seconds until the others
COUNTS = {"P": "prefill", "D": "decode", "B": "both"}
KEY = "bench"
OPTIONS = {"api_key": KEY} | {
    key: value for key, value in ONE_OF_EACH.items() if key not in COUNTS.values()
}
POINTS = CalibrateConfig(
    chunk="1,8,16,32,64,128", cached="0,64", batch="1,2,4", context="32,160", cpu_threads=1
)
TURNS = 3  # measurements of the nodes between two layouts
SEEDS = range(15)
TTFT, ITL = attrgetter("ttft"), attrgetter("tpot")
GOALS = {0.5: 5, 0.99: 15}  # percent that a percentile may be off


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a checkpoint folder (default: the embedded model)")
    add("--layouts", default="1P1D,2P1D,1P2D,2P2D,1B,2B")
    add("--requests", type=int, default=101)
    add("--per-s", type=float, default=1.6)
    add("--json", type=Path)
    add("--again", type=Path, help="what --json wrote")
    add("--plot", type=Path)
    args = parser.parse_args(argv)
    for layout in args.layouts.split(","):
        read_layout(layout)
    runs, rows = list[Run](), list[dict[str, Any]]()
    for run in again(args.again) if args.again else live(args):
        runs.append(run)
        rows.append(compared(run))
        print(json.dumps(rows[-1]), file=sys.stderr)
        if args.json:
            kept = msgspec.to_builtins({"rows": rows, "runs": runs})
            args.json.write_text(json.dumps(kept, indent=1) + "\n")
    missed = sum(row["missed"] for row in rows)
    print(table(rows))
    print(f"\noff by more than 5 % (p50) or 15 % (p99): {missed} of {4 * len(rows)}")
    if args.plot:
        plot(rows, args.plot)
    return 0


class Run(msgspec.Struct, frozen=True):
    """The answers of a layout, with all that its prediction needs."""

    layout: str
    cores: int
    requests: int
    per_s: float
    times: Calibration
    answers: list[Answered]
    stages: dict[str, float] = {}  # median seconds of each stage of their timelines


# ---- the requests ----


@dataclass(frozen=True, slots=True)
class Ask:
    time: float  # seconds
    prompt: list[int]
    output_tokens: int

    @property
    def arrival(self) -> Arrival:
        blocks = hash_blocks(self.prompt, SIZE)
        return Arrival(self.time, len(self.prompt), blocks, self.output_tokens)


def made(requests: int, per_s: float) -> list[Ask]:
    """Makes prompts of 16 to 128 tokens, each second one the beginning of which has come before;
    the first `COLD` come at once."""
    chance, time, known, found = random.Random(1), WARM_AFTER, list[list[int]](), list[Ask]()
    for number in range(COLD + requests):
        time += chance.expovariate(per_s) if number >= COLD else 0.0
        begin = chance.choice(known) if number % 2 else []
        prompt = [*begin, *chance.choices(VOCABULARY, k=chance.randrange(16, 64))][:128]
        known.append(prompt)
        found.append(Ask(time if number >= COLD else 0.0, prompt, chance.randrange(8, 25)))
    return found


# ---- clusters ----


def live(args: argparse.Namespace) -> Iterator[Run]:
    asks = made(args.requests, args.per_s)
    for layout in args.layouts.split(","):
        roles = [role for role, _ in read_layout(layout)]
        counts = {COUNTS[letter]: roles.count(role) for letter, role in ROLES.items()}
        with LLM(args.model, cpu_threads=1, **OPTIONS, **counts) as llm:
            turns = measured(llm, Points(POINTS), counts["both"])
            next(turns)  # does not count: the nodes are cold
            before = list(islice(turns, TURNS))
            answers, stages = served(llm.url, asks)
            times = calibration([*before, *islice(turns, TURNS)], POINTS)
        yield Run(layout, usable_cores(), args.requests, args.per_s, times, answers, stages)


def served(url: str, asks: Sequence[Ask]) -> tuple[list[Answered], dict[str, float]]:
    """Returns the answers, and the median of each stage."""
    lines = asyncio.run(replay(url, asks))
    answers = [
        Answered(begun, begun + line["first_token"], begun + line["finished"], ask.output_tokens)
        for ask, (begun, line) in zip(asks, lines, strict=True)
    ]
    return answers, stages_of([line for begun, line in lines if begun >= WARM_AFTER])


def stages_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the median seconds of each stage of timelines; a stage that one lacks took 0 s."""
    found = [Counter[str]() for _ in lines]
    for line, seconds in zip(lines, found, strict=True):
        for stage in line["stages"]:
            seconds[stage["name"]] += stage["seconds"]
    names = dict.fromkeys(name for seconds in found for name in seconds)
    return {name: median(seconds[name] for seconds in found) for name in names}


async def replay(url: str, asks: Sequence[Ask]) -> list[tuple[float, Mapping[str, Any]]]:
    """Sends each request at its time; returns when it was sent, and its timeline."""
    loop = asyncio.get_running_loop()
    headers = {"Authorization": f"Bearer {KEY}", "X-PDServe-Timeline": "1"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(f"{url}/v1/models") as answer:
            name = (await answer.json())["data"][0]["id"]
        start = loop.time()

        async def one(ask: Ask) -> tuple[float, Mapping[str, Any]]:
            body = {"model": name, "prompt": ask.prompt, "temperature": 0, "ignore_eos": True}
            body["max_tokens"] = ask.output_tokens
            await asyncio.sleep(start + ask.time - loop.time())
            begun = loop.time() - start
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                return begun, (await answer.json())["pdserve"]["timeline"]

        return await asyncio.gather(*map(one, asks))


def again(path: Path) -> Iterator[Run]:
    yield from msgspec.convert(json.loads(path.read_text())["runs"], list[Run])


# ---- figures ----


def compared(run: Run) -> dict[str, Any]:
    """Returns a row: live and simulated, in milliseconds, and by how much they differ."""
    simulated = [simulated_answers(run, seed) for seed in SEEDS]
    row: dict[str, Any] = {"layout": run.layout}
    missed = 0
    for name, read in (("ttft", TTFT), ("itl", ITL)):
        for share, goal in GOALS.items():
            theirs, *ours_each = (
                percentile(sorted(map(read, counted(found))), share) or 0.0
                for found in (run.answers, *simulated)
            )
            ours = median(ours_each)
            off = 100 * (ours / theirs - 1)
            missed += abs(off) > goal
            label = f"{name} p{100 * share:.0f}"
            row[f"{label} live"] = round(1e3 * theirs)
            row[f"{label} simulated"] = round(1e3 * ours)
            row[f"{label} off"] = f"{off:+.0f} %" + (" (missed)" if abs(off) > goal else "")
    return row | {"missed": missed}


def simulated_answers(run: Run, seed: int) -> Sequence[Answered]:
    policies = load_policies(RoutingConfig())
    setup = Setup(run.layout, run.times, policies, block_size=SIZE, host_cores=run.cores, seed=seed)
    return simulate(setup, [ask.arrival for ask in made(run.requests, run.per_s)]).answered


def counted(answers: Sequence[Answered]) -> list[Answered]:
    return [each for each in answers if each.arrived >= WARM_AFTER]


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws what was simulated over what was measured: on the diagonal the two are equal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    for name, axes in zip(("ttft", "itl"), figure.subplots(1, 2), strict=True):
        for p in ("p50", "p99"):
            xs, ys = ([r[f"{name} {p} {way}"] for r in rows] for way in ("live", "simulated"))
            axes.plot(xs, ys, "o", label=p)
            for row, x, y in zip(rows, xs, ys, strict=True):
                axes.annotate(row["layout"], (x, y), fontsize=7)
        most = max(max(axes.get_xlim()), max(axes.get_ylim()))
        axes.plot([0, most], [0, most], "k:", linewidth=1)
        axes.set(title=name.upper(), xlabel="live, ms", ylabel="simulated, ms")
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
