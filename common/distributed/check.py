"""The ranks of `pdserve cluster-check`: they connect like the engine's, check, measure and report.

`CheckWorker` has the interface of the engine's worker, so that executors can start it. Each step
checks and measures every group; rank 0 answers with the results of all ranks.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from pdserve.common.core.host import host_identity, is_loopback, usable_cores
from pdserve.common.distributed.environment import (
    DistributedEnvironment,
    init_distributed_environment,
)
from pdserve.common.distributed.executor import Emit, Extension, WorkerSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.measure import OPERATIONS, Check, Figure, measure, verify
from pdserve.common.distributed.parallel_state import (
    Layout,
    ParallelState,
    initialize_model_parallel,
)

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """The options of a check."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    device: str = "cpu"  # or "cuda": rank r of a host takes its GPU r
    local_rank: int | None = None  # GPU index; default: the rank
    communicator: str = "auto"
    timeout: float = 30.0  # seconds, per collective
    sizes: tuple[int, ...] = ()  # bytes
    seconds: float = 0.2  # per operation and size


@dataclass(frozen=True, slots=True)
class RankHost:
    """The facts of a rank's host and environment that matter for collectives."""

    rank: int
    host: str  # host name
    host_identity: str  # see `core.host.host_identity`
    address: str  # at which other hosts reach it
    device: str
    cores: int  # usable by this rank
    name_addresses: list[str]  # addresses of the host name
    interfaces: list[str]
    infiniband: list[str]  # adapters
    variables: dict[str, str]


_checks = msgspec.msgpack.Decoder(tuple[list[Check], RankHost])


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all ranks. `layout` and `transports` have group names as keys."""

    layout: Layout
    transports: dict[str, str]
    checks: list[Check]
    figures: list[Figure]
    ranks: list[RankHost]
    advice: list[str]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.error]


class CheckWorker:
    """One rank (a `pdserve.common.distributed.executor.Worker`)."""

    def __init__(self, spec: WorkerSpec, emit: Emit) -> None:
        """Raises ConfigError if the sizes do not fit the world, NodeError if the ranks do not
        connect."""
        torch.set_num_threads(1)
        self.config = config = msgspec.convert(spec.config, CheckConfig)
        environment = init_distributed_environment(
            spec.rank,
            spec.world_size,
            spec.init_method,
            _device(config, spec.rank),
            config.timeout,
            config.communicator,
        )
        self.state = initialize_model_parallel(
            environment, config.tensor_parallel_size, config.pipeline_parallel_size
        )
        self.state.serve()
        self._host = describe_host(environment)

    @property
    def extension(self) -> Extension | None:
        return None

    def ready(self) -> bytes:
        return b""

    def step(self, message: bytes) -> bytes:
        """Returns a msgpack `CheckReport`."""
        groups = _groups(self.state)
        checks = [check for group in groups for check in verify(group)]
        world = self.state.world
        everyone = [
            _checks.decode(body)
            for body in world.all_gather_bytes(msgspec.msgpack.encode((checks, self._host)))
        ]
        checks = [check for theirs, _ in everyone for check in theirs]
        ranks = [rank for _, rank in everyone]
        right = not any(check.error for check in checks)
        report = CheckReport(
            layout=self.state.layout,
            transports={group.name: group.transport for group in groups},
            checks=checks,
            figures=self._measure(groups) if right else [],
            ranks=ranks,
            advice=advice(ranks),
        )
        return msgspec.msgpack.encode(report)

    def _measure(self, groups: list[GroupCoordinator]) -> list[Figure]:
        config = self.config
        return [
            measure(group, operation, nbytes, config.seconds)
            for group in groups
            for operation in OPERATIONS
            for nbytes in config.sizes
        ]

    def close(self) -> None:
        self.state.close()


def _groups(state: ParallelState) -> list[GroupCoordinator]:
    """Returns the groups of several ranks; of groups with equal ranks only one."""
    groups = {group.ranks: group for group in (state.world, state.pp, state.tp) if group.size > 1}
    return list(groups.values())


def _device(config: CheckConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank if config.local_rank is None else config.local_rank)
    torch.cuda.set_device(device)
    return device


# ---- the ranks' hosts, and advice ----


def describe_host(environment: DistributedEnvironment) -> RankHost:
    name, device = socket.gethostname(), environment.device
    kind = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    adapters = sorted(path.name for path in _INFINIBAND.glob("*"))
    return RankHost(
        rank=environment.rank,
        host=name,
        host_identity=host_identity(),
        address=environment.address,
        device=f"{device}{kind}",
        cores=usable_cores(),
        name_addresses=_resolve(name),
        interfaces=[interface for _, interface in socket.if_nameindex()],
        infiniband=adapters,
        variables={
            variable: value
            for variable, value in sorted(os.environ.items())
            if variable.startswith(_PREFIXES) or variable in _NAMES
        },
    )


def _resolve(name: str) -> list[str]:
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def advice(ranks: list[RankHost]) -> list[str]:
    """Returns what to fix, the most serious first; empty if nothing."""
    several = len({each.host_identity for each in ranks}) > 1
    found = [line for each in ranks for line in _of_one(each, several)]
    return list(dict.fromkeys(found + _of_hosts(ranks, several)))


def _of_one(rank: RankHost, several: bool) -> list[str]:
    """`several`: the ranks are on several hosts."""
    lines = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = rank.variables.get(variable, "")
        if wanted and not _names_an_interface(wanted, rank.interfaces):
            names = ", ".join(rank.interfaces)
            lines.append(f"{rank.host}: {variable}={wanted} names no interface; it has: {names}")
    if several and all(map(is_loopback, rank.name_addresses)):
        lines.append(
            f"{rank.host}: the host's name resolves to loopback only, which other hosts cannot "
            f"reach: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of "
            f"{rank.address}"
        )
    if several and rank.device.startswith("cuda") and not rank.infiniband:
        lines.append(
            f"{rank.host}: no InfiniBand adapter: NCCL uses TCP between hosts, which is slow for "
            "tensor parallelism; keep --tensor-parallel-size within a host"
        )
    if rank.variables.get("NCCL_IB_DISABLE") == "1" and rank.infiniband:
        lines.append(f"{rank.host}: NCCL_IB_DISABLE=1 disables {rank.infiniband[0]}: unset it")
    return lines


def _of_hosts(ranks: list[RankHost], several: bool) -> list[str]:
    lines = []
    for identity in dict.fromkeys(each.host_identity for each in ranks):
        here = [each for each in ranks if each.host_identity == identity]
        count, first = len(here), here[0]
        if not first.device.startswith("cpu"):
            continue
        if count > first.cores:
            lines.append(
                f"{first.host}: {count} ranks share {first.cores} cores and wait for each other: "
                "start fewer ranks"
            )
        threads = first.variables.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) * count > first.cores:
            lines.append(
                f"{first.host}: OMP_NUM_THREADS={threads} for each of {count} ranks on "
                f"{first.cores} cores: set it to {max(first.cores // count, 1)}"
            )
    return lines


def _names_an_interface(wanted: str, interfaces: list[str]) -> bool:
    """Evaluates NCCL's syntax: comma-separated prefixes; "=" means whole names, "^" excludes."""
    if wanted.startswith("^"):
        return True
    names = tuple(wanted.removeprefix("=").split(","))
    if wanted.startswith("="):
        return not set(names).isdisjoint(interfaces)
    return any(each.startswith(names) for each in interfaces)
