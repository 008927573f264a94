"""How this host's GPUs are connected (NVLink or PCIe), and what that means for parallelism.

Tensor parallelism all-reduces twice per layer and needs the fastest links; pipeline parallelism
sends one activation from stage to stage and tolerates slow ones (arXiv:2104.04473, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pynvml

NVLINK = "NVLink"


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    memory: int  # bytes in total


@dataclass(frozen=True, slots=True)
class GpuLink:
    """The best path between two GPUs of the host."""

    gpus: tuple[int, int]
    kind: str  # NVLINK, or what the PCIe path crosses


@dataclass(frozen=True, slots=True)
class Topology:
    gpus: tuple[Gpu, ...]
    links: tuple[GpuLink, ...]  # one per pair of GPUs
    nvlink_groups: tuple[tuple[int, ...], ...]  # NVLink connects every pair of a group
    advice: str


def read_topology(nvml: Any = pynvml) -> Topology:
    """Asks the driver through `nvml` (pynvml's functions); empty without a driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return topology_of((), ())
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        gpus = [_gpu(nvml, index, handle) for index, handle in enumerate(handles)]
        links = [
            GpuLink((a, b), _kind(nvml, handles[a], handles[b]))
            for a, b in combinations(range(len(handles)), 2)
        ]
        return topology_of(gpus, links)
    finally:
        nvml.nvmlShutdown()


def topology_of(gpus: Sequence[Gpu], links: Sequence[GpuLink]) -> Topology:
    groups = _nvlink_groups(gpus, links)
    return Topology(tuple(gpus), tuple(links), groups, _advice(groups))


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    name = nvml.nvmlDeviceGetName(handle)
    return Gpu(index, name, nvml.nvmlDeviceGetMemoryInfo(handle).total)


def _kind(nvml: Any, one: Any, other: Any) -> str:
    """Returns NVLINK for a direct or NVSwitch link, else what the PCIe path crosses."""
    try:
        status = nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError_NotSupported:  # consumer GPUs
        status = None
    if status == nvml.NVML_P2P_STATUS_OK:
        return NVLINK
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    if level <= nvml.NVML_TOPOLOGY_MULTIPLE:
        return "PCIe switch"
    return "PCIe host bridge" if level <= nvml.NVML_TOPOLOGY_NODE else "between CPU sockets"


def _nvlink_groups(gpus: Sequence[Gpu], links: Sequence[GpuLink]) -> tuple[tuple[int, ...], ...]:
    """Puts each GPU into the first group to all of whose members it has NVLink."""
    linked = {frozenset(link.gpus) for link in links if link.kind == NVLINK}
    groups: list[list[int]] = []
    for gpu in gpus:
        for group in groups:
            if all(frozenset((gpu.index, member)) in linked for member in group):
                group.append(gpu.index)
                break
        else:
            groups.append([gpu.index])
    return tuple(tuple(group) for group in groups)


def _advice(groups: Sequence[Sequence[int]]) -> str:
    if not groups:
        return "the driver shows no GPU on this host"
    if sum(map(len, groups)) == 1:
        return (
            "one GPU: --tp 1; PP across hosts, or a prefill node here and a decode node elsewhere"
        )
    largest = max(map(len, groups))
    if largest == 1:
        return "no NVLink: TP does two all-reduces per layer over PCIe; prefer PP across these GPUs"
    return f"TP within a group of NVLink-connected GPUs (--tp up to {largest}), PP across groups"
