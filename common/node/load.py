"""How loaded a node's replicas are: which one takes a job, and what the node says of them.

    work = tokens to be computed before the job's first one
             those that sequences here still wait for, and what of the job is not cached
         + tokens whose KV every decode step here reads

Of those that can take the job at once, or of all if none can, the one with the least work, then
the fewest sequences, then the lowest index. So cached tokens draw a job to their replica until that
one has as many tokens more to do than another: prefixes stay together, load does not pile up. Cost
of prefill plus load of decode in one unit, as in NVIDIA Dynamo's KV router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.common.engine.block_pool import BlockHash
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.node.replica import Replica
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.common.rpc.pb import cluster_pb2 as pb


@dataclass(frozen=True, slots=True)
class Offer:
    """What a job would find on a replica."""

    replica: int
    pending_tokens: int  # of sequences here, not yet computed
    decoding_tokens: int  # of sequences here that decode or will once their KV has arrived
    missing_tokens: int  # of the job, not in the prefix cache
    num_sequences: int
    fits: bool  # it need not wait for blocks or for its turn

    @property
    def work(self) -> int:
        return self.pending_tokens + self.decoding_tokens + self.missing_tokens


def choose(offers: Iterable[Offer]) -> int:
    """The index of the replica that shall take the job; there is at least one offer."""
    best = min(offers, key=lambda o: (not o.fits, o.work, o.num_sequences, o.replica))
    return best.replica


def offer_of(
    replica: int, scheduler: Scheduler, num_tokens: int, hashes: Sequence[BlockHash]
) -> Offer:
    """What a job of `num_tokens` tokens, whose full blocks have `hashes`, finds here."""
    pool = scheduler.pool
    cached, unheld = pool.count_cached(hashes)
    sequences = [*scheduler.waiting, *scheduler.running, *scheduler.remote]
    # As the scheduler admits: a spare block for each running sequence; those in the queue first.
    promised = sum(pool.blocks_for(each.num_tokens) for each in scheduler.waiting)
    needed = pool.blocks_for(num_tokens) - cached + unheld + len(scheduler.running)
    decoding = [each.num_tokens for each in sequences if _decodes(each)]
    return Offer(
        replica=replica,
        pending_tokens=sum(each.num_pending for each in sequences if not _decodes(each)),
        decoding_tokens=sum(decoding),
        missing_tokens=num_tokens - cached * pool.block_size,
        num_sequences=len(sequences),
        fits=len(sequences) < scheduler.config.max_num_seqs and promised + needed <= pool.num_free,
    )


def _decodes(sequence: EngineSequence) -> bool:
    """Or will, without being computed here before."""
    return sequence.remote or (sequence.num_output_tokens > 0 and sequence.num_pending == 1)


# ---- all replicas together ----

Replicas = Sequence[Replica[Any, Any]]


def complaints(replicas: Replicas) -> str:
    """Why some could not produce a token; empty: all could."""
    return "; ".join(filter(None, (each.complaint for each in replicas)))


def num_blocks(replicas: Replicas) -> int:
    return sum(each.scheduler.pool.num_blocks for each in replicas)


def load(replicas: Replicas, healthy: bool, reason: str) -> pb.NodeLoad:
    """`healthy` and `reason` are the node's."""
    schedulers = [each.scheduler for each in replicas]
    free = [each.pool.num_free for each in schedulers]
    return pb.NodeLoad(
        running=sum(len(each.running) + len(each.remote) for each in schedulers),
        waiting=sum(len(each.waiting) for each in schedulers),
        free_blocks=sum(free),
        most_free_blocks=max(free),
        total_blocks=num_blocks(replicas),
        waiting_tokens=sum(each.num_pending for one in schedulers for each in one.waiting),
        healthy=healthy,
        reason=reason,
    )


def transfer_counts(replicas: Replicas) -> Counter[str]:
    """Events of the hand-offs of all."""
    counts: Counter[str] = Counter()
    for replica in replicas:
        counts.update(replica.transfers.counts)
    return counts


def expose(replicas: Replicas, metrics: NodeMetrics) -> None:
    """From now on the metrics show the replicas."""
    metrics.registry.register(SchedulerCollector([each.scheduler for each in replicas]))
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
