"""The scheduler's state as Prometheus metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.engine.scheduler import Scheduler


class SchedulerCollector(Collector):
    """Names follow vLLM's, with the prefix `pdserve:`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler, pool = self._scheduler, self._scheduler.pool
        for name, help, value in (
            ("num_requests_running", "Sequences in the running batch", len(scheduler.running)),
            ("num_requests_waiting", "Sequences waiting for blocks", len(scheduler.waiting)),
            ("num_requests_remote", "Sequences waiting for their KV", len(scheduler.remote)),
            (
                "kv_cache_usage_perc",
                "KV blocks held; 1 is all",
                1 - pool.num_free / pool.num_blocks,
            ),
            ("kv_blocks_free", "KV blocks nobody holds", pool.num_free),
            ("kv_blocks_total", "KV blocks", pool.num_blocks),
        ):
            yield GaugeMetricFamily(f"pdserve:{name}", help, value)
        for name, help, count in (
            ("num_preemptions", "Sequences set back to waiting", scheduler.num_preemptions),
            ("prompt_tokens", "Prompt tokens computed", scheduler.prompt_tokens),
            ("generation_tokens", "Tokens sampled", scheduler.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up", scheduler.cache_queries),
            ("prefix_cache_hits", "Prompt tokens found", scheduler.cache_hits),
        ):
            yield CounterMetricFamily(f"pdserve:{name}", help, count)
