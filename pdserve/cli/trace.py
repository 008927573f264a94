"""`pdserve trace`: shows the stages and times of a request, running or finished; without an id it
lists the running requests and what they wait for, and the last ones that ended."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar
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

T = TypeVar("T")

COLOURS = {"finished": "green", "running": "yellow", "failed": "red"}
SHOWN = 50  # running requests, the ones without progress for longest; and as many ended ones
MOST = 1000  # requests that a server lists
RUNNING = "running"


class Standing(msgspec.Struct):
    """The reason why a running request makes no progress."""

    waits_for: str
    node: dict[str, Any] | None
    seconds: float
    gives_up_in: float | None
    failures: int
    last_error: str | None


class Traced(msgspec.Struct):
    """One prompt of a request in the answer of /v1/timelines."""

    id: str
    status: str
    error: dict[str, str] | None
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline
    standing: Standing | None = None  # None: it has ended


class Found(msgspec.Struct):
    data: list[Traced]


class Listed(msgspec.Struct):
    """One prompt in the answer of /v1/timelines."""

    request_id: str
    status: str
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    model: str | None = None
    error: dict[str, str] | None = None
    first_token: float | None = None
    finish_reasons: list[str] = []
    standing: Standing | None = None  # None: it has ended


class AllListed(msgspec.Struct):
    data: list[Listed]


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    found = asyncio.run(_ask(options))
    if options.json:
        print(json.dumps(found))
    elif options.request_id is None:
        listed = _read(found, AllListed).data
        console = console_of()
        console.print(_served([each for each in listed if each.standing is not None]))
        if ended := [each for each in listed if each.standing is None]:
            console.print(_ended(ended))
    else:
        show(_read(found, Found).data, console_of())
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pdserve trace",
        description="Show the stages of a request, their times, and what it waits for; without an "
        "id list the running requests, those without progress for longest first, and the last ones "
        "that ended. The router keeps the timelines of the last requests (--kept-timelines); they "
        "have more detail if the request asked for its timeline.",
    )
    add_server_options(parser, LOOK_TIMEOUT, operators=True)
    parser.add_argument(
        "request_id",
        metavar="REQUEST_ID",
        nargs="?",
        help="its X-Request-Id, or the id of its answer (default: list the last ones)",
    )
    parser.add_argument("--json", action="store_true", help="print the server's JSON")
    return parser


async def _ask(options: argparse.Namespace) -> Any:
    async with session_of(options) as session:
        server = Server(session, options.url)
        if options.request_id is not None:
            return await server.get(f"/v1/timelines/{quote(options.request_id, safe='')}")
        return await _list(server)


async def _list(server: Server) -> dict[str, Any]:
    """Returns the running requests and the last ones that ended, as JSON."""
    running = await server.get(f"/v1/timelines?standing=true&limit={SHOWN}")
    last = await server.get(f"/v1/timelines?limit={MOST}")  # begins with all running ones
    try:
        ended = [each for each in last["data"] if each["status"] != RUNNING]
        return {**running, "data": [*running["data"], *ended[:SHOWN]]}
    except (KeyError, TypeError) as error:
        raise NodeError(f"the server's timelines cannot be read: {error!r}") from error


def _read(found: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise NodeError(f"the server's timelines cannot be read: {error}") from error


def show(requests: Sequence[Traced], console: Console) -> None:
    for each in requests:
        console.print(_title(each), soft_wrap=True)
        for line in _why(each.standing):
            console.print(Text(printable(line)), soft_wrap=True)
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
        parts.append("computed by the decode node, for lack of a prefill node")
    if line.recomputed_tokens:
        parts.append(f"{line.recomputed_tokens} tokens computed twice")
    if line.migrations:
        parts.append(f"migrated {line.migrations} times")
    why = f": {traced.error['message']}" if traced.error else ""
    status = Text(printable(traced.status + why), style=COLOURS.get(traced.status, ""))
    return Text.assemble(printable(traced.id), " ", status, "; ", printable("; ".join(parts)))


def _why(standing: Standing | None) -> Iterator[str]:
    """Yields lines about what the request waits for."""
    if standing is None:
        return
    yield (
        f"  no progress for {standing.seconds:.1f} s; it waits for {standing.waits_for}; "
        f"{_end(standing)}"
    )
    if standing.node is not None:
        told = ", ".join(f"{name} {value}" for name, value in standing.node.items())
        yield f"  that node: {told}"
    if standing.last_error is not None:
        yield f"  {standing.failures} failures before, the last: {standing.last_error}"


def _end(standing: Standing) -> str:
    if standing.gives_up_in is None:
        return "without a time limit"
    return f"without progress it fails in {max(0.0, standing.gives_up_in):.1f} s"


def _served(requests: Sequence[Listed]) -> Table:
    table = Table("request", "tokens", "age", "stands", "waits for", box=None, pad_edge=False)
    table.title, table.title_justify = f"{len(requests)} running", "left"
    for name in (1, 2, 3):
        table.columns[name].justify = "right"
    for each in requests:
        standing = each.standing
        assert standing is not None
        why = [standing.waits_for, _end(standing)]
        if standing.last_error is not None:
            why.append(f"failed {standing.failures} times: {standing.last_error}")
        table.add_row(
            Text(printable(each.request_id)),
            f"{each.prompt_tokens}+{each.completion_tokens}",
            f"{each.seconds:.1f} s",
            f"{standing.seconds:.1f} s",
            Text(printable("; ".join(why))),
        )
    return table


def _ended(requests: Sequence[Listed]) -> Table:
    """Returns a row per request that has ended, the newest first."""
    table = Table("request", "model", "tokens", "TTFT", "took", "ended", box=None, pad_edge=False)
    table.title, table.title_justify = "the last to end", "left"
    for name in (2, 3, 4):
        table.columns[name].justify = "right"
    for each in requests:
        first = "" if each.first_token is None else f"{1e3 * each.first_token:.1f} ms"
        table.add_row(
            Text(printable(each.request_id)),
            Text(printable(each.model or "")),
            f"{each.prompt_tokens}+{each.completion_tokens}",
            first,
            f"{each.seconds:.2f} s",
            Text(printable(_how(each)), style=COLOURS.get(each.status, "")),
        )
    return table


def _how(ended: Listed) -> str:
    """Returns the finish reasons of a request's choices, or its error."""
    if ended.error is not None:
        return f"{ended.status}: {ended.error.get('code', '')}"
    return ", ".join(dict.fromkeys(ended.finish_reasons)) or ended.status


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
