"""`pdserve up`: runs a whole cluster on this host with one log. Ctrl-C drains and stops it."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, cast

from rich.console import Console
from rich.text import Text

from pdserve.cli.child import Write
from pdserve.cli.cluster import Cluster, node_names, router_names
from pdserve.cli.host_share import node_shares
from pdserve.client.terminal import console_of
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.sources import parse
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.waits import saying
from pdserve.common.obs.json_lines import JSONStream, event, in_log, json_line
from pdserve.common.obs.logging import LogWriter
from pdserve.common.obs.process import dump_stacks_on_signal

STDERR = 2
COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")


def main(argv: Sequence[str] | None = None) -> int:
    return _run("pdserve up", argv)


def serve_main(argv: Sequence[str] | None = None) -> int:
    """`pdserve serve MODEL`: `up` in the form of `vllm serve MODEL`."""
    return _run("pdserve serve", argv, word="model")


def _run(prog: str, argv: Sequence[str] | None, word: str | None = None) -> int:
    notes: list[str] = []
    config = parse(
        ClusterConfig,
        prog=prog,
        description="Start a router and nodes on this host: prefill and decode nodes, or nodes "
        "that do both.",
        argv=argv,
        word=word,
        say=notes.append,
    )
    console = console_of(file=cast(IO[str], log_stream(config)))
    for note in notes:
        log_writer(config, console)("up", note)
    return asyncio.run(serve(with_model(config, console), console, prog))


async def serve(config: ClusterConfig, console: Console, prog: str) -> int:
    """Runs the cluster until it ends. Returns 0 after a signal, 1 when a process it needs died, 2
    when a process cannot start as configured."""
    cluster = make_cluster(config, console)
    try:
        with console.status("starting; loading weights"):
            started = await cluster.start()
        if started:
            line = ready_line(config, cluster.urls)
            console.print(_told(config, line), soft_wrap=True)
            await cluster.ended
        return 0
    except PdserveError as error:
        line = f"{prog}: error: {error.message}"
        console.print(_told(config, line, "error"), style="red", soft_wrap=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        await cluster.stop()


def _told(config: ClusterConfig, line: str, level: str = "info") -> Text:
    """Returns a line of this process; with JSON an object, as of its log."""
    as_json = config.log.log_format == "json"
    return Text(json_line(event("up", line, level)) if as_json else line)


def ready_line(config: ClusterConfig, urls: Sequence[str]) -> str:
    """Returns the line that says where clients, and people with a browser, find the cluster."""
    apis = ", ".join(f"{url}/v1" for url in urls)
    page = f"; the page: {urls[0]}/ui" if config.server.ui else ""
    return f"cluster ready: {apis} (model {model_name(config)}){page}"


def log_stream(config: ClusterConfig) -> io.TextIOBase:
    """Returns the stream for the log of all roles; with JSON, lines of this process are objects,
    too, also those of libraries."""
    stream = LogStream()
    if config.log.log_format != "json":
        return stream
    logging.captureWarnings(True)
    sys.stderr = JSONStream("up", stream.write, stream.fileno)
    return sys.stderr


class LogStream(io.TextIOBase):
    """Standard error for the log of all roles. When it cannot be written (full disk, reader stuck
    or gone) lines are dropped: an exception here would end the forwarding of the roles' output."""

    def __init__(self) -> None:
        self._writer = LogWriter(STDERR)  # a logging handler, so flushed at exit

    def write(self, text: str) -> int:
        self._writer.put(text)
        return len(text)

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)


def make_cluster(config: ClusterConfig, console: Console) -> Cluster:
    """Returns a cluster, not started, that logs to `console`; SIGINT and SIGTERM interrupt it."""
    write = log_writer(config, console)
    if config.on == "ray":
        from pdserve.cli.ray_cluster import RayCluster  # the extra `ray`

        cluster: Cluster = RayCluster(config, write)
    else:
        cluster = Cluster(config, node_shares(config), write)
    dump_stacks_on_signal()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, cluster.interrupt)
    return cluster


@saying("checking the options and the model")
def with_model(config: ClusterConfig, console: Console) -> ClusterConfig:
    """Returns the config with the model's folder in place of its name. Downloads or unpacks the
    model once, before any role starts.

    Raises:
        ConfigError: a process could not start with these options.
    """
    # Slow imports, which --help does not need.
    from pdserve.cli.model import unpack
    from pdserve.cli.preflight import check_checkpoint, check_host
    from pdserve.demo_model.embedded import resolve_model

    check_host(config)
    model = config.engine.model
    if model.model is None and model.revision is None and model.download_dir is None:
        unpack(console)
    config = replace(config, engine=replace(config.engine, model=resolve_model(model)))
    check_checkpoint(config)
    return config


def model_name(config: ClusterConfig) -> str:
    """Returns the model name that clients use; `config` comes from `with_model`."""
    return config.engine.model.served_name


def log_writer(config: ClusterConfig, console: Console) -> Write:
    """Returns a writer that prints `name │ line` in a colour per name; with JSON, objects that name
    the process."""
    if config.log.log_format == "json":
        return lambda name, line: console.print(
            _told(config, line) if name == "up" else Text(in_log(name, line)), soft_wrap=True
        )
    colours: dict[str, str] = {}
    width = max(map(len, (*router_names(config), *node_names(config))))

    def write(name: str, line: str) -> None:
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        prefix = Text(f"{name:<{width}} │ ", style=colour)
        console.print(prefix + Text.from_ansi(line), soft_wrap=True)

    return write
