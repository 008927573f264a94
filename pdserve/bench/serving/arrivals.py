"""When requests arrive: offsets in seconds from the start of the run, the first one at 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np


def gamma_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrivals at `rate` per second on average with gamma-distributed gaps.

    `burstiness` is the shape of the gamma distribution: 1 is a Poisson process, less is
    burstier, more is more even. An infinite rate puts every arrival at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[:1] = 0.0
    return [float(offset) for offset in np.cumsum(gaps)]


def trace_arrivals(timestamps: Sequence[float], speedup: float) -> list[float]:
    """Arrivals of a trace (seconds, ascending) replayed `speedup` times as fast.

    Published traces round their timestamps (Mooncake's to about 3 s), which would replay as
    bursts nobody sent. Requests with equal timestamps are spread evenly over the time to the
    next timestamp; the last group keeps its own.
    """
    groups = [(stamp, len(list(group))) for stamp, group in groupby(timestamps)]
    following = [stamp for stamp, _ in groups[1:]] + [groups[-1][0]]
    spread = [
        stamp + (after - stamp) * i / size
        for (stamp, size), after in zip(groups, following, strict=True)
        for i in range(size)
    ]
    return [(stamp - spread[0]) / speedup for stamp in spread]
