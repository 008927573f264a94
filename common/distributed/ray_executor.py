"""One Ray actor per rank, a bundle of resources per stage: a stage's ranks share a host, stages
are spread over hosts. `fanout.py` talks to them, over TCP with CURVE.

Ray finds places, starts processes and knows who died; steps and calls do not pass through it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import ray
import zmq
import zmq.asyncio
from ray.exceptions import ActorUnavailableError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.common.distributed import ray_cluster
from pdserve.common.distributed.environment import MeetingPoint
from pdserve.common.distributed.executor import WorkerSpec
from pdserve.common.distributed.fanout import FanOutExecutor, Launcher
from pdserve.common.distributed.rank_main import run_rank
from pdserve.common.distributed.wire import NodeAddress

logger = logging.getLogger(__name__)


# Of the node's environment, what its ranks inherit; the rest is the business of their hosts.
_INHERITED = ("NCCL_", "GLOO_", "TORCH_", "OMP_")


class RayExecutor(FanOutExecutor):
    """Runs `specs[r]` in an actor, `tensor_parallel_size` neighbours on each host. `device` is
    "cpu" or "cuda". `ray_cluster.connect` comes first."""

    def __init__(self, specs: Sequence[WorkerSpec], tensor_parallel_size: int, device: str) -> None:
        stages = len(specs) // tensor_parallel_size
        unit = "GPU" if device == "cuda" else "CPU"
        super().__init__(specs, RayActors(stages, tensor_parallel_size, unit))


class RayActors(Launcher):
    """Actors live no longer than this process, whatever becomes of it."""

    death_is_seen = 3.0  # Ray waits for a second whether a rank that does not answer comes back

    def __init__(self, stages: int, ranks: int, unit: str) -> None:
        self._stages = stages
        self._ranks = ranks  # of a stage
        self._unit = unit
        self._hosts: list[str] = []  # of each stage
        self._actors: list[Any] = []
        self._runs: dict[int, asyncio.Future[int]] = {}  # by rank; done: it has ended
        self._group: PlacementGroup | None = None
        self._head: asyncio.Task[str] | None = None  # done: the cluster's head is lost
        self._meeting: MeetingPoint
        self._node: NodeAddress

    async def open(self, socket: zmq.asyncio.Socket) -> None:
        self._group = await ray_cluster.reserve(self._stages, self._ranks, self._unit)
        self._hosts = ray_cluster.hosts_of(self._group)
        for stage, host in enumerate(self._hosts):
            logger.info("stage %d, %d ranks: host %s", stage, self._ranks, host)
        self._head = asyncio.create_task(ray_cluster.head_lost())
        here = ray.util.get_node_ip_address()
        self._meeting = await asyncio.to_thread(MeetingPoint, here)
        self._node = _listen(socket, here)

    async def launch(self, spec: WorkerSpec) -> None:
        group = self._group
        assert group is not None, "open comes first"
        place = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=spec.rank // self._ranks
        )
        share = {"num_gpus": 1, "num_cpus": 0} if self._unit == "GPU" else {"num_cpus": 1}
        kind: Any = ray.remote(RayRank)
        actor = kind.options(scheduling_strategy=place, **share).remote(_environment())
        self._actors.append(actor)
        # Ray shows a rank its own GPU only.
        spec = replace(spec, init_method=self._meeting.init_method, local_rank=0)
        run = actor.run.remote(*map(msgspec.msgpack.encode, (spec, self._node)))
        self._runs[spec.rank] = asyncio.wrap_future(run.future())

    def started(self) -> None:
        """Ranks go on meeting, in groups that they make later."""

    async def wait(self, rank: int) -> str:
        run, head = self._runs[rank], self._head
        assert head is not None, "open comes first"
        events: list[asyncio.Future[Any]] = [run, head]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            return head.result()
        error = run.exception()
        return f"exited with code {run.result()}" if error is None else _describe(error)

    def where(self, rank: int) -> str:
        return f"host {self._hosts[rank // self._ranks]}"

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def close(self) -> None:
        if self._group is not None:
            await ray_cluster.give_back(self._group)
        if self._head is not None:
            self._head.cancel()
            await asyncio.wait([self._head])


def _listen(socket: zmq.asyncio.Socket, address: str) -> NodeAddress:
    key, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_server = True
    port = socket.bind_to_random_port(f"tcp://{address}")
    return NodeAddress(f"tcp://{address}:{port}", key.decode())


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(_INHERITED)}


def _describe(error: BaseException) -> str:
    if isinstance(error, ActorUnavailableError):
        return "was lost: its host, or the raylet there, is gone"
    # Ray's last line has what it knows of the cause, and then general advice.
    return f"died: {str(error).splitlines()[-1].partition(' Some common causes')[0]}"


# ---- a rank as a Ray actor: Ray carries plain bytes only, code is what each host has ----


class RayRank:
    """`run` is called once and returns when the rank has ended."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)

    def run(self, spec: bytes, node: bytes) -> int:
        """Both are msgpack: a `WorkerSpec`, a `NodeAddress`."""
        return run_rank(
            msgspec.msgpack.decode(spec, type=WorkerSpec),
            msgspec.msgpack.decode(node, type=NodeAddress),
        )
