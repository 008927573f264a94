"""`pdserve top`: the nodes of a cluster and what they do, again and again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.common.client.server import Server, add_server_options, session_of
from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.core.printable import printable

STATES = {"ready": "green", "unhealthy": "red", "lost": "red", "broken": "yellow"}
COLUMNS = ("node", "role", "state", "in flight", "running", "waiting", "KV use", "free blocks")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when the server does not answer at the first time, or with --once is not ready;
    Ctrl-C ends the table with 0."""
    options = make_parser().parse_args(argv)
    try:
        return asyncio.run(_watch(options))
    except KeyboardInterrupt:
        return 0
    except PdserveError as error:
        print(f"pdserve top: error: {error.message}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdserve top", description="The nodes of a cluster, live; once where nobody watches."
    )
    add_server_options(parser)
    parser.add_argument("--interval", type=_seconds, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look once")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each look")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.05 and 3600")
    return value


async def _watch(options: argparse.Namespace) -> int:
    console = Console(highlight=False)
    async with session_of(options) as session:
        server = Server(session, options.url)
        state = await _look(server)
        if options.json:
            return await _lines(server, state, options)
        if options.once or not console.is_terminal:
            console.print(table(state))
            return 0 if state["ready"] else 1
        with Live(table(state), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(options.interval)
                try:
                    live.update(table(await _look(server)), refresh=True)
                except PdserveError as error:  # it may come back
                    live.update(Text(error.message, style="red"), refresh=True)


async def _lines(server: Server, state: dict[str, Any], options: argparse.Namespace) -> int:
    while True:
        print(json.dumps(state), flush=True)
        if options.once:
            return 0 if state["ready"] else 1
        await asyncio.sleep(options.interval)
        state = await _look(server)


async def _look(server: Server) -> dict[str, Any]:
    state = await server.get("/v1/cluster")
    if not isinstance(state, dict) or not isinstance(state.get("nodes"), list):
        raise NodeError(f"{server.url} is no router of pdserve")
    return state


def table(state: dict[str, Any]) -> Table:
    """The cluster in a line, and a row for each node, in an order that stays."""
    title = f"{state.get('running', 0)} running, {state.get('waiting', 0)} waiting"
    if not state.get("ready"):
        title = f"not ready: {printable(str(state.get('reason')), 200)}; {title}"
    found = Table(*COLUMNS, title=title, title_justify="left")
    for column in found.columns[3:]:
        column.justify = "right"
    for node in sorted(state["nodes"], key=lambda node: (node["role"], node["node_id"])):
        reason = f" ({printable(node['reason'], 80)})" if node["reason"] else ""
        found.add_row(
            Text(printable(node["node_id"], 60)),
            node["role"],
            Text(node["state"] + reason, style=STATES.get(node["state"], "")),
            str(node["in_flight"]),
            str(node["running"]),
            str(node["waiting"]),
            f"{node['kv_cache_usage']:.0%}",
            f"{node['free_blocks']}/{node['total_blocks']}",
        )
    return found
