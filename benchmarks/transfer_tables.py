"""The figures of `bench_transfer.py`, and their tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

WIDTH = 140  # columns without a terminal


@dataclass(frozen=True)
class Throughput:
    """The throughput of a connector; of a peer library only the measured part."""

    connector: str
    shape: str
    gb_per_s: float
    of_memcpy: float
    of_socket: float
    cpu_s_per_gb: float | None = None  # both processes
    with_digests: float | None = None  # time with ÷ time without
    cpu_with_digests: float | None = None  # CPU time of both processes, likewise
    hash_gb_per_s: float | None = None  # of a rank that computes a prompt's digests
    hash_of_memcpy: float | None = None


@dataclass(frozen=True)
class Latency:
    """The latency of one block, in µs."""

    connector: str
    shape: str
    fastest: float
    p50: float
    p99: float
    memcpy: float  # the fastest copy of the same number of bytes
    committed_p50: float | None = None  # until the commit is answered
    digests_p50: float | None = None  # the same with digests


@dataclass(frozen=True)
class Parts:
    """GB of a prompt per CPU second of one thread, independent of other load."""

    shape: str
    memcpy: float
    copy: float  # copying blocks to other blocks
    hash: float
    landing: float  # copying and hashing in one pass


def show_parts(found: list[Parts]) -> None:
    table = Table("shape", title="the work of one thread, by CPU time")
    for column in ("memcpy GB/s", "copy ÷ memcpy", "hash ÷ memcpy", "time with hash ÷ copy"):
        table.add_column(column, justify="right")
    for each in found:
        ratios = each.copy / each.memcpy, each.hash / each.memcpy, each.copy / each.landing
        table.add_row(each.shape, f"{each.memcpy:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


def show(
    throughputs: Sequence[Throughput],
    latencies: Sequence[Latency],
    versions: Mapping[str, str],
    absent: Mapping[str, str],
) -> None:
    """`versions`: peer → version. `absent`: peer → reason."""
    columns = "GB/s", "÷ memcpy", "÷ socket", "CPU s/GB", "with digests", "in CPU", "hash ÷ memcpy"
    table = _table("transfers", columns)
    for each in throughputs:
        table.add_row(
            each.connector,
            each.shape,
            *(f"{figure:.2f}" for figure in (each.gb_per_s, each.of_memcpy, each.of_socket)),
            _cell(each.cpu_s_per_gb, "{:.2f}"),
            _cell(each.with_digests, "× {:.2f}"),
            _cell(each.cpu_with_digests, "× {:.2f}"),
            _cell(each.hash_of_memcpy, "{:.2f}"),
        )
    columns = "landed", "p50", "p99", "committed p50", "with digests", "memcpy"
    blocks = _table("one block, µs", columns)
    for one in latencies:
        times = one.fastest, one.p50, one.p99, one.committed_p50, one.digests_p50, one.memcpy
        blocks.add_row(one.connector, one.shape, *(_cell(each, "{:.0f}") for each in times))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table, blocks)
    for name, version in versions.items():
        print(f"{name}: {version}")
    for name, why in absent.items():
        print(f"{name} is absent: {why}")


def _cell(figure: float | None, form: str) -> str:
    return "" if figure is None else form.format(figure)


def _table(title: str, figures: tuple[str, ...]) -> Table:
    table = Table("connector", "shape", title=title)
    for column in figures:
        table.add_column(column, justify="right")
    return table
