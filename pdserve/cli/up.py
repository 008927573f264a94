"""`pdserve up`: a whole cluster on this host, one readable log, Ctrl-C drains and stops all."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, cast

from rich.console import Console
from rich.text import Text

from pdserve.cli.child import Write
from pdserve.cli.cluster import Cluster, node_names
from pdserve.cli.host_share import node_shares
from pdserve.client.terminal import console_of
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.obs.logging import LogWriter
from pdserve.common.obs.process import dump_stacks_on_signal

STDERR = 2
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


def main(argv: Sequence[str] | None = None) -> int:
    return _run("pdserve up", argv)


def serve_main(argv: Sequence[str] | None = None) -> int:
    """The same by the name and with the first word that vLLM's users know."""
    return _run("pdserve serve", argv, word="model")


def _run(prog: str, argv: Sequence[str] | None, word: str | None = None) -> int:
    config = parse(
        ClusterConfig,
        prog=prog,
        description="Start a router and nodes on this host: prefill and decode nodes, or such as "
        "do both.",
        argv=argv,
        word=word,
    )
    console = console_of(file=cast(IO[str], LogStream()))
    return asyncio.run(serve(with_model(config, console), console, prog))


async def serve(config: ClusterConfig, console: Console, prog: str) -> int:
    """Runs the cluster until a signal (exit code 0), a death that ends it (1) or a process that
    cannot start as configured (2)."""
    cluster = make_cluster(config, console)
    try:
        with console.status("starting; loading weights"):
            started = await cluster.start()
        if started:
            console.print(f"cluster ready: {cluster.url}/v1 (model {model_name(config)})")
            await cluster.ended
        return 0
    except PdserveError as error:
        console.print(f"{prog}: {error.message}", style="red")
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        await cluster.stop()


class LogStream(io.TextIOBase):
    """Standard error for the log of all roles: a full disk, or a reader who stands still or has
    gone, loses lines and nothing else. An error here would end the forwarding of the roles' own
    lines."""

    def __init__(self) -> None:
        self._writer = LogWriter(STDERR)  # flushed at exit, as every logging handler is

    def write(self, text: str) -> int:
        self._writer.put(text)
        return len(text)

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)


def make_cluster(config: ClusterConfig, console: Console) -> Cluster:
    """Not started yet; its log goes to the console, and SIGINT and SIGTERM interrupt it."""
    cluster = Cluster(config, node_shares(config), log_writer(config, console))
    dump_stacks_on_signal()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, cluster.interrupt)
    return cluster


def with_model(config: ClusterConfig, console: Console) -> ClusterConfig:
    """The config with a folder in place of a model's name or of none: made ready here, once,
    before roles start."""
    # Costs imports that --help does not need.
    from pdserve.cli.model import unpack
    from pdserve.demo_model.embedded import resolve_model

    model = config.engine.model
    if model.model is None and model.revision is None and model.download_dir is None:
        unpack(console)
    return replace(config, engine=replace(config.engine, model=resolve_model(model)))


def model_name(config: ClusterConfig) -> str:
    """What clients ask for; `config` has its model filled in."""
    return config.engine.model.served_name


def log_writer(config: ClusterConfig, console: Console) -> Write:
    """Shows lines as `name │ line`, a colour for each name; JSON lines stay as they are."""
    if config.log.log_format == "json":
        return lambda name, line: console.print(Text(line), soft_wrap=True)
    colours: dict[str, str] = {}
    width = max(map(len, ("router", *node_names(config))))

    def write(name: str, line: str) -> None:
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        prefix = Text(f"{name:<{width}} │ ", style=colour)
        console.print(prefix + Text.from_ansi(line), soft_wrap=True)

    return write
