"""Shows a run's summary as tables, as JSON with the keys of `vllm bench serve`, and as a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pdserve.bench.serving.metrics import Distribution, Summary, Timing

TITLES = {
    "ttft": "TTFT, time to first token (from arrival)",
    "ttft_sent": "TTFT from the send",
    "tpot": "TPOT, time per output token",
    "itl": "ITL, inter-token latency",
    "gap": "gap between chunks",
    "e2el": "E2EL, end-to-end (from arrival)",
    "e2el_sent": "E2EL from the send",
    "delay": "delay of the send",
}
# Above this delay, without a concurrency limit, the load generator itself is the bottleneck.
LATE_MS = 20.0


def as_json(summary: Summary, config: Mapping[str, Any], date: str) -> dict[str, Any]:
    """Returns one flat object: `mean_ttft_ms`, `p99_itl_ms`, `request_throughput`, …"""
    result = {"date": date, "config": dict(config), **asdict(summary)}
    for name, latency in result.pop("latencies").items():
        for statistic in (field.name for field in fields(Distribution)):
            result[f"{statistic}_{name}_ms"] = latency[statistic] if latency else None
    return result


def print_tables(summary: Summary, console: Console) -> None:
    console.print(_totals(summary))
    console.print(_latencies(summary))
    for kind, reason in summary.reasons.items():
        console.print(f"{kind}: {reason}", style="red")
    if summary.estimated:
        console.print(
            f"{summary.estimated} answers had no usage: their chunks count as output tokens, which "
            "may be too low, and their input tokens as 0.",
            style="yellow",
        )


def warn_if_late(summary: Summary, console: Console) -> None:
    delay = summary.latencies["delay"]
    if delay is not None and delay.p99 > LATE_MS:
        console.print(
            f"Requests were sent {delay.p99:.0f} ms (p99) after they were due: this load "
            "generator was too slow. Lower the rate, or run several generators.",
            style="yellow",
        )


def _totals(summary: Summary) -> Table:
    table = Table(title="Requests", title_justify="left", show_header=False)
    rows: list[tuple[str, str]] = [
        ("completed", str(summary.completed)),
        ("failed", str(summary.failed)),
        *((f"  {kind}", str(count)) for kind, count in summary.errors.items()),
        ("duration", f"{summary.duration:.2f} s"),
        ("input tokens", str(summary.total_input_tokens)),
        ("  cached", str(summary.total_cached_tokens)),
        ("output tokens", str(summary.total_output_tokens)),
        ("request throughput", f"{summary.request_throughput:.2f} /s"),
        ("output token throughput", f"{summary.output_throughput:.1f} /s"),
        ("total token throughput", f"{summary.total_token_throughput:.1f} /s"),
    ]
    if summary.request_goodput is not None and summary.goodput_share is not None:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in summary.slo.items())
        share = f"{summary.request_goodput:.2f} /s ({summary.goodput_share:.1%} of all)"
        rows.append((f"goodput ({limits})", share))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _latencies(summary: Summary) -> Table:
    names = [field.name for field in fields(Distribution)]
    table = Table("milliseconds", *names, title="Latency", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, latency in summary.latencies.items():
        values = asdict(latency).values() if latency else ()
        table.add_row(TITLES[name], *(f"{v:.2f}" for v in values))
    return table


def plot(timings: Sequence[Timing], slo: Mapping[str, float], path: Path) -> None:
    """Writes a PNG with the cumulative distributions of TTFT, TPOT and E2EL and their limits."""
    # Slow to import and absent without the `bench` extra.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("ttft", "tpot", "e2el"), strict=True):
        found = [getattr(timing, name) for timing in timings]
        values = np.sort([value for value in found if value is not None])
        axes.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)))
        axes.set(title=name.upper(), xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        if name in slo:
            axes.axvline(slo[name], color="tab:red", linestyle="--")
    figure.savefig(path, format="png", dpi=120)
