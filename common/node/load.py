"""The load of a node's replicas together, for its routers and as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pdserve.common.engine.rates import mean_rates
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.node.balance import decodes
from pdserve.common.node.replica import Replica
from pdserve.common.node.utilisation import LentCoresCollector, UtilisationCollector
from pdserve.common.obs.histograms import STEP_TOKENS, add_tally
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.common.rpc.pb import cluster_pb2 as pb

Replicas = Sequence[Replica[Any, Any]]


def unhealthy_reasons(replicas: Replicas) -> str:
    """Joins the reasons why some replicas could not produce a token; empty if all could."""
    return "; ".join(filter(None, (each.unhealthy_reason for each in replicas)))


def num_blocks(replicas: Replicas) -> int:
    return sum(each.scheduler.pool.num_blocks for each in replicas)


def node_load(replicas: Replicas, healthy: bool, reason: str, router: str) -> pb.NodeLoad:
    """Makes the load report, for the router of this id, of a node that is `healthy`, or not for
    this `reason`."""
    schedulers = [each.scheduler for each in replicas]
    sequences = (seq for s in schedulers for seq in (*s.waiting, *s.running, *s.remote))
    others = [each for each in sequences if each.router != router]
    free = [each.pool.num_blocks - each.pool.num_held for each in schedulers]
    return pb.NodeLoad(
        running=sum(len(each.running) + len(each.remote) for each in schedulers),
        waiting=sum(len(each.waiting) for each in schedulers),
        free_blocks=sum(free),
        most_free_blocks=max(free),
        total_blocks=num_blocks(replicas),
        generation_tokens=sum(each.generation_tokens for each in schedulers),
        waiting_tokens=sum(each.num_pending for one in schedulers for each in one.waiting),
        healthy=healthy,
        reason=reason,
        others=len(others),
        others_tokens=sum(each.num_pending for each in others if not decodes(each)),
        rates=pb.Rates(**mean_rates([each.engine.rates.now for each in replicas])._asdict()),
    )


def transfer_counts(replicas: Replicas) -> Counter[str]:
    """Sums the events of all replicas' KV transfers."""
    counts: Counter[str] = Counter()
    for replica in replicas:
        counts.update(replica.transfers.counts)
    return counts


def export(replicas: Replicas, share_cores: str | None, metrics: NodeMetrics) -> None:
    """Adds the replicas to the metrics, and how long their cores in the table `share_cores` were
    lent."""
    metrics.registry.register(SchedulerCollector([each.scheduler for each in replicas]))
    metrics.registry.register(UtilisationCollector([each.utilisation for each in replicas]))
    cores = [core for each in replicas for rank in each.ranks.ready for core in rank.cores]
    if share_cores and cores:
        metrics.registry.register(LentCoresCollector(share_cores, cores))
    metrics.transfer_events.follow(lambda: transfer_counts(replicas))
    for each in replicas:
        metrics.engine_healthy.labels(str(each.index)).set_function(each.is_healthy)


# ---- the schedulers' state, read when it is scraped ----

Read = Callable[[Scheduler], float]

GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("num_requests_running", "Sequences in the running batch", lambda s: len(s.running)),
    ("num_requests_waiting", "Sequences waiting for blocks", lambda s: len(s.waiting)),
    ("num_requests_remote", "Sequences waiting for their KV", lambda s: len(s.remote)),
    (
        "kv_cache_usage_perc",
        "Share of KV blocks that sequences hold, in the fullest KV group (0 to 1)",
        lambda s: s.pool.num_held / s.pool.num_blocks,
    ),
    (
        "kv_blocks_free",
        "KV blocks that no sequence holds; if another KV group is fuller, the same share",
        lambda s: s.pool.num_blocks - s.pool.num_held,
    ),
    ("kv_blocks", "KV blocks of the first KV group", lambda s: s.pool.num_blocks),
)
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("num_preemptions", "Sequences set back to waiting", lambda s: s.num_preemptions),
    ("sequences_failed", "Sequences that a step had no result for", lambda s: s.num_failed),
    ("prompt_tokens", "Prompt tokens computed", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens sampled", lambda s: s.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up", lambda s: s.cache_queries),
    ("prefix_cache_hits", "Prompt tokens found", lambda s: s.cache_hits),
    (
        "spec_decode_num_drafts",
        "Drafts of a sequence's next tokens",
        lambda s: s.speculator.num_drafts if s.speculator else 0,
    ),
    (
        "spec_decode_num_draft_tokens",
        "Tokens drafted",
        lambda s: s.speculator.num_draft_tokens if s.speculator else 0,
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Drafted tokens that were accepted",
        lambda s: s.speculator.num_accepted_tokens if s.speculator else 0,
    ),
)
ACCEPTED_PER_POS = (
    "spec_decode_num_accepted_tokens_per_pos",
    "Drafted tokens that were accepted, by their position in the draft",
)

STEPS = ("iteration_tokens", "Tokens of a step, prompt tokens and drafts included")


class SchedulerCollector(Collector):
    """Reads the schedulers when it is scraped. The label `engine`, as in vLLM, is the replica."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers

    def collect(self) -> Iterator[Metric]:
        for metrics, family in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, help, read in metrics:
                metric = family(f"pdserve_{name}", help, labels=("engine",))
                for engine, scheduler in enumerate(self._schedulers):
                    metric.add_metric((str(engine),), read(scheduler))
                yield metric
        yield self._accepted()
        yield self._step_tokens()
        yield self._config()

    def _accepted(self) -> Metric:
        name, help = ACCEPTED_PER_POS
        accepted = CounterMetricFamily(f"pdserve_{name}", help, labels=("engine", "position"))
        for engine, scheduler in enumerate(self._schedulers):
            counts = scheduler.speculator.num_accepted_per_pos if scheduler.speculator else ()
            for position, count in enumerate(counts):
                accepted.add_metric((str(engine), str(position)), count)
        return accepted

    def _step_tokens(self) -> Metric:
        name, help = STEPS
        steps = HistogramMetricFamily(f"pdserve_{name}", help, labels=("engine",))
        for engine, scheduler in enumerate(self._schedulers):
            add_tally(steps, (str(engine),), scheduler.step_sizes, STEP_TOKENS)
        return steps

    def _config(self) -> Metric:
        labels = ("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching")
        config = GaugeMetricFamily(
            "pdserve_cache_config_info", "The KV cache's settings, as labels", labels=labels
        )
        for engine, pool in enumerate(each.pool for each in self._schedulers):
            values = (engine, pool.block_size, pool.num_blocks, pool.prefix_caching)
            config.add_metric(list(map(str, values)), 1)
        return config
