"""The buckets of the histograms, and two histograms that prometheus_client lacks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# vLLM's buckets.
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
CHOICES = (1, 2, 5, 10, 20)
TRANSFER_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BALANCEDNESS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class BulkHistogram(Collector):
    """A histogram that observes many values at once: a long answer has tens of thousands, and
    prometheus_client's histogram takes microseconds per value. Not thread-safe."""

    def __init__(self, name: str, help: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe_all(self, values: Sequence[float]) -> None:
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    def collect(self) -> Iterator[Metric]:
        metric = HistogramMetricFamily(self._name, self._help)
        metric.add_metric((), _cumulated(self._bounds, self._counts), self._sum)
        yield metric


def add_tally(
    metric: HistogramMetricFamily,
    labels: Sequence[str],
    tally: Mapping[int, int],
    buckets: Sequence[float],
) -> None:
    """Adds a histogram of `tally`, value → occurrences."""
    bounds = (*buckets, math.inf)
    counts = [0] * len(bounds)
    for value, occurrences in tally.items():
        counts[bisect_left(bounds, value)] += occurrences
    total = sum(value * occurrences for value, occurrences in tally.items())
    metric.add_metric(labels, _cumulated(bounds, counts), total)


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    return list(zip(map(floatToGoString, bounds), accumulate(counts), strict=True))


def one_two_five(highest: int) -> tuple[int, ...]:
    """Returns 1, 2, 5, 10, 20 … up to `highest`, vLLM's buckets of token counts."""
    steps = (digit * 10**power for power in range(len(str(highest))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= highest)
