"""Reports the medians of all rounds as a table of ratios, as JSON and as a plot."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

# Metric → (title, unit, units per second or per token/s, whether less is better).
METRICS = {
    "tok_s": ("output", "tok/s", 1, False),
    "ttft_p50": ("TTFT p50", "ms", 1000, True),
    "itl_p50": ("ITL p50", "ms", 1000, True),
    "itl_p99": ("ITL p99", "ms", 1000, True),
    "long_ttft_p50": ("long prompt's TTFT p50", "ms", 1000, True),
}


@dataclass(slots=True)
class Results:
    """The metrics of each round by workload and server; and the absent servers with reasons."""

    found: dict[tuple[str, str], list[Mapping[str, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    absent: dict[str, str] = field(default_factory=dict)
    idle_cpu: dict[str, float] = field(default_factory=dict)

    def add(self, workload: str, server: str, metrics: Mapping[str, float]) -> None:
        self.found[workload, server].append(metrics)

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(workload for workload, _ in self.found))

    @property
    def servers(self) -> list[str]:
        return list(dict.fromkeys(server for _, server in self.found))

    def median(self, workload: str, server: str, metric: str) -> float | None:
        rounds = self.found.get((workload, server), [])
        values = [each[metric] for each in rounds if metric in each]
        return statistics.median(values) if values else None

    def as_json(self) -> dict[str, Any]:
        names = (*METRICS, "prompt_tokens", "output_tokens")
        return {
            "absent": self.absent,
            "idle_cpu": self.idle_cpu,
            "medians": {
                workload: {
                    server: {
                        name: value
                        for name in names
                        if (value := self.median(workload, server, name)) is not None
                    }
                    for server in self.servers
                }
                for workload in self.workloads
            },
            "rounds": [
                {"workload": workload, "server": server, "metrics": [*map(dict, rounds)]}
                for (workload, server), rounds in self.found.items()
            ],
        }


def table(results: Results) -> Table:
    """Returns a table: per metric the first server's value, and the other servers' values with the
    ratio first / other. If less is better, below 1 means that the first server is better."""
    first, *others = results.servers
    shown = Table(title=f"× is {first} ÷ the other", title_justify="left")
    for head in ("", "", first, *others):
        shown.add_column(head, justify="left" if not head else "right")
    for workload in results.workloads:
        shown.add_section()
        for i, row in enumerate(_rows(results, workload, first, others)):
            shown.add_row(workload if not i else "", *row)
    return shown


def _rows(
    results: Results, workload: str, first: str, others: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    for metric, (title, unit, factor, _) in METRICS.items():
        own = results.median(workload, first, metric)
        theirs = [results.median(workload, other, metric) for other in others]
        if any(value is not None for value in (own, *theirs)):
            cells = (_ratio(own, value, factor) for value in theirs)
            yield (f"{title}, {unit}", "–" if own is None else _number(own * factor), *cells)


def _ratio(own: float | None, other: float | None, factor: float) -> str:
    if other is None:
        return "–"
    return _number(other * factor) + (f" ({own / other:.2f} ×)" if own and other else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plot(results: Results, path: Path) -> None:
    """Writes a PNG with a row of bars per workload."""
    # Slow to import and absent without the `bench` extra.
    from matplotlib.figure import Figure

    servers, workloads = results.servers, results.workloads
    figure = Figure(
        figsize=(3.2 * len(METRICS), 0.6 * len(workloads) * len(servers) + 1), layout="constrained"
    )
    grid = figure.subplots(len(workloads), len(METRICS), squeeze=False)
    for line, workload in zip(grid, workloads, strict=True):
        line[0].set_ylabel(workload.replace(", ", "\n"), fontsize=7)
        for axes, (metric, (title, unit, factor, _)) in zip(line, METRICS.items(), strict=True):
            values = [results.median(workload, server, metric) or 0.0 for server in servers]
            axes.barh(servers[::-1], [value * factor for value in values[::-1]])
            axes.tick_params(labelsize=6, labelleft=metric == "tok_s")
            axes.set_title(f"{title}, {unit}" if workload == workloads[0] else "", fontsize=8)
    figure.savefig(path, format="png", dpi=120)
