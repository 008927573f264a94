"""Divides this host's GPUs and cores among the nodes of a local cluster."""

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
    """A node's engine options and environment, with its share of the host filled in."""

    engine: EngineConfig
    environment: dict[str, str] = field(default_factory=dict)


def node_shares(config: ClusterConfig) -> list[NodeShare]:
    """Returns each node's share of this host, in the order of `config.nodes`."""
    parallel = config.engine.parallel
    roles = {
        "prefill": _parallel(parallel, config.prefill_tp, config.prefill_pp),
        "decode": _parallel(parallel, config.decode_tp, config.decode_pp),
        "both": parallel,
    }
    nodes = [roles[role] for role, count in config.nodes.items() for _ in range(count)]
    return share_host(
        config.engine, nodes, gpus=visible_gpus(parallel.device), cores=usable_cores()
    )


def _parallel(common: ParallelConfig, tp: int | None, pp: int | None) -> ParallelConfig:
    """Returns `common` with the role's own sizes where it has any."""
    return replace(
        common,
        tensor_parallel_size=tp or common.tensor_parallel_size,
        pipeline_parallel_size=pp or common.pipeline_parallel_size,
    )


def share_host(
    engine: EngineConfig, nodes: Sequence[ParallelConfig], *, gpus: Sequence[str], cores: int
) -> list[NodeShare]:
    """Returns one share per node; a node has the ranks of all its replicas.

    Ranks get GPUs in order. When there are more ranks than GPUs, several ranks share a GPU and
    each node uses only its part of the memory. CPU threads are the cores divided by all ranks:
    if nodes used the same cores, each step would wait for a thread that another node displaced.
    """
    total = sum(node.world_size_across_dp for node in nodes)
    sharers = -(-total // len(gpus)) if gpus else 1
    threads = engine.parallel.cpu_threads or max(1, cores // total)
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
                replace(engine, parallel=replace(node, cpu_threads=threads), cache=cache),
                {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))} if own else {},
            )
        )
    return shares


def visible_gpus(device: str) -> list[str]:
    """Returns the GPUs nodes may use, in CUDA_VISIBLE_DEVICES's notation; none for "cpu"."""
    if device == "cpu":
        return []
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name]
    try:
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver, so no GPU
        return []
