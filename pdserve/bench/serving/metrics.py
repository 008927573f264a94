"""Latencies and rates from the records of a run. Pure functions; seconds in, milliseconds out.

    arrival ──delay── sent ─────────── first chunk ── … ── last ── finished
       └──────────── TTFT ────────────────┘
       └──────────── E2EL ────────────────────────────────────────────┘

TTFT and E2EL start at the *scheduled arrival*, also when the client sent the request later because
of --max-concurrency or its own delay: the user waits all the same. Measured from the send, the
server's slowest moments would drop out of the statistics ("coordinated omission"). The `_sent`
variants start at the send. In a closed loop both are equal.

TPOT is (finished − first chunk) / (tokens − 1). ITL is the time between two chunks divided by the
tokens of the later one, counted once per token. GAP is that time undivided: the pause a reader
sees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pdserve.bench.serving.client import Chunk, Record

SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Timing:
    """One completed request. Latencies are in milliseconds."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    estimated: bool  # the server sent no usage: completion tokens are a count of chunks
    delay: float
    ttft: float
    ttft_sent: float
    e2el: float
    e2el_sent: float
    tpot: float | None  # None: fewer than two tokens
    itl: tuple[float, ...]
    gap: tuple[float, ...]

    def meets(self, slo: Mapping[str, float]) -> bool:
        """Returns whether the request is within every limit; a metric it lacks counts as met."""
        values = ((getattr(self, name), limit) for name, limit in slo.items())
        return all(value is None or value <= limit for value, limit in values)


def measure(record: Record) -> Timing:
    """Returns the timing of a completed request."""
    if record.finished is None:
        raise ValueError("the request did not complete")
    # Without any text there is no chunk: the first token counts as seen at the end.
    first = record.chunks[0].time if record.chunks else record.finished
    usage = record.usage
    tokens = usage.completion_tokens if usage else _said(record.chunks)
    details = usage.prompt_tokens_details if usage else None
    gaps = _gaps(record.chunks)
    return Timing(
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        estimated=usage is None,
        delay=_ms(record.arrival, record.sent),
        ttft=_ms(record.arrival, first),
        ttft_sent=_ms(record.sent, first),
        e2el=_ms(record.arrival, record.finished),
        e2el_sent=_ms(record.sent, record.finished),
        tpot=_ms(first, record.finished) / (tokens - 1) if tokens > 1 else None,
        itl=_inter_token(gaps, tokens_per_chunk(record.chunks, tokens)[1:]),
        gap=tuple(gaps),
    )


def _ms(start: float, end: float) -> float:
    return (end - start) * 1000


def _said(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.tokens or 1 for chunk in chunks)


def _gaps(chunks: Sequence[Chunk]) -> list[float]:
    return [_ms(a.time, b.time) for a, b in pairwise(chunks)]


def tokens_per_chunk(chunks: Sequence[Chunk], total: int) -> list[int]:
    """Returns the token count of each chunk: the server's, else one. The rest of `total` is spread
    evenly over the chunks without a count, earlier ones first. (Servers hold text back at UTF-8
    and stop-string borders and may then send several tokens at once.)"""
    unsaid = [i for i, chunk in enumerate(chunks) if chunk.tokens is None]
    counts = [chunk.tokens or 1 for chunk in chunks]
    each, rest = divmod(max(0, total - sum(counts)), len(unsaid)) if unsaid else (0, 0)
    for order, i in enumerate(unsaid):
        counts[i] += each + (order < rest)
    return counts


def _inter_token(gaps: Sequence[float], tokens: Sequence[int]) -> tuple[float, ...]:
    return tuple(gap / n for gap, n in zip(gaps, tokens, strict=True) for _ in range(n))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles (linear interpolation) of one latency, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float


def distribution(values: Iterable[float]) -> Distribution | None:
    """Returns the distribution of the values, None if there are none."""
    array = np.fromiter(values, dtype=float)
    if array.size == 0:
        return None
    median, p90, p99 = np.percentile(array, [50, 90, 99])
    return Distribution(float(array.mean()), float(median), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Rates are per second of `duration`, the time from the first arrival to
    the last answer."""

    duration: float
    completed: int
    failed: int
    errors: dict[str, int]  # kind -> count
    reasons: dict[str, str]  # kind -> message of the first such error
    total_input_tokens: int
    total_output_tokens: int
    total_cached_tokens: int
    estimated: int  # requests whose tokens were counted by chunks
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    slo: dict[str, float]  # metric -> limit in ms
    request_goodput: float | None  # completed within the limits, per second
    goodput_share: float | None  # of all requests, failed ones included
    latencies: dict[str, Distribution | None]


def summarize(records: Sequence[Record], slo: Mapping[str, float]) -> tuple[Summary, list[Timing]]:
    """Returns the summary of a run and the timings of its completed requests."""
    timings = [measure(record) for record in records if record.error is None]
    errors = Counter(record.error for record in records if record.error is not None)
    duration = _duration(records)
    good = sum(timing.meets(slo) for timing in timings)
    inputs = sum(timing.prompt_tokens for timing in timings)
    outputs = sum(timing.completion_tokens for timing in timings)
    summary = Summary(
        duration=duration,
        completed=len(timings),
        failed=len(records) - len(timings),
        errors=dict(errors.most_common()),
        reasons=_reasons(records),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        total_cached_tokens=sum(timing.cached_tokens for timing in timings),
        estimated=sum(timing.estimated for timing in timings),
        request_throughput=_rate(len(timings), duration),
        output_throughput=_rate(outputs, duration),
        total_token_throughput=_rate(inputs + outputs, duration),
        slo=dict(slo),
        request_goodput=_rate(good, duration) if slo else None,
        goodput_share=good / len(records) if slo else None,
        latencies=_latencies(timings),
    )
    return summary, timings


def _reasons(records: Sequence[Record]) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in records:
        if record.error is not None and record.reason:
            found.setdefault(record.error, record.reason)
    return found


def _duration(records: Sequence[Record]) -> float:
    ends = [record.finished for record in records if record.finished is not None]
    return max(ends) - min(record.arrival for record in records) if ends else 0.0


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _latencies(timings: Sequence[Timing]) -> dict[str, Distribution | None]:
    return {
        "ttft": distribution(t.ttft for t in timings),
        "ttft_sent": distribution(t.ttft_sent for t in timings),
        "tpot": distribution(t.tpot for t in timings if t.tpot is not None),
        "itl": distribution(value for t in timings for value in t.itl),
        "gap": distribution(value for t in timings for value in t.gap),
        "e2el": distribution(t.e2el for t in timings),
        "e2el_sent": distribution(t.e2el_sent for t in timings),
        "delay": distribution(t.delay for t in timings),
    }
