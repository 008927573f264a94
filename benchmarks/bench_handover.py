"""Times the stages of a request with a KV transfer: closed-loop clients and a cluster on one host.

    python benchmarks/bench_handover.py [--pairs 1] [--clients 1,8,32] [--rates 10,20] [--long 2000]

A row is a station of a request, by the timelines that the router gives with its answers. Data and
commit come side by side: one row says how long a commit waited for the data, another how long the
data waited for the commit. `waits for a core` is the share of a process's time in which it could
have run and did not, by the kernel's scheduler (`schedstat`): with more to do than cores, a queue
is somewhere.

Closed-loop clients keep the cores busy, however many there are: with `--rates` requests come at
random, so many a second, whether or not earlier ones are answered.

With `--long N`, prompts of N tokens on the embedded model, one at a time: once computed in chunks,
whose KV travels while the next one is computed, and once in one piece, whose KV travels
afterwards. `exposed` is what the client waits for it: from the first token to all KV landed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.fleet import Fleet
from benchmarks.live import at_times, closed_loop, serving
from pdserve.demo_model.embedded import ensure_embedded_model

TINY = Path(__file__).parent.parent / "tests/models/llama-gqa"
RATE_REQUESTS = 200  # that arrive at each rate
Line = Mapping[str, float]
STATIONS: dict[str, Callable[[Line], float]] = {
    "accepted → placed": lambda line: line["queued"],
    "placed → reserved": lambda line: line["reserved"] - line["queued"],
    "reserved → first token": lambda line: line["first_token"] - line["reserved"],
    "  queue of the prefill node": lambda line: line["prefill_queue_seconds"],
    "  its compute": lambda line: line["prefill_seconds"],
    "  calls": lambda line: (
        line["first_token"] - line["reserved"]
        - line["prefill_queue_seconds"] - line["prefill_seconds"]
    ),
    "first token → landed": lambda line: line["transferred"] - line["first_token"],
    "  ticket → data in place": lambda line: line["data_seconds"],
    "  ticket → committed": lambda line: line["commit_seconds"],
    "  committed, without data": lambda line: _later(line, "data_seconds", "commit_seconds"),
    "  data in place, uncommitted": lambda line: _later(line, "commit_seconds", "data_seconds"),
    "  verification": lambda line: line["verify_seconds"],
    "first run sent → acknowledged": lambda line: line["transfer_seconds"],
    "landed → finished": lambda line: line["finished"] - line["transferred"],
}  # fmt: skip


def _later(line: Line, one: str, other: str) -> float:
    """Returns by how much one was later than the other, 0 if it was not. The data and the commit
    come by different ways, and either may be first."""
    return max(0.0, line[one] - line[other])


# ---- load ----


class Due(NamedTuple):
    time: float  # seconds


class Load:
    """Clients of one router; `lines` are the timelines of the answers."""

    def __init__(self, url: str, input_len: int, output_len: int, vocabulary: int) -> None:
        self._url = url
        self._lengths = input_len, output_len
        self._vocabulary = vocabulary
        self._random = random.Random(7)
        self.lines: list[Line] = []

    async def run(self, clients: int, requests: int) -> None:
        """Runs closed-loop clients: each has a request under way until `requests` were answered."""
        self.lines += await closed_loop(self._ask, range(requests), clients)

    async def arrive(self, rate: float, requests: int) -> None:
        """Sends `requests` at random times, on average `rate` a second (a Poisson process)."""
        gaps = (self._random.expovariate(rate) for _ in range(requests))
        self.lines += await at_times(self._ask, [Due(time) for time in accumulate(gaps)])

    async def _ask(self, session: aiohttp.ClientSession, _: object) -> Line:
        input_len, output_len = self._lengths
        prompt = [self._random.randrange(1, self._vocabulary) for _ in range(input_len)]
        body = {
            "model": "bench", "prompt": prompt, "max_tokens": output_len,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        last = b""
        async with session.post(
            f"{self._url}/v1/completions", json=body, headers={"X-Pdserve-Timeline": "1"}
        ) as response:
            response.raise_for_status()
            async for event in response.content:
                last = event if event.startswith(b"data: {") else last
        line: Line = json.loads(last[6:])["pdserve"]["timeline"]
        return line


# ---- a cluster ----


def cluster(model: Path, pairs: int, **options: Any) -> AbstractContextManager[Fleet]:
    """A router and `pairs` of nodes, ready."""
    named = {"served_model_name": "bench"}
    return serving(model, named, pairs, cpu_threads=1, kv_lease=30, **named, **options)


def measure(
    fleet: Fleet,
    load: Load,
    name: str,
    warm: Coroutine[Any, Any, None],
    work: Coroutine[Any, Any, None],
) -> dict[str, Any]:
    """Runs `warm`, after which connections are made and code is warm, and measures `work`."""
    asyncio.run(warm)
    load.lines.clear()
    before, start = _cores(fleet), time.monotonic()
    asyncio.run(work)
    seconds = time.monotonic() - start
    return {
        "load": name,
        "requests": len(load.lines),
        "requests_per_second": len(load.lines) / seconds,
        "stations_ms": stations(load.lines),
        "processes": _shares(before, _cores(fleet), seconds),
    }


def stations(lines: Sequence[Line]) -> dict[str, dict[str, float]]:
    """Milliseconds, by station and quantile."""
    found = {}
    for name, seconds in STATIONS.items():
        values = sorted(1e3 * seconds(line) for line in lines)
        found[name] = {f"p{q}": _quantile(values, q) for q in (50, 90, 99)}
    return found


def _quantile(values: Sequence[float], percent: int) -> float:
    return values[min(len(values) - 1, len(values) * percent // 100)]


def _cores(fleet: Fleet) -> dict[str, list[tuple[int, int]]]:
    """(nanoseconds run, nanoseconds waited for a core) of each process, its main thread first:
    the event loop."""
    return {
        name: [_schedstat(pid, pid), _sum(_schedstat(pid, each) for each in _threads(pid))]
        for name, pid in fleet.pids.items()
    }


def _threads(pid: int) -> list[int]:
    return [int(each) for each in os.listdir(f"/proc/{pid}/task")]


def _schedstat(pid: int, thread: int) -> tuple[int, int]:
    try:
        ran, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # the thread ended
        return 0, 0
    return int(ran), int(waited)


def _sum(pairs: Iterator[tuple[int, int]]) -> tuple[int, int]:
    ran, waited = zip(*pairs, strict=True)
    return sum(ran), sum(waited)


def _shares(before: Any, after: Any, seconds: float) -> dict[str, dict[str, float]]:
    """Returns, per process: cores used by its event loop and in total, and the share of the loop's
    time in which it waited for a core."""
    found = {}
    for name in after:
        (loop, every) = (
            tuple(b - a for a, b in zip(*each, strict=True))
            for each in zip(before[name], after[name], strict=True)
        )
        found[name] = {
            "loop_cores": loop[0] / 1e9 / seconds,
            "cores": every[0] / 1e9 / seconds,
            "loop_waits_for_a_core": loop[1] / max(1, sum(loop)),
            "waits_for_a_core": every[1] / max(1, sum(every)),
        }
    return found


# ---- long prompts ----


def exposed(model: Path, tokens: int, chunk: int, requests: int) -> tuple[float, float]:
    """Milliseconds from the first token to all KV landed, and of them for comparing digests;
    medians."""
    limits = {"max_num_batched_tokens": chunk, "max_model_len": tokens + 64}
    blocks = 4 * (tokens // 16 + 8)
    with cluster(model, 1, num_gpu_blocks_override=blocks, **limits) as fleet:
        load = Load(f"http://127.0.0.1:{fleet.ports['http']}", tokens, 2, 1000)
        asyncio.run(load.run(1, 1 + requests))
        lines = load.lines[1:]
    whole = (line["transferred"] - line["first_token"] for line in lines)
    return tuple(
        1e3 * statistics.median(each)
        for each in (whole, [line["verify_seconds"] for line in lines])
    )


def measure_long(model: Path, tokens: int, chunk: int, requests: int) -> dict[str, float]:
    whole, whole_verified = exposed(model, tokens, tokens + 1, requests)
    chunked, verified = exposed(model, tokens, chunk, requests)
    return {
        "tokens": tokens, "chunk": chunk, "exposed_share": chunked / whole,
        "unoverlapped_ms": whole, "unoverlapped_verify_ms": whole_verified,
        "exposed_ms": chunked, "exposed_verify_ms": verified,
    }  # fmt: skip


# ---- output ----


def show(results: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table("ms, p50 / p90 / p99")
    for result in results:
        table.add_column(result["load"], justify="right")
    for name in STATIONS:
        cells = (result["stations_ms"][name].values() for result in results)
        table.add_row(name, *(" / ".join(f"{each:.1f}" for each in cell) for cell in cells))
    for name in results[0]["processes"]:
        shares = (result["processes"][name] for result in results)
        cells = (f"{s['cores']:.2f} / {s['loop_waits_for_a_core']:.0%}" for s in shares)
        table.add_row(f"{name}: cores / its loop waits for one", *cells)
    table.add_row("requests a second", *(f"{r['requests_per_second']:.1f}" for r in results))
    console.print(table)


def show_long(result: Mapping[str, float], console: Console) -> None:
    console.print(
        f"{result['tokens']} tokens, first token → landed: in one piece "
        f"{result['unoverlapped_ms']:.1f} ms ({result['unoverlapped_verify_ms']:.1f} of it "
        f"verification), in chunks of {result['chunk']} {result['exposed_ms']:.1f} ms "
        f"({result['exposed_verify_ms']:.1f}): {result['exposed_share']:.0%} exposed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--vocab-size", type=int, default=512, help="ids of prompts are below it")
    parser.add_argument("--pairs", type=int, default=1, help="of a prefill and a decode node")
    parser.add_argument("--clients", default="1,8,32", help="closed-loop clients, by commas")
    parser.add_argument("--rates", default="", help="requests a second that arrive at random, too")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument(
        "--requests", type=int, default=8, help="of each client; 30 in all at least, 200 by a rate"
    )
    parser.add_argument("--long", type=int, default=0, help="tokens of a prompt in chunks; 0: none")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk of it")
    parser.add_argument("--connector", default="auto", help="--kv-connector of the nodes")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    results: dict[str, Any] = {"args": vars(args) | {"model": str(args.model)}}
    console = Console()
    counts = [int(each) for each in args.clients.split(",") if each]
    rates = [float(each) for each in args.rates.split(",") if each]
    if counts or rates:
        with cluster(args.model, args.pairs, kv_connector=args.connector) as fleet:
            url = f"http://127.0.0.1:{fleet.ports['http']}"
            load = Load(url, args.input_len, args.output_len, args.vocab_size)
            found: list[dict[str, Any]] = []
            for count in counts:
                work = load.run(count, max(30, args.requests * count))
                found.append(
                    measure(fleet, load, f"{count} clients", load.run(count, 2 * count), work)
                )
            for rate in rates:
                work = load.arrive(rate, RATE_REQUESTS)
                found.append(measure(fleet, load, f"{rate:g} a second", load.run(8, 16), work))
        results["served"] = found
        show(found, console)
    if args.long:
        results["long"] = measure_long(ensure_embedded_model(), args.long, args.chunk, 3)
        show_long(results["long"], console)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
