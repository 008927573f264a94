"""A soak test with random faults: nodes are killed, frozen and restarted, the network is cut or
corrupts data, routers freeze or die, and hostile clients attack, all under load. Every answer must
equal the one of an undisturbed cluster.

    python benchmarks/chaos.py --seconds 60 --requests 200 --prefill 3 --decode 3

Starts a cluster on this host, sends every request once to learn the answers, then again and again
while faults happen. The exit code is 1 if a request was lost, hung or answered wrongly, if blocks
leaked, if a process ended by itself or grew, or if a stranger was admitted.

As root on Linux every node runs on its own host (a network namespace) behind a relay, and all gRPC
is mutual TLS, without which a flipped bit in a token would go unnoticed. Otherwise network faults
are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from secrets import token_hex
from threading import Thread
from time import monotonic
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.access import PROBE
from benchmarks.fleet import FAST, Fleet
from benchmarks.hosts import unavailable
from benchmarks.site import Site, make_certs, site_network
from benchmarks.soak.asks import POISON, Ask, make_asks
from benchmarks.soak.attack import Patience
from benchmarks.soak.edges import EDGE_KINDS
from benchmarks.soak.faults import (
    ATTACK_KINDS,
    CROWD_SETTLES,
    NODE_KINDS,
    ROUTER_KINDS,
    Faults,
    Kind,
    make_plan,
    targets_of,
)
from benchmarks.soak.gauge import PERIOD, Gauge
from benchmarks.soak.load import Load, clients
from benchmarks.soak.poisoned import poisoned
from benchmarks.soak.probe import (
    HEALTH,
    SHORT,
    Sample,
    mean_stages,
    milliseconds,
    percentiles,
    probing,
)
from benchmarks.soak.report import TIMES, Report, make_report, print_report
from benchmarks.soak.standing import Standing
from pdserve.common.config.router import RoutingConfig

MODEL = Path(__file__).parents[1] / "tests/models/llama-gqa"
NODE_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_gpu_blocks_override": 384,  # fewer than the load needs: sequences wait and are preempted
    "max_num_batched_tokens": 256,
    "max_num_seqs": 32,
    "cpu_threads": 1,
    "drain_timeout": 60,
}
KV_EVENTS = {  # at ports that hostile subscribers find
    "enable_kv_cache_events": True,
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
}
LONGEST_FAULT = 2 * FAST["heartbeat_timeout"]  # seconds: only some freezes exceed the time-out
KINDS: dict[str, Kind] = {
    **NODE_KINDS,
    **ROUTER_KINDS,
    **EDGE_KINDS,
    **ATTACK_KINDS,
}
ANSWERED = "a request of the load, until its end"
LATE = "the load's own event loop, too late by"
GIVE_BACK = 15.0  # seconds after the last answer for nodes to free what they hold


@dataclass(frozen=True, slots=True)
class Soak:
    """The parameters of a run. Equal parameters give the same requests and fault plan."""

    seconds: float = 60.0
    requests: int = 200  # in flight
    distinct: int = 210  # different requests, whose answers are learnt first
    max_tokens: tuple[int, int] = (8, 48)
    hang_ups: float = 0.05
    kinds: tuple[str, ...] = tuple(KINDS)
    period: float = 1.0  # seconds between two faults, on average
    longest: float = inf  # seconds of any fault
    seed: int = 0
    patience: Patience = field(default_factory=Patience)  # with requests of hostile clients

    def asks(self, vocab_size: int, never: int | None = None) -> list[Ask]:
        return make_asks(self.distinct, self.seed, self.max_tokens, vocab_size, never)


async def run(fleet: Fleet, soak: Soak, load: Load) -> Report:
    """Injects faults into a fleet while clients compare answers with the learnt ones."""
    faults, gauge, standing = Faults(fleet, soak.patience), Gauge(fleet), Standing(fleet)
    kinds = targets_of(fleet, {name: KINDS[name] for name in soak.kinds})
    plan = [
        replace(fault, seconds=min(fault.seconds, soak.longest))
        for fault in make_plan(kinds, soak.seconds, soak.period, LONGEST_FAULT, soak.seed)
    ]
    async with (
        faults.attackers.running(soak.kinds),
        gauge.watching(),
        standing.watching(),
        _probe(fleet) as samples,
    ):
        start = monotonic()
        event = faults.carry_out(kinds, plan)
        tally = await load.during(
            event,
            soak.requests,
            soak.hang_ups,
            soak.seed,
            excused=lambda router, since: faults.router_dead[router].ended_since(since),
            look=lambda: Thread(target=fleet.print_stacks).start(),
            stood_still=lambda router, *times: faults.router_frozen[router].seconds(*times),
        )
        if faults.crowds.ended_since(monotonic()):
            await asyncio.sleep(
                CROWD_SETTLES + 2 * PERIOD
            )  # for samples after the crowds have left
    seconds, leaked = monotonic() - start, await still_held(fleet)
    crashed = faults.crashed + fleet.crashed()
    return make_report(
        *(
            tally,
            seconds,
            faults.counts,
            leaked,
            crashed,
            faults.answers,
            gauge.growth(lambda at: faults.crowds.meet(at, at)),
        ),
        waits=_waits(samples, faults)
        | {ANSWERED: milliseconds(tally.seconds), LATE: milliseconds(gauge.late)},
        hostile=faults.waits,
        hung_attacks=faults.hung,
        stood=standing.longest(),
    )


def _probe(fleet: Fleet) -> AbstractAsyncContextManager[list[Sample]]:
    return probing(f"http://127.0.0.1:{fleet.ports['http']}", fleet.api_key(PROBE))


def _waits(samples: list[Sample], faults: Faults) -> dict[str, dict[str, float]]:
    """Returns milliseconds by request and percentile, while the first router was running."""
    dead, frozen = faults.router_dead["router"], faults.router_frozen["router"]

    def served(sample: Sample) -> bool:
        times = sample.at, sample.at + sample.seconds
        return not (dead.meet(*times) or frozen.meet(*times))

    def greedy(sample: Sample) -> bool:
        return served(sample) and faults.greed.meet(sample.at, sample.at + sample.seconds)

    def usual(sample: Sample) -> bool:
        return served(sample) and not greedy(sample)

    found = {
        HEALTH: percentiles(samples, HEALTH, served),
        "  of that, the router without a CPU": percentiles(
            samples, HEALTH, served, lambda each: each.router_starved
        ),
        "  of that, the client without a CPU": percentiles(
            samples, HEALTH, served, lambda each: each.probe_starved
        ),
        "  the rest of each": percentiles(samples, HEALTH, served, lambda each: each.served),
        SHORT: percentiles(samples, SHORT, usual),
        "  mean of its longest stages": mean_stages(samples, usual),
        f"{SHORT} beside a greedy client": percentiles(samples, SHORT, greedy),
        "  and of its longest stages": mean_stages(samples, greedy),
    }
    alone, beside = found[SHORT], found[f"{SHORT} beside a greedy client"]
    found[TIMES] = {name: round(beside[name] / alone[name], 1) for name in alone if name in beside}
    return {name: values for name, values in found.items() if values}


async def learn_and_run(fleet: Fleet, soak: Soak, asks: Sequence[Ask]) -> Report:
    """Learns the answers, then runs the soak. Raises Lost if a request fails without a fault."""
    async with clients(fleet, asks, [*fleet.routers]) as load:
        await load.learn()
        return await run(fleet, soak, load)


async def still_held(fleet: Fleet) -> dict[str, int]:
    """Returns what nodes still hold after GIVE_BACK seconds."""
    deadline = monotonic() + GIVE_BACK
    while (held := await asyncio.to_thread(fleet.held)) and monotonic() < deadline:
        await asyncio.sleep(0.2)
    return held


@contextmanager
def started(
    model: Path,
    sizes: Mapping[str, int],
    requests: int,
    networked: bool = False,
    routers: int = 1,
    share_cores: bool = False,
    heartbeat_timeout: float = FAST["heartbeat_timeout"],
) -> Iterator[Fleet]:
    """Runs a fleet in a temporary folder; yields it once it is ready. Its model gives NaN for the
    token `POISON`. `share_cores`: nodes lend each other cores, like those of `pdserve up`."""
    usual = RoutingConfig()
    places = ceil(requests / usual.max_client_share) + 1  # so that one client gets that many
    places = max(places, usual.max_concurrent_requests)
    # Three clients share the queue: the load's equal part holds all its requests.
    queued = max(3 * requests, usual.max_queued_requests)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-chaos-")))
        log, environment = folder / "log", {"TMPDIR": str(folder)}
        secured: dict[str, Any] = {"cluster_key": token_hex(32)}
        options = dict(NODE_OPTIONS, kv_events_config=json.dumps(KV_EVENTS))
        if share_cores:
            options["share_cores"] = folder / "cores"
        make: Callable[..., Fleet] = Fleet
        if networked:
            secured |= make_certs(folder / "certs")
            options |= {"kv_connector": "tcp", "kv_connector_config": '{"tls": true}'}
            make = partial(Site, *stack.enter_context(site_network()))
        keys = ",".join(token_hex(16) for _ in range(3))  # one per client of fleet.py
        known = {"api_key": keys, "admin_api_key": token_hex(16)}
        router = {"max_concurrent_requests": places, "max_queued_requests": queued}
        router |= known | secured | {"heartbeat_timeout": heartbeat_timeout}
        fleet = make(
            *(poisoned(model, folder / model.name), log, environment, router),
            routers=routers,
            **options,
            **secured,
        )
        stack.callback(fleet.stop)
        for name in fleet.routers:
            fleet.start_router(name=name)
        for role, size in sizes.items():
            for _ in range(size):
                fleet.start_node(role)
        fleet.wait_ready()
        yield fleet


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the faults")
    parser.add_argument("--requests", type=int, default=200, help="requests in flight")
    parser.add_argument("--routers", type=int, default=1, help="routers of the same nodes")
    parser.add_argument("--prefill", type=int, default=3, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=3, help="decode nodes")
    parser.add_argument("--both", type=int, default=0, help="nodes of both roles")
    parser.add_argument(
        "--share-cores", action="store_true", help="nodes lend each other their cores"
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=FAST["heartbeat_timeout"],
        help="seconds of silence after which a node gets no requests; more on a machine where "
        "processes wait that long for a CPU",
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and faults")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two faults")
    parser.add_argument(
        "--faults",
        type=_kinds,
        default=tuple(KINDS),
        help=f"kinds (default: all that this machine allows): {','.join(KINDS)}",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the cluster's log")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    return parser.parse_args(argv)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - KINDS.keys():
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return kinds


def possible(kinds: Sequence[str], console: Console) -> tuple[str, ...]:
    """Returns the faults that this machine allows; prints why the others are left out."""
    reason = unavailable() if EDGE_KINDS.keys() & set(kinds) else ""
    left_out = [kind for kind in kinds if reason and kind in EDGE_KINDS]
    if left_out:
        console.print(f"left out: {', '.join(left_out)} ({reason})", markup=False)
    return tuple(kind for kind in kinds if kind not in left_out)


def main(argv: Sequence[str] | None = None) -> int:
    args, console = parse_args(argv), Console()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the cluster, too
    kinds = possible(args.faults, console)
    soak = Soak(
        seconds=args.seconds,
        requests=args.requests,
        kinds=kinds,
        period=args.period,
        seed=args.seed,
    )
    networked = bool(EDGE_KINDS.keys() & set(kinds))
    sizes = {"prefill": args.prefill, "decode": args.decode, "both": args.both}
    options = (networked, args.routers, args.share_cores, args.heartbeat_timeout)
    with started(args.model, sizes, args.requests, *options) as fleet:
        try:
            asks = soak.asks(vocab_size(args.model), never=POISON)
            report = asyncio.run(learn_and_run(fleet, soak, asks))
        finally:
            if args.log:
                args.log.write_bytes(fleet.log_path.read_bytes())
    print_report(report, console)
    if args.json:
        config = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"config": config, **report.as_json()}, indent=2) + "\n")
    return 1 if any(report.failures.values()) else 0


def vocab_size(model: Path) -> int:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return int(config["vocab_size"])


if __name__ == "__main__":
    sys.exit(main())
