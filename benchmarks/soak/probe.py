"""Measures the latency of `/health` and of a short answer during the load, in its own process.

    python -m benchmarks.soak.probe http://127.0.0.1:8000 '{"Authorization": "Bearer …"}'

writes a line per answer: the kind of request, its time (time.monotonic, which processes of a host
share), its seconds, and in how many of them the router's event loop, and this client, were runnable
without a CPU. The rest is time of the router or the nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from urllib.parse import urlsplit

import numpy as np
import psutil

HEALTH, SHORT = "/health", "a short answer"
PERIODS = {HEALTH: 0.05, SHORT: 0.25}  # seconds between an answer and the next question
TIMEOUT = 60.0  # seconds
PERCENTILES = (50, 99, 100)
BODY = {
    "prompt": [5, 6, 7, 8],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "timeline": True,
}


@dataclass(frozen=True, slots=True)
class Sample:
    kind: str
    at: float  # time of the request (time.monotonic)
    seconds: float
    router_starved: float = 0.0  # seconds of these in which the router's main thread had no CPU
    probe_starved: float = 0.0  # seconds of these in which this client had no CPU
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds by stage, from its timeline

    @property
    def served(self) -> float:
        """The seconds minus those without a CPU."""
        return max(0.0, self.seconds - self.router_starved - self.probe_starved)


def main(url: str, headers: str) -> None:
    for kind in PERIODS:
        Thread(target=_ask_on, args=(kind, url, json.loads(headers)), daemon=True).start()
    sys.stdin.read()  # until the parent closes it


def _ask_on(kind: str, url: str, headers: Mapping[str, str]) -> None:
    place = urlsplit(url)
    while True:
        connection = HTTPConnection(place.netloc, timeout=TIMEOUT)
        with suppress(OSError, HTTPException):  # a dead router has a successor
            connection.connect()
            router, me = _listening(place.port), "thread-self"
            while True:
                since, before = monotonic(), (_starved(router), _starved(me))
                if (stages := _ask(kind, connection, headers)) is not None:
                    seconds, after = monotonic() - since, (_starved(router), _starved(me))
                    starved = [b - a for a, b in zip(before, after, strict=True)]
                    line = json.dumps([kind, since, seconds, *starved, stages])
                    os.write(1, f"{line}\n".encode())  # one write, since two threads write
                sleep(PERIODS[kind])
        connection.close()
        sleep(PERIODS[kind])


def _listening(port: int | None) -> str:
    """Returns the /proc path of the main thread that listens at `port`; empty if not found."""
    with suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f"{each.pid}/task/{each.pid}"
    return ""


def _starved(thread: str) -> float:
    """Returns the seconds, since its start, in which the thread was runnable without a CPU; 0 if
    the system does not report them."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _ask(
    kind: str, connection: HTTPConnection, headers: Mapping[str, str]
) -> dict[str, float] | None:
    """Sends a request; returns its seconds by stage, None if it failed."""
    if kind == HEALTH:
        connection.request("GET", HEALTH)
    else:
        typed = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/v1/completions", json.dumps(BODY), typed)
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        return None
    stages: dict[str, float] = {}
    if kind == SHORT:
        for stage in json.loads(answer)["pdserve"]["timeline"]["stages"]:
            stages[stage["name"]] = stages.get(stage["name"], 0.0) + stage["seconds"]
    return stages


@asynccontextmanager
async def probing(url: str, headers: Mapping[str, str]) -> AsyncIterator[list[Sample]]:
    """Runs the probe; the list has the samples after the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.soak.probe", url, json.dumps(dict(headers))),
        cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    samples: list[Sample] = []
    assert process.stdout is not None and process.stdin is not None
    reader = asyncio.create_task(_read(process.stdout, samples))
    try:
        yield samples
    finally:
        process.stdin.close()
        await process.wait()
        await reader


async def _read(lines: asyncio.StreamReader, samples: list[Sample]) -> None:
    async for line in lines:
        samples.append(Sample(*json.loads(line)))


def percentiles(
    samples: Iterable[Sample],
    kind: str,
    counts: Callable[[Sample], bool],
    seconds: Callable[[Sample], float] = lambda each: each.seconds,
) -> dict[str, float]:
    """Returns percentile → milliseconds of the samples that count; empty without any."""
    return milliseconds([seconds(each) for each in samples if each.kind == kind and counts(each)])


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Returns percentile → milliseconds; empty without values."""
    if not seconds:
        return {}
    values = 1000 * np.percentile(seconds, PERCENTILES)
    return {f"p{p}": round(float(ms), 1) for p, ms in zip(PERCENTILES, values, strict=True)}


def mean_stages(samples: Iterable[Sample], counts: Callable[[Sample], bool]) -> dict[str, float]:
    """Returns stage → mean milliseconds of a short answer, the longest first."""
    found = [each.stages for each in samples if each.kind == SHORT and counts(each)]
    total = sum(map(Counter, found), Counter[str]())
    return {name: round(1000 * seconds / len(found), 1) for name, seconds in total.most_common(5)}


if __name__ == "__main__":
    main(*sys.argv[1:])
