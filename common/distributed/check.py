"""The ranks of `pdserve cluster-check`: they meet as the engine's do, check, measure and report.

`CheckWorker` is a worker like the engine's, so that executors start it. Each step checks every
group and then measures it; rank 0 answers with what all ranks found.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from pdserve.common.distributed.environment import host_identity, init_distributed_environment
from pdserve.common.distributed.executor import Emit, Extension, WorkerSpec
from pdserve.common.distributed.group import GroupCoordinator
from pdserve.common.distributed.measure import OPERATIONS, Check, Figure, measure, verify
from pdserve.common.distributed.parallel_state import (
    Layout,
    ParallelState,
    initialize_model_parallel,
)
from pdserve.common.distributed.surroundings import Surroundings, advice, look_around


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """What to check."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    device: str = "cpu"  # or "cuda": rank r of a host takes its GPU r
    local_rank: int | None = None  # which GPU; default: the rank
    communicator: str = "auto"
    timeout: float = 30.0  # seconds, of every collective
    sizes: tuple[int, ...] = ()  # bytes
    seconds: float = 0.2  # for each operation and size


@dataclass(frozen=True, slots=True)
class Report:
    """Everything; `layout` and `transports` by name of group."""

    layout: Layout
    transports: dict[str, str]
    checks: list[Check]
    figures: list[Figure]
    ranks: list[Surroundings]
    advice: list[str]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.error]


class CheckWorker:
    """One rank (see `pdserve.common.distributed.executor.Worker`)."""

    def __init__(self, spec: WorkerSpec, emit: Emit) -> None:
        """Raises ConfigError if the sizes do not fit the world, NodeError if the ranks do not
        meet."""
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
        self._state = initialize_model_parallel(
            environment, config.tensor_parallel_size, config.pipeline_parallel_size
        )
        self._around = look_around(
            spec.rank, host_identity(), environment.address, environment.device
        )

    @property
    def extension(self) -> Extension | None:
        return None

    def ready(self) -> bytes:
        return b""

    def step(self, message: bytes) -> bytes:
        """A msgpack `Report`."""
        groups = _groups(self._state)
        checks = [check for group in groups for check in verify(group)]
        world = self._state.world
        everyone = [
            msgspec.msgpack.decode(body, type=tuple[list[Check], Surroundings])
            for body in world.all_gather_bytes(msgspec.msgpack.encode((checks, self._around)))
        ]
        checks = [check for theirs, _ in everyone for check in theirs]
        ranks = [around for _, around in everyone]
        right = not any(check.error for check in checks)
        report = Report(
            layout=self._state.layout,
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
        self._state.close()


def _groups(state: ParallelState) -> list[GroupCoordinator]:
    """Those with something to say: of several ranks, and not the same ranks again."""
    groups = {group.ranks: group for group in (state.world, state.pp, state.tp) if group.size > 1}
    return list(groups.values())


def _device(config: CheckConfig, rank: int) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank if config.local_rank is None else config.local_rank)
    torch.cuda.set_device(device)
    return device
