"""`pdserve cluster-check`: checks that a node's ranks reach each other and that their collectives
are right, and measures them."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from time import monotonic, sleep
from urllib.parse import urlsplit

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from pdserve.client.terminal import console_of, number, positive
from pdserve.common.config.options import CommandParser
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import ConfigError, NodeError
from pdserve.common.distributed.check import CheckConfig, CheckReport, CheckWorker
from pdserve.common.distributed.executor import WorkerSpec
from pdserve.common.distributed.launch import make_executor
from pdserve.common.distributed.parallel_state import group_layout

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20)
STOP_TIMEOUT = 5.0  # seconds

_reports = msgspec.msgpack.Decoder(CheckReport)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if every collective gave the right result, 1 if one did not or a rank was lost."""
    options = _parser().parse_args(argv)
    world = options.world_size or (options.tp or 1) * options.pp
    tp = options.tp or max(world // options.pp, 1)
    group_layout(world, tp, options.pp)  # raises before anything is started
    config = CheckConfig(
        tensor_parallel_size=tp,
        pipeline_parallel_size=options.pp,
        device=_choose_device(options.device),
        local_rank=options.local_rank,
        communicator=options.device_communicator,
        timeout=options.timeout,
        sizes=tuple(options.sizes),
        seconds=options.seconds,
    )
    try:
        body = _join(config, world, options) if options.rank is not None else _spawn(config, world)
    except NodeError as error:
        print(f"pdserve cluster-check: error: {error.message} ({error.code})", file=sys.stderr)
        return 1
    return _report(_reports.decode(body), options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pdserve cluster-check",
        description="Start ranks as a node does, check the result of every collective, measure "
        "latency and bandwidth, and say what to fix. Exit code 1: a check failed. For several "
        "hosts start one command per rank, with --rank, --world-size and --init-method.",
    )
    add, count = parser.add_argument, number(int, 1)
    add("--tp", "--tensor-parallel-size", type=count, metavar="N", help="default: 1, or all ranks")
    add("--pp", "--pipeline-parallel-size", type=count, default=1, metavar="N")
    add("--world-size", type=count, metavar="N", help="number of ranks (default: tp × pp)")
    add("--rank", type=number(int, 0), metavar="R", help="run only this rank in this process")
    add("--init-method", metavar="tcp://HOST:PORT", help="with --rank: a free port of rank 0")
    add("--local-rank", type=int, metavar="R", help="with --rank: GPU index (default: the rank)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--device-communicator", default="auto", metavar="NAME", help="same values as a node's")
    add(
        "--timeout",
        type=positive,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for a rank before it counts as lost",
    )
    add("--sizes", type=_sizes, default=SIZES, metavar="N,N,...", help="message sizes in bytes")
    add("--seconds", type=positive, default=0.2, help="per operation and size (default: 0.2)")
    add("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(number(int, 1), text.split(",")))


def _choose_device(requested: str) -> str:
    if requested != "auto":
        return requested
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- run ----


def _spawn(config: CheckConfig, world: int) -> bytes:
    async def run() -> bytes:
        executor = make_executor([_spec(config, rank, world) for rank in range(world)])
        try:
            await executor.start()
            return await executor.step(b"")
        finally:
            await executor.shutdown(STOP_TIMEOUT)

    return asyncio.run(run())


def _join(config: CheckConfig, world: int, options: argparse.Namespace) -> bytes:
    if options.world_size is None or not _is_place(options.init_method or ""):
        raise ConfigError("--rank needs --world-size and --init-method tcp://HOST:PORT")
    if not 0 <= options.rank < world:
        raise ConfigError(f"--rank {options.rank} is not one of {world}: 0 to {world - 1}")
    if options.rank > 0:
        _await_rank_0(options.init_method, options.timeout)
    spec = _spec(config, options.rank, world, options.init_method)
    worker = CheckWorker(spec, emit=lambda event: None)
    try:
        return worker.step(b"")
    finally:
        worker.close()


def _await_rank_0(url: str, timeout: float) -> None:
    """Returns once something listens at `url`. Without this, torch's own time-out would print a
    long stack trace.

    Raises:
        NodeError: nothing listens there within `timeout` seconds.
    """
    place = urlsplit(url)
    deadline = monotonic() + timeout
    while True:
        try:
            with socket.create_connection((place.hostname, place.port), timeout):
                return
        except OSError as error:
            if monotonic() >= deadline:
                why = (error.strerror or str(error)).lower()
                raise NodeError(
                    f"nothing answers at {url} within {timeout:g} s, {why}: start rank 0 there, "
                    "with the same --init-method",
                    code="RANK_LOST",
                ) from error
        sleep(0.1)


def _is_place(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme == "tcp" and bool(parts.hostname and parts.port)
    except ValueError:  # the port is out of range
        return False


def _spec(config: CheckConfig, rank: int, world: int, init_method: str = "") -> WorkerSpec:
    return WorkerSpec(
        factory="pdserve.common.distributed.check:CheckWorker",
        rank=rank,
        world_size=world,
        init_method=init_method,
        config=msgspec.to_builtins(config),
        role="cluster-check",
        log=LogConfig(log_level="warning"),
    )


# ---- report ----


def _report(report: CheckReport, options: argparse.Namespace) -> int:
    failed = report.failures
    if options.rank:  # rank 0 reports for all
        print(f"rank {options.rank}: {len(failed)} checks failed; rank 0 has the figures")
    elif options.json:
        print(json.dumps({"ok": not failed, **msgspec.to_builtins(report)}, indent=2))
    else:
        _print(console_of(), report)
    return 1 if failed else 0


def _print(console: Console, report: CheckReport) -> None:
    for name, groups in report.layout.items():
        console.print(f"{name} groups: {' '.join(map(str, groups))}")
    for name, transport in report.transports.items():
        console.print(f"{name} tensors go over {transport}")
    console.print()
    console.print(_ranks(report))
    if report.figures:
        console.print(_figures(report))
    for check in report.failures:
        where = f"{check.group} group, rank {check.rank}"
        console.print(f"WRONG: {check.operation} of {check.dtype} in the {where}: {check.error}")
    for line in report.advice:
        console.print(f"fix: {line}")
    right = len(report.checks) - len(report.failures)
    console.print(f"{right} of {len(report.checks)} checks passed")


def _ranks(report: CheckReport) -> Table:
    table = Table(title="ranks")
    for column in ("rank", "host", "address", "device", "cores", "InfiniBand", "environment"):
        table.add_column(column)
    for each in report.ranks:
        adapters = ", ".join(each.infiniband) or "none"
        variables = "\n".join(f"{name}={value}" for name, value in each.variables.items())
        table.add_row(
            *(str(each.rank), each.host, each.address, each.device),
            *(str(each.cores), adapters, variables or "-"),
        )
    return table


def _figures(report: CheckReport) -> Table:
    table = Table(title="latency, and bytes per rank divided by it")
    for column in ("group", "operation", "bytes", "µs", "GB/s"):
        left = column in ("group", "operation")
        table.add_column(column, justify="left" if left else "right")
    for each in report.figures:
        speed = f"{each.latency_us:.0f}", f"{each.gb_per_s:.3f}"
        table.add_row(each.group, each.operation, str(each.nbytes), *speed)
    return table
