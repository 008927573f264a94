"""The results of a run, as a table and as JSON with the same keys."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.soak.attack import HUNG, UNEXPLAINED
from benchmarks.soak.floods import TAKEN
from benchmarks.soak.gauge import Growth
from benchmarks.soak.load import Tally
from benchmarks.soak.strangers import ADMITTED

PERCENTILES = (50, 90, 99, 100)
TIMES = "  times as long as without one"  # of `waits`: how many, not milliseconds
SHOWN = 5  # examples of each kind of failure


@dataclass(frozen=True, slots=True)
class Report:
    """`recovery`: percentiles (p50, p90, p99, p100) of the longest gap between two events of each
    migrated stream, in seconds. All numbers in `failures` should be 0."""

    seconds: float
    requests: int
    completed: int
    hung_up: int
    router_died: int  # requests lost by the death of their router
    tokens: int
    migrations: int
    faults: dict[str, int]  # "kill prefill" → count
    answers: dict[str, dict[str, int]]  # kind of attack → outcome → count
    lost: list[str]  # errors that clients got
    hung: list[str]  # requests without an end
    wrong: list[str]  # differences from the fault-free answer
    leaked: dict[str, int]  # blocks or requests that a node still holds
    crashed: list[str]  # processes that ended by themselves, or did not drain
    recovery: dict[str, float]
    growth: dict[str, dict[str, Growth]]  # role → "rss_mb", "fds"
    waits: dict[str, dict[str, float]]  # latencies of the probe, in milliseconds
    hostile: dict[str, dict[str, float]]  # kind of attack → seconds that its requests waited
    hung_attacks: list[str]  # descriptions of requests of hostile clients
    stood: list[str]  # what routers and nodes said of requests that stood still

    @property
    def failures(self) -> dict[str, int]:
        return {
            "lost": len(self.lost),
            "wrong": len(self.wrong),
            "hung": len(self.hung) + self._answers(HUNG),
            "admitted": self._answers(ADMITTED) + self._answers(TAKEN),
            "unexplained": self._answers(UNEXPLAINED),
            "leaked": sum(self.leaked.values()),
            "crashed": len(self.crashed),
            "grown": sum(each.grown for role in self.growth.values() for each in role.values()),
        }

    def _answers(self, word: str) -> int:
        """Returns the number of attacks with this outcome."""
        told = (item for kind in self.answers.values() for item in kind.items())
        return sum(count for words, count in told if words.rpartition(": ")[2] == word)

    def as_json(self) -> dict[str, Any]:
        counts = {f"num_{name}": count for name, count in self.failures.items()}
        return {**asdict(self), **counts}


def make_report(
    tally: Tally,
    seconds: float,
    faults: Counter[tuple[str, str]],
    leaked: dict[str, int],
    crashed: list[str],
    answers: Counter[tuple[str, str]] | None = None,
    growth: dict[str, dict[str, Growth]] | None = None,
    waits: dict[str, dict[str, float]] | None = None,
    hostile: Mapping[str, Sequence[float]] | None = None,
    hung_attacks: Sequence[str] = (),
    stood: Sequence[str] = (),
) -> Report:
    told: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (kind, words), count in sorted((answers or {}).items()):
        told[kind][words] = count
    return Report(
        seconds=round(seconds, 1),
        requests=tally.requests,
        completed=tally.completed,
        hung_up=tally.hung_up,
        router_died=tally.router_died,
        tokens=tally.tokens,
        migrations=tally.migrations,
        faults={f"{kind} {role}": count for (kind, role), count in sorted(faults.items())},
        answers=dict(told),
        lost=tally.lost,
        hung=tally.hung,
        wrong=tally.wrong,
        leaked=leaked,
        crashed=crashed,
        recovery=_percentiles(tally.gaps),
        growth=growth or {},
        waits=waits or {},
        hostile={kind: _percentiles(seconds) for kind, seconds in sorted((hostile or {}).items())},
        hung_attacks=[*hung_attacks],
        stood=[*stood],
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, found, strict=True)}


def print_report(report: Report, console: Console) -> None:
    table = Table(title="Chaos", title_justify="left", show_header=False)
    rate = report.tokens / report.seconds
    rows = [
        ("seconds", f"{report.seconds:g}"),
        ("requests", str(report.requests)),
        ("  completed, as without faults", str(report.completed)),
        ("  hung up by the client", str(report.hung_up)),
        ("  ended with a router", str(report.router_died)),
        ("tokens", f"{report.tokens} ({rate:.0f} /s)"),
        ("migrations", str(report.migrations)),
        *((f"  {name}", str(count)) for name, count in report.faults.items()),
        *(
            (f"  {kind}: {words}", str(count))
            for kind, told in report.answers.items()
            for words, count in told.items()
        ),
        *((f"recovery {p}", f"{value:.2f} s") for p, value in report.recovery.items()),
        *(
            (
                name,
                ", ".join(f"{p} {n:g}{'' if name == TIMES else ' ms'}" for p, n in values.items()),
            )
            for name, values in report.waits.items()
        ),
        *(
            (f"{kind}: waited", ", ".join(f"{p} {seconds:g} s" for p, seconds in values.items()))
            for kind, values in report.hostile.items()
        ),
        ("stood still", str(len(report.stood))),
        *(
            (f"{role} {measure}", f"{each.first:g} → {each.last:g} (most {each.most:g})")
            for role, measures in report.growth.items()
            for measure, each in measures.items()
        ),
        *((name, Text(str(n), "red" if n else "green")) for name, n in report.failures.items()),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)  # servers' messages may contain brackets
    for name in ("lost", "hung", "hung_attacks", "wrong", "crashed", "stood"):
        for example in getattr(report, name)[:SHOWN]:
            console.print(f"{name.replace('_', ' ')}: {example}", markup=False)
