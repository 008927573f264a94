"""Measures the router while many large bodies arrive: its memory, and the latency of a small
request. Needs no node and no GPU.

    python benchmarks/bench_bodies.py --model FOLDER [--bodies 100] [--megabytes 30] [--json FILE]

Prints, for each kind of body, the answers by status, the router's memory before, at its peak and
after, its helpers' memory, and the latency of `GET /health`, sent every 20 ms meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import psutil

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Figures:
    kind: str
    statuses: dict[str, int]
    seconds: float
    rss_before: float  # MiB
    rss_peak: float
    rss_after: float
    helpers_peak: float
    health_p50: float  # ms
    health_p99: float
    health_max: float


def body(kind: str, size: int) -> bytes:
    """Returns about `size` bytes of JSON."""
    if kind == "text":
        return json.dumps({"prompt": "once upon a time " * (size // 17)}).encode()
    if kind == "lists":
        return b'{"prompt": [' + b"[1]," * (size // 4) + b"[1]]}"
    if kind == "ids":
        return b'{"prompt": [' + b"7," * (size // 2) + b"7]}"
    if kind == "messages":
        message = b'{"role":"user","content":"a"},'
        return b'{"messages": [' + message * (size // len(message)) + message[:-1] + b"]}"
    raise ValueError(kind)


KINDS = ("text", "lists", "ids", "messages")


@contextmanager
def router(
    model: str, *options: str, stderr: int = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Runs a router without nodes; yields it and its port."""
    with tempfile.TemporaryDirectory() as folder:
        ports = Path(folder, "ports.json")
        command = [sys.executable, "-m", "pdserve.router", "--model", model, "--port", "0"]
        command += ["--grpc-port", "0", "--registry-port", "0", "--ports-file", str(ports)]
        process = subprocess.Popen([*command, *options], stderr=stderr)
        try:
            deadline = time.monotonic() + 60
            while not (ports.exists() and ports.stat().st_size):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the router did not start")
                time.sleep(0.05)
            yield process, json.loads(ports.read_text())["http"]
        finally:
            process.terminate()
            process.wait(30)


async def measure(pid: int, port: int, kind: str, count: int, size: int) -> Figures:
    """Sends `count` bodies concurrently from another process, and measures the router."""
    process = psutil.Process(pid)
    before, start = _mib(process), time.monotonic()
    attack = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--attack", kind, "--port", str(port)),
        *("--bodies", str(count), "--bytes", str(size)),
        stdout=asyncio.subprocess.PIPE,
    )
    ended = asyncio.create_task(attack.communicate())
    peak, helpers, waits = before, 0.0, []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        while not ended.done():
            asked = time.perf_counter()
            async with session.get(f"http://127.0.0.1:{port}/health") as response:
                assert response.status == 200
            waits.append(1e3 * (time.perf_counter() - asked))
            peak = max(peak, _mib(process))
            helpers = max(helpers, sum(_mib(child) for child in process.children(recursive=True)))
            await asyncio.sleep(0.02)
    output, _ = await ended
    waits.sort()
    return Figures(
        kind, json.loads(output), time.monotonic() - start, before, peak, _mib(process), helpers,
        waits[len(waits) // 2], waits[len(waits) * 99 // 100], waits[-1],
    )  # fmt: skip


def _mib(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss / MIB)
    except psutil.Error:
        return 0.0


async def attack(port: int, kind: str, count: int, size: int) -> Counter[str]:
    raw = body(kind, size)
    path = "/v1/chat/completions" if kind == "messages" else "/v1/completions"
    statuses: Counter[str] = Counter()

    async def send(session: aiohttp.ClientSession) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            url = f"http://127.0.0.1:{port}{path}"
            async with session.post(url, data=raw, headers=headers) as response:
                statuses[str(response.status)] += 1
        except aiohttp.ClientError as error:
            statuses[type(error).__name__] += 1

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(send(session) for _ in range(count)))
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="folder of a checkpoint")
    parser.add_argument("--bodies", type=int, default=100)
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        os.nice(5)  # it competes with what it measures
        print(json.dumps(asyncio.run(attack(args.port, args.attack, args.bodies, args.bytes))))
        return
    figures = []
    with router(args.model) as (process, port):
        for kind in KINDS:
            size = int(args.megabytes * MIB)
            figures.append(asyncio.run(measure(process.pid, port, kind, args.bodies, size)))
            print(_line(figures[-1]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(each) for each in figures], indent=2))


def _line(f: Figures) -> str:
    return (
        f"{f.kind:9} {f.statuses} in {f.seconds:.1f} s; router {f.rss_before:.0f} → "
        f"{f.rss_peak:.0f} → {f.rss_after:.0f} MiB, helpers ≤ {f.helpers_peak:.0f} MiB; /health "
        f"p50 {f.health_p50:.1f} p99 {f.health_p99:.1f} max {f.health_max:.1f} ms"
    )


if __name__ == "__main__":
    main()
