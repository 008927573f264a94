"""A soak with random faults: nodes are killed, frozen and restarted under load, and every answer
must be the one that a cluster left alone gives.

    python benchmarks/chaos.py --seconds 60 --requests 200 --prefill 3 --decode 3

Starts a cluster of its own on this host, asks everything once, then once more and again while
nodes fail. The exit code is 1 when a request was lost or answered wrongly, when blocks were not
given back, or when a node ended by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fleet import FAST, Fleet
from benchmarks.soak.asks import Ask, make_asks
from benchmarks.soak.faults import KINDS, Faults, make_plan
from benchmarks.soak.load import Load, clients
from benchmarks.soak.report import Report, make_report, print_report

MODEL = Path(__file__).parents[1] / "tests/models/llama-gqa"
NODE_OPTIONS = {
    "dtype": "float32",
    "num_gpu_blocks_override": 384,  # fewer than the load would like: sequences wait, some restart
    "max_num_batched_tokens": 256,
    "max_num_seqs": 32,
    "cpu_threads": 1,
    "kv_lease": 3,
    "drain_timeout": 60,
}
LONGEST_FAULT = 2 * FAST["heartbeat_timeout"]  # seconds: some freezes are noticed, some are not
GIVE_BACK = 15.0  # seconds after the last answer, in which nodes give back what they hold


@dataclass(frozen=True, slots=True)
class Soak:
    """What a run is. Equal ones ask the same and plan the same faults."""

    seconds: float = 60.0
    requests: int = 200  # in flight
    distinct: int = 210  # requests whose answers are known
    max_tokens: tuple[int, int] = (8, 48)
    hang_ups: float = 0.05
    kinds: tuple[str, ...] = tuple(KINDS)
    period: float = 1.0  # seconds between two faults, on average
    seed: int = 0

    def asks(self, vocab_size: int) -> list[Ask]:
        return make_asks(self.distinct, self.seed, self.max_tokens, vocab_size)


async def run(fleet: Fleet, soak: Soak, load: Load) -> Report:
    """Lets nodes of a fleet fail while clients who have learnt the answers ask."""
    faults = Faults(fleet)
    plan = make_plan(soak.kinds, soak.seconds, soak.period, LONGEST_FAULT, soak.seed)
    start = monotonic()
    tally = await load.during(faults.carry_out(plan), soak.requests, soak.hang_ups, soak.seed)
    seconds = monotonic() - start
    return make_report(tally, seconds, faults.counts, await still_held(fleet), fleet.crashed())


async def learn_and_run(fleet: Fleet, soak: Soak, asks: Sequence[Ask]) -> Report:
    """Raises Lost when it fails without a fault."""
    async with clients(fleet, asks) as load:
        await load.learn()
        return await run(fleet, soak, load)


async def still_held(fleet: Fleet) -> dict[str, int]:
    """What nodes have not given back when they have had the time to."""
    deadline = monotonic() + GIVE_BACK
    while (held := await asyncio.to_thread(fleet.held)) and monotonic() < deadline:
        await asyncio.sleep(0.2)
    return held


@contextmanager
def started(model: Path, prefill: int, decode: int, requests: int) -> Iterator[Fleet]:
    """A fleet of this size, ready, in a folder that vanishes with it."""
    with tempfile.TemporaryDirectory(prefix="pdserve-chaos-") as folder:
        places = {"max_concurrent_requests": requests + 1, "max_client_share": 1}
        log, environment = Path(folder) / "log", {"TMPDIR": folder}
        fleet = Fleet(model, log, environment, places, **NODE_OPTIONS)
        try:
            fleet.start_router()
            for role, size in (("prefill", prefill), ("decode", decode)):
                for _ in range(size):
                    fleet.start_node(role)
            fleet.wait_ready()
            yield fleet
        finally:
            fleet.stop()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="time in which nodes fail")
    parser.add_argument("--requests", type=int, default=200, help="requests in flight")
    parser.add_argument("--prefill", type=int, default=3, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=3, help="decode nodes")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the faults")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two faults")
    parser.add_argument(
        "--faults", type=_kinds, default=tuple(KINDS), help=f"kinds: {','.join(KINDS)}"
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the cluster's log")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    return parser.parse_args(argv)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - KINDS.keys():
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return kinds


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    soak = Soak(
        seconds=args.seconds,
        requests=args.requests,
        kinds=args.faults,
        period=args.period,
        seed=args.seed,
    )
    with started(args.model, args.prefill, args.decode, args.requests) as fleet:
        report = asyncio.run(learn_and_run(fleet, soak, soak.asks(vocab_size(args.model))))
        if args.log:
            args.log.write_bytes(fleet.log_path.read_bytes())
    print_report(report, Console())
    if args.json:
        config = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"config": config, **report.as_json()}, indent=2) + "\n")
    return 1 if any(report.failures.values()) else 0


def vocab_size(model: Path) -> int:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return int(config["vocab_size"])


if __name__ == "__main__":
    sys.exit(main())
