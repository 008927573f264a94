"""Clusters on this host, and clients of them, for benchmarks of live clusters."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.request import urlopen

import aiohttp

from benchmarks.fleet import Fleet, flags
from pdserve.common.obs.process import read_ports

START_TIMEOUT = 180.0  # seconds
T, R = TypeVar("T"), TypeVar("R")


@contextmanager
def serving(
    model: Path, router: Mapping[str, Any], pairs: int = 1, **options: Any
) -> Iterator[Fleet]:
    """Runs a router and `pairs` of a prefill and a decode node; yields them once they are ready.
    `router`, `options`: flags, as those of `Fleet`."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(model, Path(folder) / "log", os.environ, router, **options)
        try:
            fleet.start_router()
            for _ in range(pairs):
                fleet.start_node("prefill")
                fleet.start_node("decode")
            fleet.wait_ready()
            yield fleet
        finally:
            fleet.stop()


@contextmanager
def up(options: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Runs `pdserve up`; yields its HTTP port and its pid once it is ready."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        ports_file = Path(folder) / "ports.json"
        command = [str(Path(sys.executable).with_name("pdserve")), "up"]
        command += ["--port", "0", "--grpc-port", "0", "--ports-file", str(ports_file)]
        process = subprocess.Popen([*command, *flags(options)])
        try:
            port = wait_for(lambda: (read_ports(ports_file) or {}).get("http"))
            wait_for(lambda: _answers(f"http://127.0.0.1:{port}/ready"))
            yield port, process.pid
        finally:
            process.terminate()
            process.wait(30)


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + START_TIMEOUT
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit("the cluster did not start")
        time.sleep(0.05)
    return value


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except OSError:
        return False


class Timed(Protocol):
    @property
    def time(self) -> float: ...  # seconds


A = TypeVar("A", bound=Timed)


async def closed_loop(
    ask: Callable[[aiohttp.ClientSession, T], Awaitable[R]], asks: Iterable[T], clients: int
) -> list[R]:
    """Each of the clients asks again as soon as it is answered, until all is asked. Returns the
    answers in the order in which they came."""
    left, answers = iter(asks), list[R]()

    async def client() -> None:
        for each in left:
            answers.append(await ask(session, each))

    async with _session() as session, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return answers


async def at_times(
    ask: Callable[[aiohttp.ClientSession, A], Awaitable[R]], asks: Sequence[A]
) -> list[R]:
    """Asks each at its time, whether or not earlier ones are answered. Returns the answers."""

    async def later(each: A) -> R:
        await asyncio.sleep(each.time)
        return await ask(session, each)

    async with _session() as session:
        return await asyncio.gather(*map(later, asks))


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def first_token(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    refused: Sequence[int] = (),
) -> float | None:
    """Returns the router's seconds until the first token of a completion; None: the status is one
    of `refused`."""
    url = f"http://127.0.0.1:{fleet.ports['http']}/v1/completions"
    ask = {"model": fleet.model.name, "ignore_eos": True, **body}
    timeline = {"X-PDServe-Timeline": "1", **(headers or {})}
    async with session.post(url, json=ask, headers=timeline) as response:
        answer = await response.json()
        if response.status in refused:
            return None
        response.raise_for_status()
        return float(answer["pdserve"]["timeline"]["first_token"])
