"""Measures the goodput of a real cluster beyond its capacity, with the default limits and with
--slo-ttft.

    python benchmarks/bench_admission_live.py [--rounds 2] [--json FILE] [--plot FILE]

Each policy has a cluster of one prefill and one decode node of a tiny model. Eight API keys send
different prompts with a trace's lengths divided by `TOKENS`. Before each round four clients measure
the capacity in prompt tokens per second, which is a load of 1. Both policies get the same prompts
at the same times, in turns, so that other load on this machine affects both.

--slo-ttft is `PATIENCE` times the TTFT of a mean prompt at the start. An answer is good if its TTFT
is within it, or within twice its prompt's time alone, if that is longer. A request starves if it
gets neither a first token nor a refusal within --queue-timeout.

`simulated`: the same prompts on `pdserve simulate`'s virtual clock, with the measured capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_admission import KEYS, QUEUE_TIMEOUT  # noqa: E402
from benchmarks.bench_placement import TRACES  # noqa: E402
from benchmarks.bench_placement_live import ANSWER, OPTIONS, SIZE, STEP_S, VOCABULARY  # noqa: E402
from benchmarks.fleet import Fleet  # noqa: E402
from benchmarks.live import at_times, closed_loop, first_token, serving  # noqa: E402
from benchmarks.plots import lines  # noqa: E402
from pdserve.common.config.engine import SchedulerConfig  # noqa: E402
from pdserve.common.config.router import RoutingConfig  # noqa: E402
from pdserve.router.cluster.placement import load_policies  # noqa: E402
from pdserve.router.requests.slo import STRETCH  # noqa: E402
from pdserve.simulate.calibration import linear  # noqa: E402
from pdserve.simulate.cluster import Setup, simulate  # noqa: E402
from pdserve.simulate.outcome import table  # noqa: E402
from pdserve.simulate.traces import read_trace  # noqa: E402
from pdserve.simulate.workloads import Arrival  # noqa: E402

TOKENS, MOST = 64, 960  # tokens of the trace per token here; most tokens of a prompt
PATIENCE = 5.0
MEASURED = 24  # prompts per measurement of the capacity
REFUSED = (429, 503)
BATCH, NUM_BLOCKS = 64, 4000  # tokens of a step; blocks of a node
GOOD = {"live": "good", "simulated": "good simulated"}  # columns
MOST_PATIENT = {"X-SLO-TTFT-Ms": "1000000"}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and its arrival time."""

    time: float  # seconds
    tokens: int
    key: str


@dataclass(frozen=True, slots=True)
class Answer:
    ask: Ask
    seconds: float  # to the first token, or the refusal
    refused: bool


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--trace", type=Path, default=TRACES / "mooncake_conversation.csv.gz")
    add("--requests", type=int, default=60)
    add("--loads", default="1,2,3", help="loads as multiples of the capacity")
    add("--rounds", type=int, default=2)
    add("--model", type=Path, default=ROOT / "tests/models/llama-gqa")
    add("--json", type=Path)
    add("--plot", type=Path)
    args = parser.parse_args(argv)
    asks = read(args.trace, args.requests)
    rows = []
    with cluster(args.model) as static:
        promise = PATIENCE * mean(asks) / capacity(static, asks)
        print(f"--slo-ttft {promise:.2f}", file=sys.stderr)
        with cluster(args.model, slo_ttft=promise) as slo:
            capacity(slo, asks)  # also measures the time of prompts
            fleets = {"static": static, "slo": slo}
            for number in range(1, args.rounds + 1):
                for load in map(float, args.loads.split(",")):
                    rows += compared(fleets, asks, promise, load, number)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return 0


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the rounds' mean of good answers."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {"live": {}, "simulated": {}}
    for title, panel in panels.items():
        for way, load in dict.fromkeys((row["way"], row["load"]) for row in rows):
            of = [row for row in rows if (row["way"], row["load"]) == (way, load)]
            good = fmean(row[GOOD[title]] for row in of)
            panel.setdefault(way, []).append((load, good))
    lines(path, panels, "load over capacity", "good answers")


def compared(
    fleets: Mapping[str, Fleet], asks: Sequence[Ask], promise: float, load: float, number: int
) -> list[dict[str, Any]]:
    """Runs one round; returns a row per policy."""
    per_s = capacity(fleets["static"], asks)
    arriving = at_load(asks, per_s, load)
    rows = []
    for way in fleets if number % 2 else reversed(fleets):  # type: ignore[call-overload]
        answers = asyncio.run(at_times(partial(answered, fleets[way], {}), arriving))
        found = {"load": load, "round": number, "way": way, **summary(answers, promise, per_s)}
        ours = summary(simulated(arriving, promise if way == "slo" else 0.0, per_s), promise, per_s)
        found |= {f"{name} simulated": ours[name] for name in ("good", "late", "refused")}
        rows.append(found)
        print(json.dumps(found), file=sys.stderr)
    return rows


def read(path: Path, most: int) -> list[Ask]:
    found = enumerate(read_trace(path, most))
    return [
        Ask(each.time, min(MOST, max(8, each.num_tokens // TOKENS)), f"key-{number % KEYS}")
        for number, each in found
    ]


def at_load(asks: Sequence[Ask], per_s: float, load: float) -> list[Ask]:
    """Speeds the trace up to `load` times the capacity `per_s`, in prompt tokens per second."""
    seconds = sum(each.tokens for each in asks) / per_s / load
    scale = seconds / (asks[-1].time or 1.0)
    return [Ask(each.time * scale, each.tokens, each.key) for each in asks]


def mean(asks: Sequence[Ask]) -> float:
    return fmean(each.tokens for each in asks)


def cluster(model: Path, **router: Any) -> AbstractContextManager[Fleet]:
    keys = ",".join(f"key-{number}" for number in range(KEYS))
    router |= {"queue_timeout": QUEUE_TIMEOUT, "log_level": "warning", "api_key": keys}
    router["admin_api_key"] = "who-looks-at-nodes"
    options = {**OPTIONS, "max_num_batched_tokens": BATCH, "num_gpu_blocks_override": NUM_BLOCKS}
    return serving(model, router, kv_lease=60, **options)


def capacity(fleet: Fleet, asks: Sequence[Ask]) -> float:
    """Returns the prompt tokens that the cluster computes per second, for four clients."""
    some = asks[:MEASURED]
    began = time.monotonic()
    asyncio.run(closed_loop(partial(answered, fleet, MOST_PATIENT), some, 4))
    return sum(each.tokens for each in some) / (time.monotonic() - began)


async def answered(
    fleet: Fleet, headers: Mapping[str, str], session: aiohttp.ClientSession, ask: Ask
) -> Answer:
    body = {"prompt": random.choices(VOCABULARY, k=ask.tokens), "max_tokens": ANSWER}
    named = {"Authorization": f"Bearer {ask.key}", **headers}
    began = time.monotonic()
    seconds = await first_token(session, fleet, body, named, REFUSED)
    refused = seconds is None
    return Answer(ask, time.monotonic() - began if seconds is None else seconds, refused)


def simulated(asks: Sequence[Ask], slo_ttft: float, per_s: float) -> list[Answer]:
    """Serves the prompts by a prefill node that computes `per_s` tokens per second; `slo_ttft`: 0:
    none."""
    routing = RoutingConfig(queue_timeout=QUEUE_TIMEOUT, slo_ttft=slo_ttft)
    batches = SchedulerConfig(max_num_seqs=OPTIONS["max_num_seqs"], max_num_batched_tokens=BATCH)
    times, blocks = linear(per_s, STEP_S), NUM_BLOCKS
    setup = Setup("1P1D", times, load_policies(routing), routing, batches, blocks, SIZE)
    arrivals = [Arrival(each.time, each.tokens, (), ANSWER, client=each.key) for each in asks]
    ttft = {round(each.arrived, 6): each.ttft for each in simulate(setup, arrivals).answered}
    found = ((each, ttft.get(round(each.time, 6))) for each in asks)
    return [Answer(each, seconds or 0.0, refused=seconds is None) for each, seconds in found]


def summary(answers: Sequence[Answer], promise: float, per_s: float) -> dict[str, Any]:
    taken = [each for each in answers if not each.refused]
    good = sum(each.seconds <= max(promise, STRETCH * each.ask.tokens / per_s) for each in taken)
    ttft = sorted(each.seconds for each in taken)
    return {
        "tokens_per_s": round(per_s),
        "good": good,
        "late": len(taken) - good,
        "refused": len(answers) - len(taken),
        "starved": sum(each.seconds > QUEUE_TIMEOUT for each in answers),
        "ttft_p50_s": round(ttft[len(ttft) // 2], 2) if ttft else None,
        "ttft_p99_s": round(ttft[int(0.99 * len(ttft))], 2) if ttft else None,
    }


if __name__ == "__main__":
    sys.exit(main())
