"""A toy worker that runs in a Ray actor; the actors import this file."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import msgspec

from pdserve.common.distributed.environment import init_distributed_environment
from pdserve.common.distributed.executor import Emit, Executor, WorkerSpec
from toy_worker import ToyWorker, specs


class RayToy(ToyWorker):
    """Connects to the other ranks, and reports its place."""

    def __init__(self, spec: WorkerSpec, emit: Emit) -> None:
        super().__init__(spec, emit)
        if os.environ.get("NCCL_DEBUG") != "WARN":
            raise ValueError("the node's environment is not here")
        world = spec.rank, spec.world_size, spec.init_method
        self.environment = init_distributed_environment(*world)

    def ready(self) -> bytes:
        import ray  # only here, since collecting tests imports this file too

        node = ray.get_runtime_context().get_node_id()
        return msgspec.msgpack.encode((os.getpid(), node, len(self.environment.hosts)))


def toys(size: int, **options: Any) -> list[WorkerSpec]:
    return [replace(spec, factory="ray_toy:RayToy") for spec in specs(size, **options)]


async def places(executor: Executor) -> list[tuple[int, str, int]]:
    """Starts the executor; returns per rank (pid, raylet id, number of connected ranks)."""
    answers = await executor.start()
    return [msgspec.msgpack.decode(each, type=tuple[int, str, int]) for each in answers]
