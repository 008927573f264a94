"""`pdserve bench step`: times prefill and decode steps part by part, and compares each part with
the least time that this machine needs for its FLOPs and bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pdserve.client.terminal import console_of
from pdserve.common.config.bench import BenchStepConfig
from pdserve.common.config.shared import counts
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.waits import progress

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from pdserve.bench.step import Cell

LEAST_SHARE = 0.01  # share of a step below which a part's floor is not shown


def main(argv: Sequence[str] | None = None) -> int:
    config = parse(
        BenchStepConfig,
        prog="pdserve bench step",
        description="Time steps of the engine on this machine, part by part, and compare them with "
        "their floor: bytes read (weights and KV) ÷ memory bandwidth, or FLOPs ÷ the speed of "
        "large matrix products, whichever is larger. Both speeds are measured in the same run. "
        "Cells are measured in turns; figures are medians of the repetitions.",
        argv=argv,
    )
    if config.json and not Path(config.json).resolve().parent.is_dir():
        raise ConfigError(f"--json {config.json}: its folder does not exist")
    before = _read(config.baseline)
    with progress("pdserve bench step") as say:
        say("importing torch")
        from pdserve.bench.ranks import measure_on_ranks

        result = asyncio.run(measure_on_ranks(config, cells(config), say))
    _show(result, before, console_of())
    if config.json:
        Path(config.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def cells(config: BenchStepConfig) -> Sequence[Cell]:
    """Returns the cells to measure; raises ConfigError for a list that does not hold counts."""
    from pdserve.bench.step import Cell

    if config.batch is None and config.chunk is None:
        small = [Cell.decode(batch, 128) for batch in (1, 8, 32)]
        return [*small, Cell.decode(32, 1024), Cell.prefill(512)]
    pairs = product(_counts("--batch", config.batch), _counts("--context", config.context))
    return [
        *(Cell.decode(batch, context, config.drafts) for batch, context in pairs),
        *map(Cell.prefill, _counts("--chunk", config.chunk)),
    ]


def _counts(flag: str, text: str | None) -> list[int]:
    return counts(flag, text) if text else []


def _read(file: str | None) -> dict[str, Any]:
    """Returns the rows of an earlier run by cell and part."""
    if file is None:
        return {}
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))["cells"]
        return {name: {**cell["parts"], "step": cell["step"]} for name, cell in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--baseline {file} is not from this command: {error!r}") from error


# ---- tables ----


def _show(result: dict[str, Any], before: dict[str, Any], console: Console) -> None:
    machine = result["gpu"] or f"{result['threads']} threads of {result['cpu']}"
    console.print(
        f"{result['model']}, {result['dtype']}, {result['tensor_parallel_size']} × "
        f"{machine}; "
        f"peaks: {result['peak_gflops']:,.0f} GFLOP/s, {result['read_gb_per_s']:.1f} GB/s read",
        soft_wrap=True,
    )
    for name, cell in result["cells"].items():
        console.print(_table(name, cell, before.get(name)))


def _table(name: str, cell: dict[str, Any], before: dict[str, Any] | None) -> Table:
    table = Table()
    table.add_column(name, no_wrap=True)
    better = [] if before is None else ["speed-up"]
    for head in ["ms", "share", "floor ms", "ratio", "bound by", *better]:
        table.add_column(head, justify="right")
    whole = sum(row["ms"] for row in cell["parts"].values())
    for part, row in cell["parts"].items():
        table.add_row(part, *_columns(part, row, whole, before))
    table.add_section()
    table.add_row("step", *_columns("step", cell["step"], cell["step"]["ms"], before))
    return table


def _columns(
    part: str, row: dict[str, Any], whole: float, before: dict[str, Any] | None
) -> Iterator[str]:
    yield f"{row['ms']:.2f}"
    yield f"{100 * row['ms'] / whole:.0f} %"
    if row.get("floor_ms", 0.0) <= LEAST_SHARE * whole:
        yield from ("", "", "")
    else:
        yield from (f"{row['floor_ms']:.2f}", f"{row['ratio']:.1f}", row["bound_by"])
    if before is not None:
        old = before.get(part)
        yield f"{old['ms'] / row['ms']:.2f}" if old and row["ms"] > 0 else "–"
