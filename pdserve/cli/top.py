"""`pdserve top`: shows the nodes of a cluster, their load, and the router's latencies, live."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import JustifyMethod
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.traffic import Traffic, shown_rates
from pdserve.client.server import LOOK_TIMEOUT, Server, add_server_options, session_of
from pdserve.client.terminal import console_of, number
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import NodeError, PdserveError
from pdserve.common.core.printable import printable

STATES = {
    **dict.fromkeys(("unhealthy", "lost"), "red"),
    **dict.fromkeys(("broken", "unpaired"), "yellow"),
    "ready": "green",
}
COLUMNS: dict[str, JustifyMethod] = {
    **dict.fromkeys(("node", "role", "state"), "left"),
    **dict.fromkeys(("in flight", "running", "waiting", "KV use"), "right"),
}


class NodeRow(msgspec.Struct):
    """The fields of a node in /v1/cluster that the table shows."""

    node_id: str
    role: str
    state: str
    reason: str
    in_flight: int
    running: int
    waiting: int
    kv_cache_usage: float
    total_blocks: int


class ClusterState(msgspec.Struct):
    nodes: list[NodeRow]
    ready: bool
    reason: str
    running: int
    waiting: int
    traffic: dict[str, float | str | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when the first request fails or, with --once, the cluster is not ready; else 0,
    also after Ctrl-C."""
    options = make_parser().parse_args(argv)
    try:
        return asyncio.run(_watch(options))
    except KeyboardInterrupt:
        return 0


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pdserve top",
        description="Show the nodes of a cluster, live; once if standard output is no terminal. "
        "TTFT, ITL, tokens per second and prefix hits are means of the router's last 10 seconds; "
        "when shown once, of its whole life.",
    )
    add_server_options(parser, LOOK_TIMEOUT, operators=True)
    parser.add_argument(
        "--interval", type=number(float, 0.05, 3600), default=1.0, help="seconds between updates"
    )
    parser.add_argument("--once", action="store_true", help="print the state once, then exit")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per update")
    return parser


async def _watch(options: argparse.Namespace) -> int:
    console = console_of()
    async with session_of(options) as session:
        look = _Look(Server(session, options.url))
        found = await look.next()
        if options.json:
            return await _lines(look, found, options)
        shown = table(_read(found, look.server))
        if options.once or not console.is_terminal:
            console.print(shown)
            return 0 if found["ready"] else 1
        with Live(shown, console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(options.interval)
                try:
                    found = await look.next()
                    live.update(table(_read(found, look.server)), refresh=True)
                except PdserveError as error:  # the server may come back
                    live.update(Text(error.message, style="red"), refresh=True)


class _Look:
    """Asks a router for its nodes and metrics."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._traffic = Traffic()

    async def next(self) -> dict[str, Any]:
        """Returns /v1/cluster with the key `traffic`: rates, or `error` if there are none."""
        found = await self.server.get("/v1/cluster")
        if not isinstance(found, dict):
            raise NodeError(f"{self.server.url} is not a router of this version")
        try:
            uptime = float(found.get("uptime_seconds") or 0.0)
            self._traffic.add(await self.server.get("/metrics"), uptime)
            return {**found, "traffic": self._traffic.rates()}
        except PdserveError as error:
            return {**found, "traffic": {"error": error.message}}


async def _lines(look: _Look, found: dict[str, Any], options: argparse.Namespace) -> int:
    while True:
        print(json.dumps(found), flush=True)
        if options.once:
            return 0 if found["ready"] else 1
        await asyncio.sleep(options.interval)
        found = await look.next()


def _read(found: Any, server: Server) -> ClusterState:
    try:
        return msgspec.convert(found, ClusterState)
    except msgspec.ValidationError as error:
        raise NodeError(f"{server.url} is not a router of this version: {error}") from error


def table(state: ClusterState) -> Table:
    """Returns a title for the cluster, and a row per node, sorted by role and id."""
    error = state.traffic.get("error")
    traffic = printable(f"no rates: {error}", 200) if error else shown_rates(state.traffic)
    title = f"{state.running} running, {state.waiting} waiting; {traffic}"
    if not state.ready:
        title = f"not ready: {printable(state.reason, 200)}; {title}"
    found = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, justify in COLUMNS.items():
        # Only the long reasons wrap: the node's id must stay readable.
        found.add_column(name, justify=justify, no_wrap=name != "state", overflow="fold")
    for node in sorted(state.nodes, key=lambda node: (node.role, node.node_id)):
        reason = f" ({printable(node.reason, 80)})" if node.reason not in ("", "ok") else ""
        found.add_row(
            printable(node.node_id, 60),
            printable(node.role, 20),
            Text(printable(node.state, 20) + reason, style=STATES.get(node.state, "")),
            str(node.in_flight),
            str(node.running),
            str(node.waiting),
            f"{node.kv_cache_usage:.0%} of {node.total_blocks}",
        )
    return found
