"""`pdserve trace`: shows the stages of a request, running or finished, and their times."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdserve.client.server import LOOK_TIMEOUT, Server, add_server_options, session_of
from pdserve.client.terminal import console_of
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import NodeError
from pdserve.common.core.printable import printable
from pdserve.common.core.request import PromptPath, Timeline

COLOURS = {"finished": "green", "running": "yellow", "failed": "red"}


class Traced(msgspec.Struct):
    """One prompt of a request in the answer of /v1/timelines."""

    id: str
    status: str
    error: dict[str, str] | None
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline


class Found(msgspec.Struct):
    data: list[Traced]


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    found = asyncio.run(_ask(options))
    if options.json:
        print(json.dumps(found))
    else:
        show(_read(found), console_of())
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pdserve trace",
        description="Show the stages of a request and their times. The router keeps the timelines "
        "of the last requests (--kept-timelines); they have more detail when the request asked for "
        "its timeline.",
    )
    add_server_options(parser, LOOK_TIMEOUT, operators=True)
    parser.add_argument(
        "request_id", metavar="REQUEST_ID", help="its X-Request-Id, or the id of its answer"
    )
    parser.add_argument("--json", action="store_true", help="print the server's JSON")
    return parser


async def _ask(options: argparse.Namespace) -> Any:
    async with session_of(options) as session:
        path = f"/v1/timelines/{quote(options.request_id, safe='')}"
        return await Server(session, options.url).get(path)


def _read(found: Any) -> list[Traced]:
    try:
        return msgspec.convert(found, Found).data
    except msgspec.ValidationError as error:
        raise NodeError(f"the server's timelines cannot be read: {error}") from error


def show(requests: Sequence[Traced], console: Console) -> None:
    for each in requests:
        console.print(_title(each), soft_wrap=True)
        console.print(_stages(each.timeline))


def _title(traced: Traced) -> Text:
    line = traced.timeline
    cached = f", {line.cached_tokens} cached" if line.cached_tokens else ""
    parts = [
        f"{traced.prompt_tokens} prompt tokens{cached}",
        f"{traced.completion_tokens} generated",
    ]
    if line.first_token is not None:
        parts.append(f"TTFT {1e3 * line.first_token:.1f} ms")
    if line.transfer_bytes:
        how = f" by {', '.join(line.kv_connectors)}" if line.kv_connectors else ""
        parts.append(f"{line.transfer_bytes / 2**20:.2f} MiB of KV transferred{how}")
    if line.path == PromptPath.STAND_IN:
        parts.append("computed by the decode node, for want of a prefill node")
    if line.recomputed_tokens:
        parts.append(f"{line.recomputed_tokens} tokens computed twice")
    if line.migrations:
        parts.append(f"migrated {line.migrations} times")
    why = f": {traced.error['message']}" if traced.error else ""
    status = Text(printable(traced.status + why), style=COLOURS.get(traced.status, ""))
    return Text.assemble(printable(traced.id), " ", status, "; ", printable("; ".join(parts)))


def _stages(line: Timeline) -> Table:
    table = Table("stage", "node", "ms", "share of the request", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    for stage in line.stages:
        table.add_row(
            Text(printable(stage.name).replace("_", " ")),
            Text(printable(stage.node)),
            f"{1e3 * stage.seconds:.1f}",
            Bar(line.total_seconds, stage.start, stage.start + stage.seconds, width=40),
        )
    table.add_row("", "", f"{1e3 * line.total_seconds:.1f}", "total")
    return table
