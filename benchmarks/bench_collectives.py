"""Measures the collectives between ranks of this host, over each transport.

Two limits measured in the same run are shown beside the figures: a plain memory copy, and the round
trip of a byte between two processes over pipes (two wake-ups). The last rows are the all-reduces of
a one-token decode step in a model of 30 layers (SmolLM2-135M): two per layer.

    python benchmarks/bench_collectives.py [--ranks 2,4] [--communicators shm,gloo] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace

import msgspec
import torch
from limits import memcpy_limit
from rank_steps import step_all
from rich.console import Console
from rich.table import Table

from pdserve.common.distributed.check import CheckConfig, CheckReport, CheckWorker
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.measure import Figure, time_calls

SIZES = (256, 2304, 65_536, 1 << 20, 16 << 20)
LAYERS, HIDDEN = 30, 576


@dataclass(frozen=True)
class Result:
    ranks: int
    transport: str
    figure: Figure


class BenchWorker(CheckWorker):
    """A rank of cluster-check that also measures the all-reduces of a decode step."""

    def step(self, message: bytes) -> bytes:
        report = msgspec.msgpack.decode(super().step(message), type=CheckReport)
        figure = _decode_step(self.state.tp, self.config.seconds)
        return msgspec.msgpack.encode(replace(report, figures=[*report.figures, figure]))


def _decode_step(group: GroupCoordinator, seconds: float) -> Figure:
    hidden = torch.zeros(1, HIDDEN)

    def sums() -> None:
        for _ in range(2 * LAYERS):
            group.all_reduce(hidden)

    latency = time_calls(group, sums, seconds)
    nbytes = 2 * LAYERS * hidden.nbytes
    return Figure("tp", f"{2 * LAYERS} all_reduce", nbytes, latency * 1e6, nbytes / latency / 1e9)


def run(ranks: int, communicator: str, seconds: float) -> list[Result]:
    config = CheckConfig(ranks, communicator=communicator, sizes=SIZES, seconds=seconds)
    (answer,) = asyncio.run(step_all("bench_collectives:BenchWorker", ranks, config, [b""]))
    report = msgspec.msgpack.decode(answer, type=CheckReport)
    if report.failures:
        raise SystemExit(f"wrong results over {communicator}: {report.failures[0]}")
    return [Result(ranks, communicator, figure) for figure in report.figures]


def pipe_limit(seconds: float) -> float:
    """Returns the microseconds of a byte's round trip to another process."""
    (their_end, our_end), (our_read, their_write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(our_end)
        while byte := os.read(their_end, 1):
            os.write(their_write, byte)
        os._exit(0)
    os.close(their_end)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        os.write(our_end, b".")
        os.read(our_read, 1)
        times.append(time.perf_counter() - started)
    os.close(our_end)
    os.waitpid(child, 0)
    return statistics.median(times) * 1e6


def show(results: list[Result], memcpy: float, pipe: float) -> None:
    title = f"limits: memcpy {memcpy:.1f} GB/s, round trip over pipes {pipe:.0f} µs"
    table = Table(title=title)
    for column in ("ranks", "over", "operation", "bytes", "µs", "GB/s", "of memcpy"):
        table.add_column(column, justify="left" if column in ("over", "operation") else "right")
    for each in results:
        figure = each.figure
        speed = f"{figure.gb_per_s:.3f}", f"{figure.gb_per_s / memcpy:.0%}"
        table.add_row(
            *(str(each.ranks), each.transport, figure.operation, str(figure.nbytes)),
            *(f"{figure.latency_us:.0f}", *speed),
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,4", help="sizes of the group, separated by commas")
    parser.add_argument("--communicators", default="shm,gloo", help="separated by commas")
    parser.add_argument("--seconds", type=float, default=0.2, help="per operation and size")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    pipe, memcpy = pipe_limit(args.seconds), memcpy_limit(args.seconds)
    results = [
        result
        for ranks in map(int, args.ranks.split(","))
        for name in args.communicators.split(",")
        for result in run(ranks, name, args.seconds)
    ]
    show(results, memcpy, pipe)
    if args.json:
        limits = {"memcpy_gb_per_s": memcpy, "pipe_round_trip_us": pipe}
        with open(args.json, "w") as file:
            json.dump({**limits, "results": [asdict(each) for each in results]}, file, indent=2)


if __name__ == "__main__":
    main()
