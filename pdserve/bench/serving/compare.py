"""`pdserve bench compare A.json B.json`: compares two saved results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pdserve.client.terminal import console_of
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import ConfigError

RATES = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
LATENCIES = [
    f"{statistic}_{name}_ms"
    for name in ("ttft", "tpot", "itl", "e2el")
    for statistic in ("median", "p99")
]
ROWS = ("capacity", "completed", "failed", *RATES, *LATENCIES)
# Options that do not change what is measured.
_FREE = {"base_url", "save_result", "plot", "json", "model", "timeout"}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="pdserve bench compare",
        description="Compare two results of `pdserve bench serve --save-result`.",
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    before, after = _read(args.before), _read(args.after)
    rows, differing = compare(before, after), differences(before, after)
    if args.json:
        print(json.dumps({"metrics": rows, "options": differing}, indent=2))
        return 0
    table = Table("", args.before.name, args.after.name, "×")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in rows.items():
        table.add_row(name, *(_shown(row[key]) for key in ("before", "after", "ratio")))
    console = console_of()
    console.print(table)
    for name, values in differing.items():
        console.print(f"differs: {name} {values[0]!r} → {values[1]!r}")
    return 0


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Returns, per figure that both have, the two values and the ratio after / before."""
    rows = {}
    for name in ROWS:
        one, two = before.get(name), after.get(name)
        if isinstance(one, (int, float)) and isinstance(two, (int, float)):
            rows[name] = {"before": one, "after": two, "ratio": two / one if one else None}
    return rows


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the options of the load that differ, as name → [before, after]."""
    one, two = before.get("config", {}), after.get("config", {})
    names = sorted((one.keys() | two.keys()) - _FREE)
    return {
        name: [one.get(name), two.get(name)] for name in names if one.get(name) != two.get(name)
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
        raise ConfigError(f"{path} was not written by pdserve bench serve --save-result")
    return found


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}"
