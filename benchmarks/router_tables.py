"""The tables of `bench_router.py`."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table


def report(result: dict[str, Any]) -> None:
    console = Console(width=120)
    for name in ("against", "policies", "peers"):
        if name in result:
            console.print(_compared(result, name))
    if result["tokens"]:
        console.print(_tokens(result))
    if "fleet" in result:
        console.print(_fleet(result))


def _tokens(result: dict[str, Any]) -> Table:
    table = Table(title=f"{_load(result)}, simulated nodes")
    columns = "workers", "tokens/s here", "router's cores", "µs per token", "tokens/s, a core each"
    for column in columns:
        table.add_column(column, justify="right")
    for each in result["tokens"]:
        table.add_row(
            str(each["workers"]), f"{each['tokens_per_s']:,.0f}", f"{each['cores']:.2f}",
            f"{each['us_per_token']:.0f}", f"{each['tokens_per_s_of_so_many_cores']:,.0f}",
        )  # fmt: skip
    return table


def _fleet(result: dict[str, Any]) -> Table:
    whole, beats, placed = result["fleet"], result["heartbeats"], result["in_process"]
    table = Table(title=f"{whole['nodes']} idle nodes")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in (
        ("until all are registered", f"{whole['seconds_to_register']:.1f} s"),
        ("router, of a core", f"{whole['cores']:.0%}"),
        ("of that heartbeats", f"{beats['cores']:.0%}"),
        ("of that probes", f"{whole['cores'] - beats['cores']:.0%}"),
        ("/ready over HTTP, p50 and p99", _of(whole["ready_ms"])),
        ("ready, in process, CPU time", _of(placed["ready_ms"])),
        ("placement, in process, CPU time", _of(placed["placement_ms"])),
    ):
        table.add_row(name, value)
    return table


def _compared(result: dict[str, Any], key: str) -> Table:
    table = Table(title=f"CPU of a router, {_load(result)}")
    columns = "", "ms per request: median", "least", "most", "events a token", "requests/s here"
    for column in (*columns, "first token p50, ms"):
        table.add_column(column, justify="right")
    for name, each in result[key].items():
        cost = sorted(one["ms_per_request"] for one in each)
        events, rate, first = (
            statistics.median(one[column] for one in each)
            for column in ("events_per_token", "requests_per_s", "first_token_ms")
        )
        table.add_row(
            name, f"{statistics.median(cost):.2f}", f"{cost[0]:.2f}", f"{cost[-1]:.2f}",
            f"{events:.2f}", f"{rate:,.0f}", f"{first:.1f}",
        )  # fmt: skip
    return table


def _load(result: dict[str, Any]) -> str:
    return f"{result['clients']} clients, {result['max_tokens']} tokens a request"


def _of(found: dict[str, float]) -> str:
    return f"{found['p50']:.3f}, {found['p99']:.3f} ms"
