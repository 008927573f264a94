"""Measures the CPU time of router and nodes per token and per request, with a model so small that
it hardly counts.

    python benchmarks/bench_cpu_per_token.py [--clients 1,8,32] [--json FILE]
    python benchmarks/bench_cpu_per_token.py --clients 8 --policy least-load,cost --rounds 5

Each policy has a cluster of its own (`pdserve up`, one prefill and one decode node) and closed-loop
clients that stream; several policies take turns. Each number of clients is measured with short and
with long answers: CPU = requests × a + tokens × b has then one solution, `a` in ms per request and
`b` in µs per token. `all` is everything divided by the tokens of the long answers. The last table
compares that between policies, by the least and the median of all rounds. CPU time is the kernel's
(`/proc/PID/task/*/stat`), by process and by thread; the clients' is not in it. Clients and cluster
share the host: its tokens/s are no throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.live import up  # noqa: E402

PROMPT = "Once there was a little dog who"
WARM_UP = 1.0  # seconds of load before anything counts
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")
ROLES = ("router", "prefill", "decode")
UP = {
    "dtype": "float32",
    "num_gpu_blocks_override": 1024,
    "max_num_seqs": 64,
    "cpu_threads": 1,
    "log_level": "warning",
}

# ---- the cluster ----


@contextmanager
def cluster(model: Path, options: dict[str, Any]) -> Iterator[tuple[int, dict[str, int]]]:
    """The HTTP port, and pids by role."""
    with up({"model": model, **UP, **options}) as (port, pid):
        yield port, pids_of(pid)


def pids_of(parent: int) -> dict[str, int]:
    found = {}
    for child in psutil.Process(parent).children():
        words = " ".join(child.cmdline())
        found |= {role: child.pid for role in ROLES if f"pdserve.{role}" in words}
    return found


def ticks(pid: int) -> Counter[str]:
    """CPU ticks of each thread of a process, by the thread's name; those that have ended are
    missing. `` is the process's own count."""
    found: Counter[str] = Counter({"": _ticks(Path(f"/proc/{pid}/stat"))[1]})
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            name, count = _ticks(stat)
        except (FileNotFoundError, ProcessLookupError):  # the thread ended
            continue
        found["main" if stat.parent.name == str(pid) else name] += count
    return found


def _ticks(stat: Path) -> tuple[str, int]:
    name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[11]) + int(fields[12])


# ---- the load ----


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, port: int, model: str, max_tokens: int) -> None:
        self._port = port
        self.max_tokens = max_tokens
        self._body = {"model": model, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.requests = 0
        self.events = 0
        self.first_ms: list[float] = []  # until the first event of each request
        self._begun = 0

    async def client(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        while True:
            self._begun += 1
            body = json.dumps(self._body | {"prompt": f"{PROMPT} {self._begun}"}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            await self._read(reader)
            self.requests += 1

    async def _read(self, reader: asyncio.StreamReader) -> None:
        tail, asked, is_first = b"", time.monotonic(), True
        while b"data: [DONE]\n\n\r\n0\r\n\r\n" not in tail:
            data = await reader.read(2**16)
            if not data or b'"error"' in data:
                raise SystemExit(f"a request failed: {data!r}")
            self.events += (count := data.count(b"data: "))
            if is_first and count:
                is_first = False
                self.first_ms.append(1e3 * (time.monotonic() - asked))
            tail = tail[-64:] + data


async def measure(
    port: int, pids: dict[str, int], model: str, clients: int, max_tokens: int, seconds: float
) -> dict[str, Any]:
    """CPU seconds by role and thread, with requests and tokens, under steady load."""
    load = Load(port, model, max_tokens)
    tasks = [asyncio.create_task(load.client()) for _ in range(clients)]
    try:
        await _sleep(WARM_UP, tasks)
        requests, began = load.requests, time.monotonic()
        before = {role: ticks(pid) for role, pid in pids.items()}
        await _sleep(seconds, tasks)
        while load.requests < requests + clients:  # a very busy host
            await _sleep(seconds, tasks)
        after = {role: ticks(pid) for role, pid in pids.items()}
        wall, requests = time.monotonic() - began, load.requests - requests
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    cpu = {role: {n: c * TICK_US for n, c in (after[role] - before[role]).items()} for role in pids}
    tokens = requests * max_tokens
    return {"requests": requests, "tokens": tokens, "tokens_per_s": tokens / wall, "cpu_us": cpu}


async def _sleep(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Fails as soon as a client does."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def shares(short: dict[str, Any], long: dict[str, Any], role: str) -> dict[str, float]:
    """µs per token and ms per request that explain both runs."""
    (r1, t1, c1), (r2, t2, c2) = (
        (run["requests"], run["tokens"], run["cpu_us"][role].get("", 0.0)) for run in (short, long)
    )
    determinant = r1 * t2 - r2 * t1
    return {
        "us_per_token": (r1 * c2 - r2 * c1) / determinant if determinant else 0.0,
        "ms_per_request": (c1 * t2 - c2 * t1) / determinant / 1e3 if determinant else 0.0,
        "us_per_token_in_all": c2 / max(t2, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "tests/models/llama-gqa")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--lengths", default="16,128", help="tokens of short and long answers")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--policy", default="least-load", help="of placement; several: in turns")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="of `pdserve up`: name=value")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    lengths = [int(each) for each in args.lengths.split(",")]
    options = dict(each.split("=", 1) for each in args.option)
    policies, rows = args.policy.split(","), []
    with ExitStack() as stack:
        clusters = {
            policy: stack.enter_context(
                cluster(args.model, {"prefill_policy": policy, "decode_policy": policy} | options)
            )
            for policy in policies
        }
        for number, clients in product(range(args.rounds), map(int, args.clients.split(","))):
            for policy in policies if number % 2 == 0 else reversed(policies):
                port, pids = clusters[policy]
                runs = [
                    asyncio.run(measure(port, pids, args.model.name, clients, length, args.seconds))
                    for length in lengths
                ]
                row = {"policy": policy, "round": number + 1, "clients": clients}
                row["roles"] = {role: shares(*runs, role) for role in pids}
                rows.append(row | {"short": runs[0], "long": runs[1]})
                report(rows[-1])
    if len(policies) > 1:
        compare(rows, policies)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


def compare(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> None:
    """Prints the router's CPU of each policy, and how much more that is than the first one's."""
    table = Table(title="the router's CPU")
    for column in ("clients", "policy", "µs per token in all: least", "median"):
        table.add_column(column, justify="right")
    for clients in dict.fromkeys(row["clients"] for row in rows):
        base: list[float] = []
        for policy in policies:
            own = [r for r in rows if (r["clients"], r["policy"]) == (clients, policy)]
            costs = [each["roles"]["router"]["us_per_token_in_all"] for each in own]
            found = [min(costs), median(costs)]
            base = base or found
            cells = (
                f"{x:.0f} ({100 * (x / y - 1):+.1f} %)" for x, y in zip(found, base, strict=True)
            )
            table.add_row(str(clients), policy, *cells)
    Console(width=120).print(table)


def report(row: dict[str, Any]) -> None:
    long = row["long"]
    load = f"{row['clients']} clients, {long['tokens_per_s']:,.0f} tokens/s"
    table = Table(title=f"{row['policy']}, {load}")
    for column in (
        "",
        "µs per token",
        "ms per request",
        "µs per token in all",
        "threads, µs per token",
    ):
        table.add_column(column, justify="left" if column.startswith("threads") else "right")
    for role, share in row["roles"].items():
        threads = Counter(long["cpu_us"][role])
        del threads[""]
        names = (f"{n} {c / max(long['tokens'], 1):.0f}" for n, c in threads.most_common(4))
        table.add_row(
            role,
            f"{share['us_per_token']:.0f}",
            f"{share['ms_per_request']:.2f}",
            f"{share['us_per_token_in_all']:.0f}",
            ", ".join(names),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
