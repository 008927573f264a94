"""Reads request traces.

.jsonl      Mooncake's (timestamp in ms, input_length, output_length, hash_ids), or
            {"time": s, "input_length": n, "output_length": m} with optional hash_ids, session,
            client and priority
.csv.gz     ours: Mooncake's, with runs of hash ids like `0-13 40`
.csv        Azure's (TIMESTAMP, ContextTokens, GeneratedTokens), whose prompts share no prefixes
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path

import msgspec

from pdserve.common.core.errors import ConfigError
from pdserve.simulate.workloads import BLOCK, Arrival, hash_of

MOST_TOKENS = 10_000_000  # per prompt


class Line(msgspec.Struct):
    """A line of a `.jsonl` trace."""

    input_length: int
    output_length: int
    timestamp: float | None = None  # milliseconds
    time: float | None = None  # seconds
    hash_ids: list[int] = []
    session: str = ""
    client: str = ""
    priority: int = 0


_decoder = msgspec.json.Decoder(Line)


def read_trace(path: Path, most: int | None = None, block_size: int = BLOCK) -> list[Arrival]:
    """Reads up to `most` arrivals, ordered by time. Arrivals with equal timestamps, which are
    coarse in Mooncake's traces, are spread over the time until the next timestamp.

    Raises:
        ConfigError: the file is missing, or a line is invalid.
    """
    read = next((READERS[end] for end in READERS if path.name.endswith(end)), None)
    if read is None:
        raise ConfigError(f"--trace {path}: it must end in {', '.join(READERS)}")
    found: list[Arrival] = []
    try:
        for each in read(path, block_size):
            found.append(each)
            if len(found) == most:
                break
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, csv.Error,
            msgspec.MsgspecError) as error:  # fmt: skip
        raise ConfigError(f"--trace {path}, request {len(found) + 1}: {error!r}") from error
    if not found:
        raise ConfigError(f"--trace {path}: it has no requests")
    return _spread(sorted(found, key=lambda each: each.time))


def _spread(arrivals: list[Arrival]) -> list[Arrival]:
    batches = [list(batch) for _, batch in groupby(arrivals, key=lambda each: each.time)]
    found, begun = [], batches[0][0].time
    for number, batch in enumerate(batches):
        at = batch[0].time
        following = batches[number + 1][0].time if number + 1 < len(batches) else at + 3.0
        for place, each in enumerate(batch):
            time = at + (following - at) * place / len(batch) - begun
            found.append(replace(each, time=time))
    return found


def _arrival(time: float, line: Line, block_size: int) -> Arrival:
    tokens, output = line.input_length, line.output_length
    if not (0 < tokens <= MOST_TOKENS and 0 <= output <= MOST_TOKENS):
        raise ValueError(f"input_length {tokens} or output_length {output} is out of range")
    if not abs(time) < 1e12:
        raise ValueError(f"the time {time} s is out of range")
    blocks = [hash_of(each) for each in line.hash_ids[: tokens // block_size]]
    return Arrival(
        time, tokens, blocks, max(1, output), line.session, line.client, line.priority
    )  # fmt: skip


def _jsonl(path: Path, block_size: int) -> Iterator[Arrival]:
    with path.open("rb") as lines:
        for text in filter(bytes.strip, lines):
            line = _decoder.decode(text)
            if (line.time is None) == (line.timestamp is None):
                raise ValueError("it must have either timestamp (ms) or time (s)")
            time = line.time if line.time is not None else (line.timestamp or 0.0) / 1000
            yield _arrival(time, line, block_size)


def _csv_gz(path: Path, block_size: int) -> Iterator[Arrival]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ids: list[int] = []
            for run in row["hash_ids"].split():
                first, _, last = run.partition("-")
                run_of = range(int(first), int(last or first) + 1)
                if len(run_of) > MOST_TOKENS:
                    raise ValueError(f"hash_ids {run} are more than {MOST_TOKENS} blocks")
                ids += run_of
            line = Line(int(row["input_length"]), int(row["output_length"]), hash_ids=ids)
            yield _arrival(int(row["timestamp"]) / 1000, line, block_size)


def _azure(path: Path, block_size: int) -> Iterator[Arrival]:
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            line = Line(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            yield _arrival(time, line, block_size)


READERS: dict[str, Callable[[Path, int], Iterator[Arrival]]] = {
    ".jsonl": _jsonl,
    ".csv.gz": _csv_gz,
    ".csv": _azure,
}
