"""`pdserve up --on ray`: a cluster whose processes run on hosts that Ray chooses, and the requests
of `pdserve scale`.

Each node has a placement group with one bundle for all its ranks, so its ranks share a host. The
routers have one group with a bundle each, spread over hosts. A process that dies is restarted as on
a single host: a node wherever Ray finds room, a router on its host, since nodes know its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import aiohttp
import ray
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup

from pdserve.cli.child import Child, ChildSpec, Write
from pdserve.cli.cluster import PROGRAMS, Cluster, node_names, own_session, role_of
from pdserve.cli.host_share import NodeShare, role_sizes
from pdserve.cli.ray_child import HOST, PORTS_FILE, Bundle, RayChild
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.node import NodeConfig, TransferConfig
from pdserve.common.core.errors import ConfigError, NodeError, PdserveError
from pdserve.common.distributed.ray_executor import connect, hosts_of, release, reserve
from pdserve.common.obs.process import write_ports

NAMESPACE = "pdserve"  # of desks; a desk has the name of its cluster's model
POLL = 0.3  # seconds between two checks for new nodes


class Desk:
    """The actor to which `pdserve scale` sends its request, and which returns the answer."""

    def __init__(self) -> None:
        self._numbers = count()
        self._asked: asyncio.Queue[tuple[int, dict[str, int]]] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[str]] = {}

    async def ask(self, sizes: dict[str, int]) -> str:
        """Waits until the cluster has these sizes; returns "" or the reason why it could not."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._asked.put((number, sizes))
        return await answer

    async def next(self) -> tuple[int, dict[str, int]]:
        return await self._asked.get()

    async def answer(self, number: int, text: str) -> None:
        self._answers.pop(number).set_result(text)


def open_desk(name: str) -> Any:
    """Creates the desk; raises ConfigError if there is one of this name."""
    kind: Any = ray.remote(Desk)
    try:
        return kind.options(name=name, namespace=NAMESPACE, num_cpus=0).remote()
    except ValueError:
        raise ConfigError(
            f"a cluster that serves {name} runs on this Ray cluster already: scale it with "
            "`pdserve scale`, or give this cluster another --served-model-name"
        ) from None


def find_desk(name: str | None) -> Any:
    """Returns the desk of the cluster that serves the model `name`; None: of the only cluster.

    Raises:
        ConfigError: there is no such cluster, or there are several.
    """
    desks = list_named_actors(all_namespaces=True)
    names = sorted(each["name"] for each in desks if each["namespace"] == NAMESPACE)
    if name is None and len(names) == 1:
        name = names[0]
    if name not in names:
        running = f"clusters serve {', '.join(names)}" if names else "no cluster runs"
        raise ConfigError(
            f"--served-model-name {name or 'is needed'}: {running} on this Ray cluster, by "
            "`pdserve up --on ray`"
        )
    assert name is not None, "it is one of them"
    return ray.get_actor(name, namespace=NAMESPACE)


class RayCluster(Cluster):
    """A cluster on the hosts of a Ray cluster, which the constructor joins."""

    def __init__(
        self,
        config: ClusterConfig,
        write: Write,
        programs: Mapping[str, Sequence[str]] = PROGRAMS,
    ) -> None:
        """Raises ConfigError if there is no Ray cluster, or if it serves this model already."""
        connect(config.engine.parallel.ray_address)
        self._desk = open_desk(config.engine.model.served_name)
        device = config.engine.parallel.device
        gpus = device == "auto" and ray.cluster_resources().get("GPU", 0)
        self._unit = "GPU" if gpus or device == "cuda" else "CPU"
        self._sizes = role_sizes(config)
        self._hosts: dict[str, str] = {}  # router name → host
        self._routers_group: PlacementGroup | None = None
        self._at_desk: asyncio.Task[None] | None = None
        shares = [self._share(config, role_of(name)) for name in node_names(config)]
        super().__init__(config, shares, write, programs)

    def _share(self, config: ClusterConfig, role: str) -> NodeShare:
        """Returns a node's share of its host: all of its bundle."""
        parallel = self._sizes[role]
        several = parallel.world_size_across_dp > 1
        device = "cuda" if self._unit == "GPU" else "cpu"
        parallel = replace(
            parallel,
            device=device,
            cpu_threads=parallel.cpu_threads or (1 if device == "cpu" else 0),
            distributed_executor_backend="mp" if several else "auto",
        )
        return NodeShare(replace(config.engine, parallel=parallel))

    # ---- start, scale, stop ------------------------------------------------------------------

    async def _start(self) -> None:
        routers = self.config.routers
        group = await reserve(routers, self.config.server.router_workers, "CPU")
        self._routers_group = group
        await super()._start()
        if (given := self.config.server.ports_file) is not None:
            for index, router in enumerate(self._routers):
                assert isinstance(router, RayChild)
                write_ports(f"{given}.{index}" if index else given, (await router.address())[1])
        self._at_desk = asyncio.create_task(self._serve_desk())

    async def _serve_desk(self) -> None:
        while True:
            number, sizes = await self._desk.next.remote()
            try:
                await self.scale(sizes)
                answer = ""
            except PdserveError as error:
                answer = error.message
            await self._desk.answer.remote(number, answer)

    async def scale(self, sizes: Mapping[str, int]) -> None:
        """Starts nodes until each of these roles has that many, or drains the newest extra ones;
        returns when the new nodes are ready and the extra ones have ended.

        Raises:
            ConfigError: such a cluster could not serve, or Ray has no room for it.
        """
        changes: dict[str, Any] = {**sizes}
        config = replace(self.config, **changes)  # which checks the sizes
        for role, size in sizes.items():
            self.write("up", f"{role}: {len(self._of(role))} → {size} nodes")
            while len(self._of(role)) < size:
                number = next(n for n in count() if f"{role}-{n}" not in self.shares)
                self.shares[f"{role}-{number}"] = self._share(config, role)
                await self._start_node(f"{role}-{number}")
            await self._drop(self._of(role)[size:])
        self.config = config
        for url in self.urls:
            await self._until(url, sizes)

    def _of(self, role: str) -> list[Child]:
        return [node for node in self._nodes if role_of(node.name) == role]

    async def _drop(self, nodes: Sequence[Child]) -> None:
        """Drains the nodes and waits for their end."""
        self._leaving |= {*nodes}
        for node in nodes:
            self._nodes.remove(node)
        try:
            await self._end(nodes)
        except asyncio.CancelledError:  # `stop` ends them
            self._nodes += nodes
            raise
        for node in nodes:
            self.write("up", f"{node.name} has left")

    async def _until(self, url: str, sizes: Mapping[str, int]) -> None:
        """Waits until the router has that many ready nodes. Raises NodeError if some have ended."""
        async with own_session(self.config.server, timeout=5) as session:
            while all(len(self._of(role)) == size for role, size in sizes.items()):
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{url}/v1/cluster") as response:
                        nodes = (await response.json())["nodes"]
                        ready = [each["role"] for each in nodes if each["state"] == "ready"]
                        if all(ready.count(role) == size for role, size in sizes.items()):
                            return
                await asyncio.sleep(POLL)
        raise NodeError("new nodes did not start, or ended; see the log of `pdserve up`")

    async def stop(self) -> None:
        if self._at_desk is not None:
            self._at_desk.cancel()
        await super().stop()
        if self._routers_group is not None:
            await release(self._routers_group)

    # ---- where processes run -----------------------------------------------------------------

    def _router(self, spec: ChildSpec) -> Child:
        share = {"num_cpus": self.config.server.router_workers}
        index = len(self._routers)
        return RayChild(spec, self.write, partial(self._place_of, index), self._stays, share)

    async def _place_of(self, index: int) -> Bundle:
        """Returns the bundle of router number `index`; raises ConfigError if its host is lost."""
        assert self._routers_group is not None
        host = (await asyncio.to_thread(hosts_of, self._routers_group))[index]
        first = self._hosts.setdefault(str(index), host)
        if host != first:
            raise ConfigError(f"its host {first} is lost, and nodes know it by that address")
        return self._routers_group, index

    async def _stays(self, bundle: Bundle) -> None:
        """Keeps the bundle for the router's restart."""

    def _node(self, spec: ChildSpec) -> Child:
        parallel = self.shares[spec.name].engine.parallel
        ranks = parallel.world_size_across_dp
        units = ranks if self._unit == "GPU" else ranks * parallel.cpu_threads
        share = {"num_gpus": units, "num_cpus": 0} if self._unit == "GPU" else {"num_cpus": units}
        return RayChild(spec, self.write, partial(self._room, units), self._give_back, share)

    async def _room(self, units: int) -> Bundle:
        return await reserve(1, units, self._unit), 0

    async def _give_back(self, bundle: Bundle) -> None:
        await release(bundle[0])

    def _ports_file(self, index: int) -> str:
        return PORTS_FILE

    async def _address(self, router: Child) -> tuple[str, dict[str, int]]:
        assert isinstance(router, RayChild)
        return await router.address()

    # ---- options -----------------------------------------------------------------------------

    def _router_spec(self, name: str, **changes: Any) -> ChildSpec:
        return super()._router_spec(name, host=HOST, **{**changes, "ports_file": PORTS_FILE})

    def _node_options(self) -> NodeConfig:
        return replace(super()._node_options(), host=HOST)

    def _transfer(self) -> TransferConfig:
        return replace(self.config.transfer, kv_host=HOST)
