"""Prompts for `bench serve`: synthetic ones of given lengths, or with the lengths of a trace.

A prompt is a list of token ids, which has the exact length, or that many common words, which have
about that many tokens. Chat endpoints accept only text.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Ids below this are special tokens in some vocabularies.
FIRST_TOKEN_ID = 64
# Tokens per hash id in a Mooncake trace.
TRACE_BLOCK = 512
SHAREGPT_INPUT, SHAREGPT_OUTPUT, SHAREGPT_SIGMA = 161.0, 338.0, 1.0

COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team"
)
WORDS = COMMON_WORDS.split()


class DatasetError(ValueError):
    """The data set cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's content."""

    prompt: list[int] | str
    input_len: int  # tokens (ids) or words (text)
    output_len: int


@dataclass(frozen=True, slots=True)
class RandomSpec:
    """Lengths of synthetic prompts. A length is drawn uniformly from
    `[len * (1 - range_ratio), len * (1 + range_ratio)]`."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0  # [0, 1)
    prefix_len: int = 0  # tokens before the input that all prompts share


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Draws prompts as token ids in `[64, size)` or as words."""

    as_ids: bool
    size: int = 512

    def draw(self, rng: np.random.Generator, count: int) -> list[Any]:
        """`count` random ids or words."""
        if self.as_ids:
            return rng.integers(FIRST_TOKEN_ID, self.size, count).tolist()
        return [WORDS[i] for i in rng.integers(0, len(WORDS), count)]

    def write(self, parts: list[Any]) -> list[int] | str:
        return parts if self.as_ids else " ".join(parts)


@dataclass(frozen=True, slots=True)
class PrefixSpec:
    """Lengths of prompts with `num_prefixes` different prefixes."""

    prefix_len: int
    suffix_len: int
    num_prefixes: int
    output_len: int


class TraceRow(NamedTuple):
    """One request of a trace."""

    timestamp: float  # seconds
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]  # one per block of TRACE_BLOCK tokens; empty: unknown


def random_prompts(spec: RandomSpec, count: int, vocabulary: Vocabulary, seed: int) -> list[Prompt]:
    """`count` synthetic prompts; equal arguments give equal prompts."""
    rng = np.random.default_rng(seed)
    prefix = vocabulary.draw(rng, spec.prefix_len)
    inputs = _lengths(rng, spec.input_len, spec.range_ratio, count)
    outputs = _lengths(rng, spec.output_len, spec.range_ratio, count)
    return [
        Prompt(vocabulary.write(prefix + vocabulary.draw(rng, n)), len(prefix) + n, m)
        for n, m in zip(inputs, outputs, strict=True)
    ]


def _lengths(rng: np.random.Generator, middle: int, ratio: float, count: int) -> list[int]:
    low, high = int(middle * (1 - ratio)), int(middle * (1 + ratio))
    return rng.integers(max(1, low), max(1, high) + 1, count).tolist()


def prefix_prompts(spec: PrefixSpec, count: int, vocabulary: Vocabulary, seed: int) -> list[Prompt]:
    """Returns `count` prompts; prompt i has prefix i % num_prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = [vocabulary.draw(rng, spec.prefix_len) for _ in range(spec.num_prefixes)]
    return [
        Prompt(
            vocabulary.write(prefixes[i % len(prefixes)] + vocabulary.draw(rng, spec.suffix_len)),
            spec.prefix_len + spec.suffix_len,
            spec.output_len,
        )
        for i in range(count)
    ]


def sharegpt_prompts(count: int, vocabulary: Vocabulary, seed: int, longest: int) -> list[Prompt]:
    """Returns random prompts with ShareGPT-like lengths: log-normal with the published means
    (arXiv:2309.06180, section 6.1), clipped to 4 … `longest` tokens."""
    rng = np.random.default_rng(seed)
    sigma = SHAREGPT_SIGMA
    inputs, outputs = (
        rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count).clip(4, longest)
        for mean in (SHAREGPT_INPUT, SHAREGPT_OUTPUT)
    )
    return [
        Prompt(vocabulary.write(vocabulary.draw(rng, n)), n, m)
        for n, m in zip(map(int, inputs), map(int, outputs), strict=True)
    ]


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """Returns the first `limit` requests of a Mooncake JSONL or Azure CSV trace.

    Raises:
        DatasetError: the file has another format, or its timestamps are not in order.
    """
    reader = _azure_rows if path.suffix == ".csv" else _mooncake_rows
    rows: list[TraceRow] = []
    try:
        for row in reader(path):
            rows.append(row)
            if len(rows) == limit:
                break
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{path}, request {len(rows) + 1}: {error!r}") from error
    if not rows:
        raise DatasetError(f"{path} holds no requests")
    if any(a.timestamp > b.timestamp for a, b in pairwise(rows)):
        raise DatasetError(f"{path}: timestamps are not in order; sort the trace by time")
    return rows


def _mooncake_rows(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield TraceRow(
                row["timestamp"] / 1000,
                int(row["input_length"]),
                int(row["output_length"]),
                tuple(row.get("hash_ids", ())),
            )


def _azure_rows(path: Path) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            # The traces have seven decimals of a second; datetime parses six.
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield TraceRow(stamp, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ())


def trace_prompts(
    rows: list[TraceRow], scale: float, vocabulary: Vocabulary, seed: int
) -> list[Prompt]:
    """Returns prompts with the trace's lengths times `scale`. Equal hash ids become equal tokens,
    so prompts share prefixes where the traced requests did."""
    blocks: dict[int, list[Any]] = {}
    block_len = max(1, round(TRACE_BLOCK * scale))
    rng = np.random.default_rng(seed)
    prompts = []
    for row in rows:
        for hash_id in row.hash_ids:
            if hash_id not in blocks:
                block_rng = np.random.default_rng([seed, hash_id])
                blocks[hash_id] = vocabulary.draw(block_rng, block_len)
        length = max(1, round(row.input_len * scale))
        parts = [part for hash_id in row.hash_ids for part in blocks[hash_id]][:length]
        parts += vocabulary.draw(rng, length - len(parts))
        output_len = max(1, round(row.output_len * scale))
        prompts.append(Prompt(vocabulary.write(parts), length, output_len))
    return prompts
