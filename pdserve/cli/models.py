"""`pdserve models`: lists which decoders are served, by which path, and why others are not. The
list is the result of `tests/models/sweep.py` over transformers' classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from rich.markup import escape
from rich.table import Table

from pdserve.client.terminal import console_of
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import ConfigError

PATHS = {
    "native": "native: TP, PP, EP, LoRA, quantization",
    "transformers": "transformers: {ways}",
}
KV = {
    "full": "all tokens",
    "windows": "windows",
    "latent": "latents",
    "states": "states",
    "indexed": "latents, keys of indexers",
}


@cache
def known_models() -> dict[str, dict[str, str]]:
    """Returns model type → row: class, result, and path and kv, or why."""
    found: dict[str, dict[str, str]] = json.loads(
        files("pdserve.common.model").joinpath("models.json").read_text(encoding="utf-8")
    )
    return found


def shown(row: dict[str, str]) -> tuple[str, str]:
    """Returns (path, KV or the reason) of a row."""
    if row["result"] == "exact":
        return PATHS[row["path"]].format(ways=row.get("with", "one rank")), KV[row["kv"]]
    return row["result"], row["why"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, or the rows that contain a word."""
    parser = CommandParser(
        prog="pdserve models",
        description="List which architectures are served, by which path, and why others are not.",
    )
    parser.add_argument("word", nargs="?", default="", help="only those with it in their name")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    rows = {
        name: row
        for name, row in known_models().items()
        if given.word.lower() in f"{name} {row['class']}".lower()
    }
    if not rows:
        raise ConfigError(f"no architecture has {given.word!r} in its name")
    if given.json:
        print(json.dumps(rows, indent=1))
        return 0
    table: Any = Table("model type", "class", "path", "KV, or why not")
    for name, row in rows.items():
        table.add_row(*map(escape, (name, row["class"], *shown(row))))
    console_of().print(table)
    return 0
