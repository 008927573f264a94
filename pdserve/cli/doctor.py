"""`pdserve doctor`: checks what a cluster needs of this host and names the fix of each failure."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from pdserve.cli.doctor_cluster import TIMEOUT, cluster
from pdserve.cli.finding import Finding, Verdict
from pdserve.cli.model import check as check_model
from pdserve.client.terminal import console_of, number, positive
from pdserve.common.config.options import CommandParser
from pdserve.common.core.errors import ConfigError
from pdserve.common.core.host import AMPLE_FILES, bind, memory_left, usable_cores
from pdserve.common.core.printable import printable
from pdserve.common.core.waits import saying

PORTS = (8000, 8001, 8002)  # the defaults of HTTP, gRPC and the registry
CONNECT_TIMEOUT = 3.0  # seconds
MAX_TEXT = 1200  # characters that are shown; some are another host's
MIN_SHM = 1 << 30  # bytes of /dev/shm that NCCL and Ray need


Check = Callable[[], Iterator[Finding]]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a check failed, else 0."""
    options = _parser().parse_args(argv)
    with saying("checking"):  # a GPU's kernels are compiled
        findings = [finding for check in _checks(options) for finding in _run(check)]
    if options.json:
        print(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        _show(findings)
    return int(any(each.verdict is Verdict.FAILED for each in findings))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pdserve doctor",
        description="Check this host: packages, cores, memory, limits and ports; with options also "
        "GPUs, a model and peers. Or check a running cluster. Exit code 1: a check failed.",
    )
    add = parser.add_argument
    add("--gpu", action="store_true", help="require GPUs, and run a computation on each")
    add("--model", metavar="FOLDER", help="check that this user can read this checkpoint folder")
    add(
        "--port",
        type=number(int, 0, 65535),
        action="append",
        metavar="N",
        help="check that this port is free; may be given several times (default: 8000 to 8002)",
    )
    add(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="check that this address accepts connections; may be given several times",
    )
    add(
        "--cluster",
        metavar="URL",
        help="check the cluster behind this router's HTTP port instead of this host: send prompts "
        "and prove that KV moved; keys are PDSERVE_ADMIN_API_KEY or OPENAI_API_KEY",
    )
    add(
        "--timeout",
        type=positive,
        default=TIMEOUT,
        metavar="SECONDS",
        help="with --cluster: for one answer",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _checks(options: argparse.Namespace) -> Iterator[Check]:
    if options.cluster is not None:
        yield partial(cluster, options.cluster, options.timeout)
        return
    yield from (python, packages, cores, memory, open_files, sealed_memory, shared_memory)
    yield partial(ports, options.port or PORTS)
    if options.model is not None:
        yield partial(model, Path(options.model))
    yield from (partial(reach, peer) for peer in options.peer)
    if options.gpu:
        from pdserve.cli.doctor_gpu import gpus  # imports torch, which a router's host may lack

        yield gpus


def _run(check: Check) -> Iterator[Finding]:
    """Runs one check; an exception in it becomes a finding, so that the others still run."""
    try:
        yield from check()
    except ConfigError:
        raise
    except Exception as error:
        name = getattr(check, "__name__", "a check")
        yield Finding(name, Verdict.FAILED, f"{type(error).__name__}: {error}", "report this")


def _show(findings: Sequence[Finding]) -> None:
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}
    table = Table("", "", "seen", "fix", box=None)
    for each in findings:
        colour = colours[each.verdict]
        words = (printable(text, MAX_TEXT) for text in (each.subject, each.seen, each.fix))
        table.add_row(Text(each.verdict, colour), *map(Text, words))
    console_of().print(table)


# ---- what is installed ----


def python() -> Iterator[Finding]:
    seen, fits = ".".join(map(str, sys.version_info[:3])), (3, 11) <= sys.version_info < (3, 14)
    yield Finding(
        "python",
        Verdict.OK if fits else Verdict.WARNING,
        seen,
        "" if fits else "3.11, 3.12 and 3.13 are tested",
    )


def packages() -> Iterator[Finding]:
    """Checks the required packages, and those of the extras node, cuda and ray."""
    for line in requires("pdserve") or ():
        wanted = Requirement(line)
        extra = next((e for e in ("", "node", "cuda", "ray") if _applies(wanted, e)), None)
        if extra is not None:
            yield _package(wanted, extra)


def _applies(wanted: Requirement, extra: str) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


def _package(wanted: Requirement, extra: str) -> Finding:
    optional = {"node": "nodes", "cuda": "GPUs", "ray": "Ray"}.get(extra)
    install = f"pip install 'pdserve[{extra}]'" if extra else f"pip install '{wanted.name}'"
    try:
        seen = version(wanted.name)
    except PackageNotFoundError:
        if optional is not None:
            return Finding(
                wanted.name, Verdict.WARNING, "not installed", f"for {optional}: {install}"
            )
        return Finding(wanted.name, Verdict.FAILED, "not installed", install)
    if wanted.specifier.contains(seen, prereleases=True):
        return Finding(wanted.name, Verdict.OK, seen)
    return Finding(
        wanted.name, Verdict.FAILED, seen, f"pip install '{wanted.name}{wanted.specifier}'"
    )


# ---- what the host gives ----


def cores() -> Iterator[Finding]:
    usable, there = usable_cores(), os.cpu_count() or 1
    yield Finding("cores", Verdict.OK, f"{usable} of {there} usable")
    compiler = shutil.which("g++")
    yield Finding(
        "C++ compiler",
        Verdict.OK if compiler else Verdict.WARNING,
        compiler or "none",
        ""
        if compiler
        else "install g++, unless the wheel has kernels for this CPU: without either, "
        "CPU nodes use slower torch operators",
    )


def memory() -> Iterator[Finding]:
    left = memory_left()
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES")
    free = page * pages if left is None else min(left, page * pages)
    yield Finding("memory", Verdict.OK, f"{free / 2**30:.1f} GiB free")


def open_files() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ample = hard in (resource.RLIM_INFINITY, -1) or hard >= AMPLE_FILES
    yield Finding(
        "open files",
        Verdict.OK if ample else Verdict.WARNING,
        "no limit" if hard == resource.RLIM_INFINITY else f"up to {hard}",
        "" if ample else f"for many connections run ulimit -n {AMPLE_FILES}",
    )


def sealed_memory() -> Iterator[Finding]:
    """Checks that memfds can be sealed: a CPU node keeps its KV cache in one."""
    try:
        os.close(os.memfd_create("pdserve-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as error:
        fix = "CPU nodes need Linux and a seccomp profile that allows memfd_create"
        yield Finding("sealed memory files", Verdict.FAILED, str(error), fix)
    else:
        yield Finding("sealed memory files", Verdict.OK, "can be made")


def shared_memory() -> Iterator[Finding]:
    """Checks /dev/shm, which only NCCL and Ray use; pdserve's own segments are memfds."""
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
        ample = free >= MIN_SHM
        yield Finding(
            "/dev/shm",
            Verdict.OK if ample else Verdict.WARNING,
            f"{free / 2**30:.2f} GiB free",
            "" if ample else "for NCCL and Ray: docker run --shm-size 2g, or ipc: host",
        )


def ports(wanted: Sequence[int]) -> Iterator[Finding]:
    for port in wanted:
        try:
            bind("127.0.0.1", port, "a role", "port").close()
        except ConfigError as error:
            fix = "end the process that has it, or choose another port"
            yield Finding(f"port {port}", Verdict.WARNING, error.message, fix)
        else:
            yield Finding(f"port {port}", Verdict.OK, "free")


def model(folder: Path) -> Iterator[Finding]:
    try:
        check_model(folder)
    except ConfigError as error:
        yield Finding("model", Verdict.FAILED, error.message, "see `pdserve model --help`")
    else:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        yield Finding("model", Verdict.OK, f"{folder}, {size / 2**30:.2f} GiB of weights")


def reach(peer: str) -> Iterator[Finding]:
    subject = f"peer {peer}"
    host, _, port = peer.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        yield Finding(subject, Verdict.FAILED, "not HOST:PORT", "for example router-1:8002")
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except OSError as error:
        fix = "check that it runs, listens on more than loopback, and that no firewall blocks it"
        yield Finding(subject, Verdict.FAILED, str(error), fix)
    else:
        yield Finding(subject, Verdict.OK, "reached")
