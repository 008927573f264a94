"""Compares predictions of `pdserve simulate` with real clusters of the same layouts on this host.

    python benchmarks/bench_simulated_live.py [--layouts 1P1D,2P1D] [--requests 30] [--json FILE]

After a calibration, each layout gets a cluster and the same synthetic prompts, in an open loop. The
nodes share this host's cores, which the simulation does not model: with more nodes than cores, or
with changing other load, the two differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from pdserve import LLM
from pdserve.common.config.router import RoutingConfig
from pdserve.common.config.simulate import CalibrateConfig
from pdserve.common.core.block_hash import hash_blocks
from pdserve.router.cluster.placement import load_policies
from pdserve.simulate.calibrate import ONE_OF_EACH, VOCABULARY, Points, measure
from pdserve.simulate.calibration import Calibration
from pdserve.simulate.cluster import ROLES, Setup, read_layout, simulate
from pdserve.simulate.outcome import Answered, percentile, table
from pdserve.simulate.workloads import Arrival

SIZE = 16  # tokens of a block
COUNTS = {"P": "prefill", "D": "decode", "B": "both"}
KEY = "bench"
OPTIONS = {"api_key": KEY} | {
    key: value for key, value in ONE_OF_EACH.items() if key not in COUNTS.values()
}
POINTS = CalibrateConfig(
    chunk="16,64,256", cached="0,256", batch="1,2,4", context="64,320", repetitions=2
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", help="a checkpoint folder (default: the embedded model)")
    add("--layouts", default="1P1D,2P1D,1P2D,2P2D,1B,2B")
    add("--requests", type=int, default=30)
    add("--per-s", type=float, default=0.7)
    add("--json", type=Path)
    args = parser.parse_args(argv)
    asks = made(args.requests, args.per_s)
    rows = []
    for layout in args.layouts.split(","):
        rows.append(compared(layout, args.model, asks, calibrated(args.model)))
        print(json.dumps(rows[-1]), file=sys.stderr)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


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
    """Makes prompts of 40 to 300 tokens; every second one begins like an earlier one."""
    chance, time, known, found = random.Random(1), 0.0, list[list[int]](), list[Ask]()
    for number in range(requests):
        time += chance.expovariate(per_s)
        begin = chance.choice(known) if number % 2 else []
        prompt = [*begin, *chance.choices(VOCABULARY, k=chance.randrange(40, 160))][:300]
        known.append(prompt)
        found.append(Ask(time, prompt, chance.randrange(8, 33)))
    return found


def calibrated(model: str | None) -> Calibration:
    with LLM(model, cpu_threads=1, **ONE_OF_EACH) as llm:
        return measure(llm, Points(POINTS), POINTS)


def compared(
    layout: str, model: str | None, asks: Sequence[Ask], times: Calibration
) -> dict[str, Any]:
    """Returns a row: live and simulated milliseconds, and their difference in percent."""
    roles = [role for role, _ in read_layout(layout)]
    counts = {COUNTS[letter]: roles.count(role) for letter, role in ROLES.items()}
    with LLM(model, cpu_threads=1, **OPTIONS, **counts) as llm:
        live = asyncio.run(replay(llm.url, asks))
    setup = Setup(layout, times, load_policies(RoutingConfig()), block_size=SIZE)
    simulated = simulate(setup, [ask.arrival for ask in asks]).answered
    row: dict[str, Any] = {"layout": layout}
    for name, read in (("ttft", lambda each: each.ttft), ("tpot", lambda each: each.tpot)):
        for share in (0.5, 0.99):
            ours, theirs = (
                percentile(sorted(map(read, found)), share) or 0.0 for found in (simulated, live)
            )
            label = f"{name} p{100 * share:.0f}"
            row[f"{label} live"] = round(1e3 * theirs)
            row[f"{label} simulated"] = round(1e3 * ours)
            row[f"{label} off"] = f"{100 * (ours / theirs - 1):+.0f} %"
    return row


async def replay(url: str, asks: Sequence[Ask]) -> list[Answered]:
    """Sends each request at its time; returns when each answer began and ended."""
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:
        async with session.get(f"{url}/v1/models") as answer:
            name = (await answer.json())["data"][0]["id"]

        async def one(ask: Ask) -> Answered:
            body = {"model": name, "prompt": ask.prompt, "temperature": 0, "ignore_eos": True}
            body["max_tokens"] = ask.output_tokens
            headers, begun = {"X-PDServe-Timeline": "1"}, loop.time()
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                line = (await answer.json())["pdserve"]["timeline"]
            first, ended = begun + line["first_token"], begun + line["finished"]
            return Answered(begun, first, ended, ask.output_tokens)

        await one(asks[0])  # opens the connections
        start, tasks = loop.time(), []
        for ask in asks:
            await asyncio.sleep(start + ask.time - loop.time())
            tasks.append(loop.create_task(one(ask)))
        return await asyncio.gather(*tasks)


if __name__ == "__main__":
    sys.exit(main())
