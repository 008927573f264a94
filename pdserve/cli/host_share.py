"""Divides this host's GPUs and cores among the nodes of a local cluster, which may lend each other
cores."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pynvml

from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.engine import EngineConfig, ParallelConfig
from pdserve.common.core.core_table import ENTRY_NBYTES
from pdserve.common.core.host import usable_cores

NO_SHARING = "off"  # --share-cores


@dataclass(frozen=True, slots=True)
class NodeShare:
    """A node's engine options and environment, with its share of the host filled in."""

    engine: EngineConfig
    environment: dict[str, str] = field(default_factory=dict)
    lends_cores: bool = False  # it has cores of its own, and --share-cores is not given

    @property
    def num_threads(self) -> int:
        """The number of threads of all its ranks."""
        parallel = self.engine.parallel
        return parallel.cpu_threads * parallel.world_size_across_dp


def node_shares(config: ClusterConfig) -> list[NodeShare]:
    """Returns each node's share of this host, in the order of `config.nodes`."""
    sizes, device = role_sizes(config), config.engine.parallel.device
    nodes = [sizes[role] for role, count in config.nodes.items() for _ in range(count)]
    return share_host(config.engine, nodes, gpus=visible_gpus(device), cores=usable_cores())


def role_sizes(config: ClusterConfig) -> dict[str, ParallelConfig]:
    """Returns how each role's nodes are split into ranks."""
    parallel = config.engine.parallel
    return {
        "prefill": _parallel(parallel, config.prefill_tp, config.prefill_pp),
        "decode": _parallel(parallel, config.decode_tp, config.decode_pp),
        "both": parallel,
    }


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
    file = engine.parallel.share_cores
    lends = file is None and not gpus and len(nodes) > 1 and total * threads <= cores
    file = None if file == NO_SHARING else file
    neighbours = max(0 if gpus else len(nodes), engine.parallel.host_nodes)
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
                replace(
                    engine,
                    parallel=replace(
                        node, cpu_threads=threads, share_cores=file, host_nodes=neighbours
                    ),
                    cache=cache,
                ),
                {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))} if own else {},
                lends,
            )
        )
    return shares


class CoreTable:
    """Holds the memory file of --share-cores for a cluster's nodes, which open it by its path; it
    vanishes with this process."""

    def __init__(self, num_cores: int) -> None:
        self._fd = os.memfd_create("pdserve-cores", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_cores * ENTRY_NBYTES)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        os.close(self._fd)


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
