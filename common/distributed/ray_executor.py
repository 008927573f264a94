"""Runs ranks as Ray actors: stages are spread over hosts. A stage's ranks share one (one bundle),
or if none has room, as few as possible (equal bundles).

Ray places and starts the processes and reports their deaths. Steps and calls go over `fanout.py`'s
own TCP connections (CURVE), not through Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from socket import create_connection
from typing import Any

import msgspec
import ray
import zmq.asyncio
from ray.exceptions import ActorUnavailableError
from ray.job_config import JobConfig
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.common.core.errors import ConfigError
from pdserve.common.distributed import wire
from pdserve.common.distributed.environment import Rendezvous
from pdserve.common.distributed.executor import WorkerSpec
from pdserve.common.distributed.fanout import FanOutExecutor, Launcher
from pdserve.common.distributed.rank_main import run_rank
from pdserve.common.distributed.wire import NodeAddress

logger = logging.getLogger(__name__)

_PROBE = 3.0  # seconds for a connection to the cluster's head
_PLACEMENT_TIMEOUT = 20.0  # seconds; ranks of an ended node may still hold resources
_HEAD_INTERVAL = 1.0  # seconds between two probes of the head
_HEAD_MISSES = 2  # consecutive failed probes after which it counts as lost
# Prefixes of the node's variables that its ranks inherit; the rest comes from their hosts.
_INHERITED = ("NCCL_", "GLOO_", "TORCH_", "OMP_")

_specs = msgspec.msgpack.Decoder(WorkerSpec)
_addresses = msgspec.msgpack.Decoder(NodeAddress)


class RayExecutor(FanOutExecutor):
    """Runs `specs[r]` in an actor; `tensor_parallel_size` neighbouring ranks are a stage. `device`
    is "cpu" or "cuda"; ranks end after `timeout` seconds without a sign of life of the node. Call
    `connect` first."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        tensor_parallel_size: int,
        device: str,
        timeout: float = 30.0,
    ) -> None:
        stages = len(specs) // tensor_parallel_size
        unit = "GPU" if device == "cuda" else "CPU"
        super().__init__(specs, RayActors(stages, tensor_parallel_size, unit, timeout))


class RayActors(Launcher):
    """Launches ranks as actors, which end with this process, however it ends."""

    # Ray waits a second for an unresponsive rank to come back.
    death_notice_seconds = 3.0

    def __init__(self, stages: int, ranks: int, unit: str, timeout: float) -> None:
        self._stages = stages
        self._ranks = ranks  # per stage
        self._unit = unit
        self._timeout = timeout
        self._places: list[Place] = []  # by rank
        self._actors: list[Any] = []
        self._runs: dict[int, asyncio.Future[int]] = {}  # by rank; done when it has ended
        self._group: PlacementGroup | None = None
        self._head: asyncio.Task[str] | None = None  # done when the cluster's head is lost
        self._rendezvous: Rendezvous
        self._node: NodeAddress

    async def open(self, socket: zmq.asyncio.Socket) -> None:
        self._group, share = await reserve_stages(self._stages, self._ranks, self._unit)
        self._places = [place for place in places_of(self._group) for _ in range(share)]
        for stage in range(self._stages):
            first = stage * self._ranks
            hosts = Counter(place.host for place in self._places[first : first + self._ranks])
            where = ", ".join(f"{count} on host {host}" for host, count in hosts.items())
            logger.info("stage %d, %d ranks: %s", stage, self._ranks, where)
        self._head = asyncio.create_task(wait_for_lost_head())
        here = ray.util.get_node_ip_address()
        self._rendezvous = await asyncio.to_thread(Rendezvous, here)
        self._node = wire.listen(socket, here, self._timeout)

    async def launch(self, spec: WorkerSpec) -> None:
        group = self._group
        assert group is not None, "open comes first"
        strategy = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=self._places[spec.rank].bundle
        )
        share = {"num_gpus": 1, "num_cpus": 0} if self._unit == "GPU" else {"num_cpus": 1}
        kind: Any = ray.remote(RayRank)
        actor = kind.options(scheduling_strategy=strategy, **share).remote(_inherited_environment())
        self._actors.append(actor)
        # A rank sees only its own GPU, so its index is 0.
        spec = replace(spec, init_method=self._rendezvous.init_method, local_rank=0)
        run = actor.run.remote(*map(msgspec.msgpack.encode, (spec, self._node)))
        self._runs[spec.rank] = asyncio.wrap_future(run.future())

    def started(self) -> None:
        """Keeps the rendezvous, which ranks use for later groups."""

    async def wait(self, rank: int) -> str:
        run, head = self._runs[rank], self._head
        assert head is not None, "open comes first"
        events: list[asyncio.Future[Any]] = [run, head]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            return head.result()
        error = run.exception()
        return f"exited with code {run.result()}" if error is None else _describe_death(error)

    def where(self, rank: int) -> str:
        return f"host {self._places[rank].host}"

    def kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    async def close(self) -> None:
        if self._group is not None:
            await release(self._group)
        if self._head is not None:
            self._head.cancel()
            await asyncio.wait([self._head])


def _inherited_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(_INHERITED)}


def _describe_death(error: BaseException) -> str:
    if isinstance(error, ActorUnavailableError):
        return "was lost: its host or the raylet on it is gone"
    # Ray's last line has the cause, followed by general advice.
    return f"died: {str(error).splitlines()[-1].partition(' Some common causes')[0]}"


# ---- the actor; Ray transfers only bytes, so each host runs its own copy of the code ----


class RayRank:
    """A rank as an actor. `run` is called once and returns when the rank has ended."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)

    def run(self, spec: bytes, node: bytes) -> int:
        """Runs the rank; `spec` is a msgpack `WorkerSpec`, `node` a msgpack `NodeAddress`."""
        return run_rank(_specs.decode(spec), _addresses.decode(node))


# ---- the cluster: connecting, reserving, watching its head ----


def connect(address: str | None) -> None:
    """Makes this process a driver of the cluster at `address` ("host:port"; None: RAY_ADDRESS, else
    the cluster on this host), unless it is one already.

    Raises:
        ConfigError: there is no cluster.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if address != "auto":
        _probe(address)
    try:
        ray.init(
            address=address,
            job_config=JobConfig(code_search_path=[os.path.abspath(path) for path in sys.path]),
            logging_level=logging.WARNING,
            log_to_driver=False,  # ranks send their log to the node themselves
        )
    except ConnectionError as error:
        raise _no_cluster(str(error)) from error


def _probe(address: str) -> None:
    """Checks that the address answers: Ray would try for two minutes and then exit the process."""
    host, _, port = address.rpartition(":")
    try:
        create_connection((host, int(port)), timeout=_PROBE).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(f"{address}: {error}") from error


def _no_cluster(reason: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster found ({reason}): run `ray start --head` on one host and "
        "`ray start --address HOST:6379` on the others, and pass --ray-address HOST:6379"
    )


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank."""

    bundle: int  # index in the placement group
    host: str  # address


async def reserve_stages(stages: int, ranks: int, unit: str) -> tuple[PlacementGroup, int]:
    """Reserves a unit ("CPU" or "GPU") for each rank: those of a stage on one host, stages spread
    over as many as possible; without room for that, equal shares of each stage, as large as they
    fit. A host that is missing may come meanwhile. Returns also how many ranks a bundle has.

    Raises:
        ConfigError: there are not enough resources.
    """

    def shares() -> list[int]:
        return shares_of_a_stage(stages, ranks, list(_units(unit).values()))

    if not (found := shares()):
        try:
            return await reserve(stages, ranks, unit, unless=shares), ranks
        except ConfigError:
            if not (found := shares()):
                raise
    *others, last = found
    for share in others:
        try:
            return await _reserve_shares(stages, ranks, unit, share), share
        except ConfigError:
            logger.info("there is no room for %d ranks of a stage on each host", share)
    return await _reserve_shares(stages, ranks, unit, last), last


async def _reserve_shares(stages: int, ranks: int, unit: str, share: int) -> PlacementGroup:
    strategy = "SPREAD" if share == ranks else "PACK"
    return await reserve(stages * ranks // share, share, unit, strategy)


async def reserve(
    bundles: int,
    size: int,
    unit: str,
    strategy: str = "SPREAD",
    unless: Callable[[], object] = lambda: False,
) -> PlacementGroup:
    """Reserves bundles of `size` units ("CPU" or "GPU"), each on one host, spread over as many
    hosts as possible, or packed. Stops waiting for them when `unless` is true.

    Raises:
        ConfigError: there are not enough resources.
    """
    group = placement_group([{unit: size}] * bundles, strategy=strategy)
    try:
        if not await _placed(group, unless):
            raise ConfigError(
                f"Ray could not reserve {bundles} x {size} {unit} within "
                f"{_PLACEMENT_TIMEOUT:.0f} s, each {size} on one host; "
                f"{_resources(unit)}: add hosts, or lower --tensor-parallel-size or "
                "--pipeline-parallel-size"
            )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def shares_of_a_stage(stages: int, ranks: int, room: Sequence[float]) -> list[int]:
    """Returns how many ranks of a stage may share a host, the most first; `room`: ranks for which
    each host has devices, used or not. Empty: it is too small for all."""
    divisors = [share for share in range(ranks, 0, -1) if ranks % share == 0]
    return [
        share
        for share in divisors
        if sum(units // share for units in room) * share >= stages * ranks
    ]


async def _placed(group: PlacementGroup, unless: Callable[[], object]) -> bool:
    deadline = asyncio.get_running_loop().time() + _PLACEMENT_TIMEOUT
    while not await asyncio.to_thread(group.wait, timeout_seconds=1):
        if asyncio.get_running_loop().time() > deadline or unless():
            return False
    return True


def _resources(unit: str) -> str:
    addresses = _addresses_of_raylets()
    hosts = [f"{addresses[node]} has {count:g}" for node, count in _units(unit).items()]
    free = ray.available_resources().get(unit, 0)
    return f"{', '.join(hosts)}; {free:g} free in total"


def _units(unit: str) -> dict[str, float]:
    """Returns what each raylet that lives has, used or not."""
    return {node["NodeID"]: node["Resources"].get(unit, 0) for node in ray.nodes() if node["Alive"]}


def _addresses_of_raylets() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def hosts_of(group: PlacementGroup) -> list[str]:
    """Returns the address of each bundle's host."""
    nodes, addresses = placement_group_table(group)["bundles_to_node_id"], _addresses_of_raylets()
    return [addresses[nodes[bundle]] for bundle in sorted(nodes)]


def places_of(group: PlacementGroup) -> list[Place]:
    """Returns the bundles, those of one host beside each other."""
    hosts = hosts_of(group)
    order = sorted(range(len(hosts)), key=lambda bundle: (hosts.index(hosts[bundle]), bundle))
    return [Place(bundle, hosts[bundle]) for bundle in order]


async def release(group: PlacementGroup) -> None:
    """Frees the reserved resources and ends what runs there. Skipped if the head is lost: the call
    would take a minute, and the cluster cleans up after a driver that is gone."""
    if await _head_answers():
        remove_placement_group(group)


async def wait_for_lost_head() -> str:
    """Returns once the cluster's head does not answer any more. Ray then ends all its processes
    after a minute."""
    misses = 0
    while misses < _HEAD_MISSES:
        await asyncio.sleep(_HEAD_INTERVAL)
        misses = 0 if await _head_answers() else misses + 1
    return f"lost Ray's head at {_head()}"


def _head() -> str:
    return str(ray.get_runtime_context().gcs_address)


async def _head_answers() -> bool:
    host, _, port = _head().rpartition(":")
    try:
        async with asyncio.timeout(_PROBE):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
