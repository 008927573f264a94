"""Chooses how a node's ranks run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from pdserve.common.config.node import ParallelConfig
from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed.executor import Executor, WorkerSpec
from pdserve.common.distributed.inprocess import InProcessExecutor
from pdserve.common.distributed.multiprocess import MultiprocessExecutor

logger = logging.getLogger(__name__)


def make_executor(
    specs: Sequence[WorkerSpec],
    parallel: ParallelConfig | None = None,
    device: str = "cpu",
) -> Executor:
    """An executor, not yet started, for `specs[r]` = rank r on a "cpu" or "cuda" `device`. Ranks
    of replicas have processes of their own, too: threads of one would share its interpreter lock.

    Raises:
        ConfigError: Ray is asked for and there is none.
    """
    parallel = parallel or ParallelConfig()
    ranks = max(len(specs), specs[0].local_world_size)  # of the node
    room = ranks if device == "cpu" else torch.cuda.device_count()
    backend = choose_backend(
        parallel.distributed_executor_backend,
        ranks,
        room,
        lambda: _ray_answers(parallel.ray_address),
    )
    match backend:
        case "ray":
            return _ray_executor(specs, parallel, device)
        case "mp":
            return MultiprocessExecutor(specs)
        case _:
            return InProcessExecutor(specs[0])


def choose_backend(requested: str, ranks: int, room: int, ray_answers: Callable[[], bool]) -> str:
    """`--distributed-executor-backend` resolved, to "ray", "mp" or "" (in this process). `room` is
    how many of the ranks this host has devices for."""
    if requested != "auto":
        return requested
    if ranks > room and ray_answers():
        return "ray"
    return "mp" if ranks > 1 else ""


def _ray_answers(address: str | None) -> bool:
    try:
        _connect_to_ray(address)
    except ConfigError as error:
        logger.info("the ranks do not fit this host, and it is on its own: %s", error)
        return False
    return True


def _ray_executor(specs: Sequence[WorkerSpec], parallel: ParallelConfig, device: str) -> Executor:
    _connect_to_ray(parallel.ray_address)
    from pdserve.common.distributed.ray_executor import RayExecutor

    return RayExecutor(specs, parallel.tensor_parallel_size, device)


def _connect_to_ray(address: str | None) -> None:
    """Ray takes a second to import: nobody else shall wait for it."""
    try:
        from pdserve.common.distributed.ray_cluster import connect
    except ModuleNotFoundError as error:
        raise ConfigError(f"Ray is not there ({error}): pip install 'pdserve[ray]'") from error
    connect(address)
