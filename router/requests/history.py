"""The last two minutes of a router, second by second, and the last events of its nodes: for a page
that is opened late. Nothing is done per request: once a second the metrics are read."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Iterator
from time import time
from typing import Any

from prometheus_client.registry import Collector

from pdserve.common.obs.metrics import RouterMetrics
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.node_events import NodeEvents
from pdserve.router.requests.admission import Admission

logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds of a sample
# Samples, of about a kilobyte: two minutes, and the ten seconds that the first point sums up.
KEPT = 130
MAX_LABELS = 16  # codes of a sample; the rest is summed under OTHER
OTHER = "other"

Sample = dict[str, Any]


class History:
    """Samples are differences, except `running` and `waiting`, so those of several routers can be
    added up. `at` is the second (since 1970) at whose end one was taken."""

    def __init__(self, metrics: RouterMetrics, view: ClusterView, admission: Admission) -> None:
        self._metrics = metrics
        self._view = view
        self._admission = admission
        self._events = NodeEvents(view)
        self._counts = _Counts()
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._histograms: dict[str, Collector] = {
            "ttft": metrics.ttft,
            "itl": metrics.itl,
            "hand_off": metrics.hand_off_time,
        }
        self._bounds = {name: _bounds(each) for name, each in self._histograms.items()}

    async def run(self) -> None:
        """Takes a sample at the end of each second; never returns."""
        self._events.note(time(), "quiet", f"router process {os.getpid()} has started", own=True)
        while True:
            await asyncio.sleep(PERIOD - time() % PERIOD)
            try:
                self.sample(time())
            except Exception:  # only the page needs it
                logger.exception("a sample of the history is missing")

    def sample(self, now: float) -> None:
        """Takes a sample. `now`: seconds since 1970; a clock that is set back does not repeat a
        second."""
        at = round(now)
        if self._samples:
            at = max(at, self._samples[-1]["at"] + 1)
        self._samples.append({"at": at, **self._values()})
        self._events.look(now)
        for (role, code), count in self._counts.changed("moved"):
            many = f"{count} requests move" if count > 1 else "a request moves"
            text = f"{many} to other nodes: {code} of a {role} node"
            self._events.note(now, "warn", text, own=True)
        self._counts.turn()

    def since(self, at: float) -> dict[str, Any]:
        """Returns the samples and events after this second, as JSON, the upper bounds of the
        histograms' buckets (the last one has none), and how many requests have ended in all."""
        served = sum(value for _, value in _labelled(self._metrics.requests))
        return {
            "served": int(served),
            "bounds": self._bounds,
            "samples": [each for each in self._samples if each["at"] > at],
            "events": self._events.since(at),
        }

    def _values(self) -> Sample:
        counts, metrics = self._counts, self._metrics
        for labels, value in _labelled(metrics.migrations):
            counts.add("moved", labels, value)
        prompts, cached, generated = self._nodes()
        return {
            "running": self._admission.running,
            "waiting": self._admission.waiting,
            "tokens": counts.of("tokens", metrics.generation_tokens).get("", 0),
            "prompt_tokens": prompts,
            "cached_tokens": cached,
            "nodes_tokens": generated,  # through all routers
            "codes": _bounded(counts.of("codes", metrics.requests)),
            "slo": counts.of("slo", metrics.slo_requests, 2),  # ttft/met …
            **{name: self._buckets(name, each) for name, each in self._histograms.items()},
        }

    def _nodes(self) -> tuple[int, int, int]:
        """Returns the prompt tokens that nodes have prefilled for this router, how many of them
        were cached, and the tokens that they have generated for all routers."""
        total = [0, 0, 0]
        for node in self._view.registry.nodes():
            now = (node.prompt_tokens, node.cached_tokens, node.load.generation_tokens)
            for index, value in enumerate(now):
                first = value if index == 2 else 0  # a node may be older than this router
                total[index] += int(self._counts.add("node", (node.id, str(index)), value, first))
        return total[0], total[1], total[2]

    def _buckets(self, name: str, histogram: Collector) -> dict[str, int]:
        """Returns how many values each bucket got, by its index; empty ones are left out."""
        found, below = {}, 0
        for index, value in enumerate(_cumulated(histogram)):
            count = int(self._counts.add(name, (str(index),), value))
            if count > below:
                found[str(index)] = count - below
            below = count
        return found


Labels = tuple[str, ...]


class _Counts:
    """Differences of counters between two turns. It forgets counters that were not added."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, Labels], float] = {}
        self._now: dict[tuple[str, Labels], float] = {}

    def add(self, name: str, labels: Labels, value: float, first: float = 0.0) -> float:
        """Returns the difference to the last turn, at least 0. `first`: the value before the first
        turn."""
        self._now[name, labels] = value
        return max(0.0, value - self._before.get((name, labels), first))

    def of(self, name: str, counter: Collector, depth: int = 1) -> dict[str, int]:
        """Returns the differences that are not 0, by the first `depth` labels."""
        found: Counter[str] = Counter()
        for labels, value in _labelled(counter):
            found["/".join(labels[:depth])] += int(self.add(name, labels, value))
        return dict(+found)

    def changed(self, name: str) -> Iterator[tuple[Labels, int]]:
        for (found, labels), value in self._now.items():
            count = int(value - self._before.get((found, labels), 0.0))
            if found == name and count > 0:
                yield labels, count

    def turn(self) -> None:
        self._before, self._now = self._now, {}


def _labelled(counter: Collector) -> Iterator[tuple[Labels, float]]:
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                yield tuple(sample.labels.values()), sample.value


def _cumulated(histogram: Collector) -> Iterator[float]:
    for metric in histogram.collect():
        yield from (each.value for each in metric.samples if each.name.endswith("_bucket"))


def _bounds(histogram: Collector) -> list[float]:
    """Returns the buckets' upper bounds, without that of the last one, which is infinite."""
    samples = [each for metric in histogram.collect() for each in metric.samples]
    bounds = [float(each.labels["le"]) for each in samples if each.name.endswith("_bucket")]
    return bounds[:-1]


def _bounded(counts: dict[str, int]) -> dict[str, int]:
    """Returns the MAX_LABELS most frequent counts, and the sum of the others."""
    if len(counts) <= MAX_LABELS:
        return counts
    ordered = sorted(counts.items(), key=lambda each: -each[1])
    return dict(ordered[:MAX_LABELS]) | {OTHER: sum(count for _, count in ordered[MAX_LABELS:])}
