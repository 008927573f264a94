"""A client beside the load, in a process of its own: how long `/health` and a short answer take.

    python -m benchmarks.soak.probe http://127.0.0.1:8000 '{"Authorization": "Bearer …"}'

writes a line for each answer: what was asked, when (time.monotonic, which processes of a host
share), and the seconds that it took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from urllib.parse import urlsplit

import numpy as np

HEALTH, SHORT = "/health", "a short answer"
PERIODS = {HEALTH: 0.05, SHORT: 0.25}  # seconds between an answer and the next question
TIMEOUT = 60.0  # seconds
PERCENTILES = (50, 99, 100)
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Sample:
    kind: str
    at: float  # when it was asked, in seconds of time.monotonic
    seconds: float


def main(url: str, headers: str) -> None:
    for kind in PERIODS:
        Thread(target=_ask_on, args=(kind, url, json.loads(headers)), daemon=True).start()
    sys.stdin.read()  # until who started this closes it


def _ask_on(kind: str, url: str, headers: Mapping[str, str]) -> None:
    while True:
        connection = HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT)
        with suppress(OSError, HTTPException):  # a router that died has a successor
            while True:
                since = monotonic()
                if _ask(kind, connection, headers):
                    line = json.dumps([kind, since, monotonic() - since])
                    os.write(1, f"{line}\n".encode())  # at once: two threads write
                sleep(PERIODS[kind])
        connection.close()
        sleep(PERIODS[kind])


def _ask(kind: str, connection: HTTPConnection, headers: Mapping[str, str]) -> bool:
    """Whether it was answered as asked."""
    if kind == HEALTH:
        connection.request("GET", HEALTH)
    else:
        typed = {"Content-Type": "application/json", **headers}
        connection.request("POST", "/v1/completions", json.dumps(BODY), typed)
    response = connection.getresponse()
    response.read()
    return response.status == 200


@asynccontextmanager
async def probing(url: str, headers: Mapping[str, str]) -> AsyncIterator[list[Sample]]:
    """Samples are in the list when it is over."""
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
    samples: Iterable[Sample], kind: str, counts: Callable[[Sample], bool]
) -> dict[str, float]:
    """Milliseconds by percentile, of the samples that count; empty without any."""
    found = [1000 * each.seconds for each in samples if each.kind == kind and counts(each)]
    if not found:
        return {}
    values = np.percentile(found, PERCENTILES)
    return {f"p{p}": round(float(ms), 1) for p, ms in zip(PERCENTILES, values, strict=True)}


if __name__ == "__main__":
    main(*sys.argv[1:])
