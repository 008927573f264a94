"""Which share of this host each node of a local cluster gets. Pure, but for counting GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pynvml

from pdserve.common.config.node import EngineConfig, ParallelConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """A node's engine options with its share filled in, and its process environment."""

    engine: EngineConfig
    environment: dict[str, str] = field(default_factory=dict)


def place(
    engine: EngineConfig, nodes: Sequence[ParallelConfig], *, gpus: Sequence[str], cores: int
) -> list[Placement]:
    """One placement for each node, which has the ranks of all its replicas.

    GPUs are dealt in order. When ranks outnumber them they are dealt again and each node takes
    only its part of a GPU's memory. CPU threads are the cores divided by all ranks.
    """
    total = sum(node.world_size_across_dp for node in nodes)
    sharers = -(-total // len(gpus)) if gpus else 1
    threads = engine.parallel.cpu_threads or max(1, cores // total)
    cache = replace(
        engine.cache, gpu_memory_utilization=engine.cache.gpu_memory_utilization / sharers
    )
    placements, dealt = [], 0
    for node in nodes:
        size = node.world_size_across_dp
        hand = [gpus[(dealt + rank) % len(gpus)] for rank in range(size)] if gpus else []
        dealt += size
        placements.append(
            Placement(
                replace(engine, parallel=replace(node, cpu_threads=threads), cache=cache),
                {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(hand))} if hand else {},
            )
        )
    return placements


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
