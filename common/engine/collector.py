"""The schedulers' state as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.engine.scheduler import Scheduler

Read = Callable[[Scheduler], float]

GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("num_requests_running", "Sequences in the running batch", lambda s: len(s.running)),
    ("num_requests_waiting", "Sequences waiting for blocks", lambda s: len(s.waiting)),
    ("num_requests_remote", "Sequences waiting for their KV", lambda s: len(s.remote)),
    (
        "kv_cache_usage_perc",
        "KV blocks held; 1 is all",
        lambda s: 1 - s.pool.num_free / s.pool.num_blocks,
    ),
    ("kv_blocks_free", "KV blocks nobody holds", lambda s: s.pool.num_free),
    ("kv_blocks_total", "KV blocks", lambda s: s.pool.num_blocks),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("num_preemptions", "Sequences set back to waiting", lambda s: s.num_preemptions),
    ("sequences_failed", "Sequences ended by a row that had no result", lambda s: s.num_failed),
    ("prompt_tokens", "Prompt tokens computed", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens sampled", lambda s: s.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up", lambda s: s.cache_queries),
    ("prefix_cache_hits", "Prompt tokens found", lambda s: s.cache_hits),
)


class SchedulerCollector(Collector):
    """Names follow vLLM's, with the prefix `pdserve:`; so does the label `engine`, the number of
    the replica."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers

    def collect(self) -> Iterator[Metric]:
        for metrics, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, help, read in metrics:
                metric = family(f"pdserve:{name}", help, labels=("engine",))
                for engine, scheduler in enumerate(self._schedulers):
                    metric.add_metric((str(engine),), read(scheduler))
                yield metric
