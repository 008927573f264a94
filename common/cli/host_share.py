"""Which share of this host each node of a local cluster gets. Pure, but for counting GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pynvml

from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.node import EngineConfig, ParallelConfig
from pdserve.common.core.host import usable_cores


@dataclass(frozen=True, slots=True)
class NodeShare:
    """A node's engine options with its share filled in, and its process environment."""

    engine: EngineConfig
    environment: dict[str, str] = field(default_factory=dict)


def node_shares(config: ClusterConfig) -> list[NodeShare]:
    """Each node's share of this host, in the order of `config.nodes`."""
    parallel, cores = config.engine.parallel, usable_cores()
    roles = {
        "prefill": _parallel(parallel, config.prefill_tp, config.prefill_pp),
        "decode": _parallel(parallel, config.decode_tp, config.decode_pp),
        "both": parallel,
    }
    nodes = [
        each
        for role, count in config.nodes.items()
        for each in lend_cores(roles[role], count, cores)
    ]
    return share_host(config.engine, nodes, gpus=visible_gpus(parallel.device))


def lend_cores(node: ParallelConfig, count: int, cores: int) -> list[ParallelConfig]:
    """`count` nodes of a role, whose ranks share all cores; and so do those of another role: what
    one does not need just now the other one has, and where they contend, the kernel is fair."""
    ranks = count * node.world_size_across_dp
    threads = node.cpu_threads or max(1, cores // max(1, ranks))
    return [replace(node, cpu_threads=threads)] * count


def _parallel(common: ParallelConfig, tp: int | None, pp: int | None) -> ParallelConfig:
    """What a role says, or else what both do."""
    return replace(
        common,
        tensor_parallel_size=tp or common.tensor_parallel_size,
        pipeline_parallel_size=pp or common.pipeline_parallel_size,
    )


def share_host(
    engine: EngineConfig, nodes: Sequence[ParallelConfig], *, gpus: Sequence[str]
) -> list[NodeShare]:
    """One share for each node, which has the ranks of all its replicas.

    GPUs are given out in order. When ranks outnumber them they are given out again and each node
    takes only its part of a GPU's memory.
    """
    total = sum(node.world_size_across_dp for node in nodes)
    sharers = -(-total // len(gpus)) if gpus else 1
    cache = replace(
        engine.cache, gpu_memory_utilization=engine.cache.gpu_memory_utilization / sharers
    )
    shares, given = [], 0
    for node in nodes:
        size = node.world_size_across_dp
        own = [gpus[(given + rank) % len(gpus)] for rank in range(size)] if gpus else []
        given += size
        shares.append(
            NodeShare(
                replace(engine, parallel=node, cache=cache),
                {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))} if own else {},
            )
        )
    return shares


def visible_gpus(device: str) -> list[str]:
    """Names, as CUDA_VISIBLE_DEVICES has them, of the GPUs nodes may use; none for "cpu"."""
    if device == "cpu":
        return []
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name]
    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver, so no GPU
        return []
