"""What a node says of its replicas together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from common.engine.collector import SchedulerCollector
from common.engine.replica import Replica
from common.obs.metrics import NodeMetrics
from common.rpc.pb import cluster_pb2 as pb

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
