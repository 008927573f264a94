"""A whole cluster on this host: start → ready → serve → drain → stop.

When a process ends while the cluster serves:

    exit 0   the node was drained on purpose: the others continue
    exit 2   its options are wrong: the cluster stops
    other    `--restart on-failure` starts it again (`Restarts`). If it ends too often it stays
             down; the cluster continues if it can serve without it. `--restart no`: the cluster
             stops
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from pdserve.cli.child import Child, ChildSpec, Write
from pdserve.cli.host_share import CoreTable, NodeShare
from pdserve.cli.restarts import Restarts
from pdserve.client.server import client_session
from pdserve.common.config.cluster import ClusterConfig
from pdserve.common.config.node import (
    BothNodeConfig,
    NodeConfig,
    TransferConfig,
    WorkerNodeConfig,
)
from pdserve.common.config.options import to_environment, to_flags
from pdserve.common.config.router import RouterConfig, ServerConfig
from pdserve.common.config.shared import AuthConfig
from pdserve.common.core.errors import ConfigError, NodeError, PdserveError
from pdserve.common.core.waits import saying
from pdserve.common.obs.process import read_ports

PROGRAMS: Mapping[str, Sequence[str]] = {
    "router": (sys.executable, "-m", "pdserve.router"),
    "prefill": (sys.executable, "-m", "pdserve.prefill_node"),
    "decode": (sys.executable, "-m", "pdserve.decode_node"),
    "both": (sys.executable, "-m", "pdserve.decode_node.both"),
}
POLL_INTERVAL = 0.1
KILL_GRACE = 5.0  # seconds past the drain time-out before SIGKILL


class Cluster:
    """The routers and nodes of one cluster as child processes. A caller of `start` must call
    `stop`, also after a failure."""

    def __init__(
        self,
        config: ClusterConfig,
        shares: Sequence[NodeShare],
        write: Write,
        programs: Mapping[str, Sequence[str]] = PROGRAMS,
    ) -> None:
        """`shares`: one entry per name in `node_names`, in the same order."""
        self.config = config
        self._cores = _core_table(shares)
        lent = [_with_cores(each, self._cores) for each in shares]
        self.shares = dict(zip(node_names(config), lent, strict=True))
        self.write = write
        self.programs = programs
        self._auth = _with_key(config.auth)
        self._registries = ""  # of the routers, for nodes
        self.urls: list[str] = []  # of the routers
        self._awaited = "the router"
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-")
        self._routers: list[Child] = []
        self._nodes: list[Child] = []
        self._leaving: set[Child] = set()  # nodes that are draining after `scale`
        self._watchers: list[asyncio.Task[None]] = []
        self._returning: dict[Child, asyncio.Future[None]] = {}  # routers that have died
        self._interrupts = 0

    @property
    def url(self) -> str:
        """The first router's URL."""
        return self.urls[0]

    async def start(self) -> bool:
        """Returns True once the routers can serve, False if `interrupt` was called before.

        Raises:
            NodeError: a process died and the cluster cannot continue without it.
            ConfigError: a process cannot start as configured.
        """
        return await self.until_ended(self._start())

    async def until_ended(self, work: Coroutine[Any, Any, None]) -> bool:
        """Awaits `work` and returns True; cancels it and returns False on `interrupt`.

        Raises:
            NodeError: as `start` does; and whatever `work` raises.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if not self.ended.done():
            await task
            return True
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.ended.result()
        return False

    def interrupt(self) -> None:
        """Stops serving and drains; a second call cuts the drain short by another SIGTERM, a third
        one kills."""
        self._interrupts += 1
        if not self.ended.done():
            self.ended.set_result(None)
        if self._interrupts == 2:
            self.write("up", "stopping now")
            for child in self._children():
                child.terminate()
        elif self._interrupts > 2:
            for child in self._children():
                child.kill()

    async def stop(self) -> None:
        """Drains the routers, whose requests in flight need the nodes, and then the nodes."""
        watchers = [*self._watchers, *self._returning.values()]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await self._end(self._routers)
        await self._end(self._nodes)
        if self.ended.done():
            self.ended.exception()  # retrieved, or asyncio logs it as never retrieved
        self._folder.cleanup()
        if self._cores is not None:
            self._cores.close()

    async def _start(self) -> None:
        with saying(lambda: f"waiting for {self._awaited}", write=partial(self.write, "up")):
            await self._start_all()

    async def _start_all(self) -> None:
        hosts_ports = await self._start_routers()
        scheme = "https" if self.config.server.ssl_certfile else "http"
        self.urls = [f"{scheme}://{host}:{ports['http']}" for host, ports in hosts_ports]
        self._registries = ",".join(f"{host}:{ports['registry']}" for host, ports in hosts_ports)
        for name in self.shares:
            await self._start_node(name)
        await asyncio.gather(*map(self._ready, self.urls))

    async def _start_routers(self) -> list[tuple[str, dict[str, int]]]:
        """Starts the routers and returns hosts and ports, which a restart of them uses again."""
        for index, name in enumerate(router_names(self.config)):
            changes: dict[str, Any] = {"ports_file": self._new_ports_file(index)}
            if index:
                changes |= {"port": 0, "grpc_port": 0, "registry_port": 0}
            self._routers.append(self._router(self._router_spec(name, **changes)))
            await self._run(self._routers[-1])
        found = [await self._address(router) for router in self._routers]
        for index, (router, (_, ports)) in enumerate(zip(self._routers, found, strict=True)):
            router.spec = self._router_spec(
                router.name,
                port=ports["http"],
                grpc_port=ports["grpc"],
                registry_port=ports["registry"],
                ports_file=self._ports_file(index) if self.config.server.ports_file else None,
            )
        self._folder.cleanup()  # already here, so that SIGKILL leaves no folder behind
        return found

    async def _start_node(self, name: str) -> None:
        share, node = self.shares[name], self._node_config(name)
        command = [*self.programs[role_of(name)], *to_flags(node)]
        environment = {**share.environment, **to_environment(node)}
        self._nodes.append(self._node(ChildSpec(name, command, environment)))
        await self._run(self._nodes[-1])

    # ---- where processes run: here -----------------------------------------------------------

    def _router(self, spec: ChildSpec) -> Child:
        return Child(spec, self.write)

    def _node(self, spec: ChildSpec) -> Child:
        return Child(spec, self.write)

    def _new_ports_file(self, index: int) -> str:
        """Deletes the file of an earlier router, which has that router's ports."""
        file = self._ports_file(index)
        Path(file).unlink(missing_ok=True)
        return file

    def _ports_file(self, index: int) -> str:
        """Returns the file to which router number `index` writes its ports."""
        given = self.config.server.ports_file or f"{self._folder.name}/router.json"
        return f"{given}.{index}" if index else given

    async def _address(self, router: Child) -> tuple[str, dict[str, int]]:
        """Waits until a starting router has its ports; returns them and its host."""
        file = self._ports_file(self._routers.index(router))
        while (ports := read_ports(file)) is None:
            await asyncio.sleep(POLL_INTERVAL)
        return connect_host(self.config.server.host), ports

    # ---- options -----------------------------------------------------------------------------

    def _router_spec(self, name: str, **changes: Any) -> ChildSpec:
        config = RouterConfig(
            server=replace(self.config.server, **changes),
            chat=self.config.chat,
            tls=self.config.tls,
            auth=self._auth,
            model=self.config.engine.model,
            lora=self.config.engine.lora,
            routing=self.config.routing,
            log=self.config.log,
            observability=self.config.observability,
        )
        command = [*self.programs["router"], *to_flags(config)]
        return ChildSpec(name, command, to_environment(config))

    def _node_options(self) -> NodeConfig:
        return NodeConfig(router=self._registries, drain_timeout=self.config.server.drain_timeout)

    def _node_config(self, name: str) -> BothNodeConfig:
        config, engine = self.config, self.shares[name].engine
        number = list(self.shares).index(name)
        parts: dict[str, Any] = {
            "node": self._node_options(),
            "tls": config.tls,
            "auth": self._auth,
            "engine": engine,
            "events": config.events.moved(number * engine.parallel.data_parallel_size),
            "log": config.log,
            "observability": config.observability,
        }
        if role_of(name) == "both":
            return BothNodeConfig(**parts)
        return WorkerNodeConfig(**parts, transfer=self._transfer())

    def _transfer(self) -> TransferConfig:
        return self.config.transfer

    async def _ready(self, url: str) -> None:
        async with own_session(self.config.server) as session:
            while True:
                with suppress(aiohttp.ClientError, TimeoutError):
                    timeout = aiohttp.ClientTimeout(total=5)
                    async with session.get(f"{url}/ready", timeout=timeout) as response:
                        if response.status == 200:
                            return
                        self._awaited = f"nodes ({await _reason(response)})"
                await asyncio.sleep(POLL_INTERVAL)

    async def _run(self, child: Child) -> None:
        await child.start()
        self._watchers.append(asyncio.create_task(self._watch(child)))

    async def _watch(self, child: Child) -> None:
        """Restarts `child` or ends the cluster, by the table at the top of this file."""
        restarts = Restarts(child, self.write)
        while True:
            code = await child.wait()
            ended = monotonic()
            if child in self._leaving:
                return
            if code == 0 and child not in self._routers:
                self._nodes.remove(child)
                self.write("up", f"{child.name} has drained and left")
                return
            if code == 2:
                self._fail(ConfigError(f"{child.name} cannot start as configured"))
                return
            if self.config.restart == "no":
                self._fail(NodeError(restarts.describe(code)))
                return
            if not await restarts.restart(code):
                self._give_up(child, restarts.describe(code))
                return
            if child in self._routers:
                self._log_when_ready(child, ended)

    def _log_when_ready(self, router: Child, ended: float) -> None:
        """Logs when a restarted router, whose predecessor ended at `ended`, has nodes again."""

        async def say() -> None:
            await self._ready(self.urls[self._routers.index(router)])
            self.write(
                "up", f"{router.name}: serving again, {monotonic() - ended:.1f} s after it ended"
            )

        if router in self._returning:
            self._returning[router].cancel()  # it may have died again before it could serve
        if self.urls:  # otherwise `start` is still waiting and reports it
            self._returning[router] = asyncio.create_task(say())

    def _give_up(self, child: Child, reason: str) -> None:
        """Leaves `child` down; ends the cluster unless the others can serve without it."""
        roles = {role_of(each.name) for each in self._children() if each.running}
        if "router" in roles and ("both" in roles or roles >= {"prefill", "decode"}):
            self.write("up", f"{reason}: it stays down; the others continue")
            if child in self._nodes:
                self._nodes.remove(child)
        else:
            self._fail(NodeError(reason))

    def _fail(self, error: PdserveError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _end(self, children: Sequence[Child]) -> None:
        for child in children:
            child.terminate()
        waits = [asyncio.ensure_future(child.wait()) for child in children]
        if not waits:
            return
        limit = self.config.server.drain_timeout + KILL_GRACE
        await asyncio.wait(waits, timeout=limit)
        for child in children:
            if child.running:
                self.write("up", f"{child.name} did not stop within {limit:.0f} s: killed")
                child.kill()
        if (await asyncio.wait(waits, timeout=KILL_GRACE))[1]:
            self.write("up", "some processes did not end even after SIGKILL")

    def _children(self) -> list[Child]:
        return [*self._routers, *self._nodes]


def _core_table(shares: Sequence[NodeShare]) -> CoreTable | None:
    lenders = [each.num_threads for each in shares if each.lends_cores]
    return CoreTable(sum(lenders)) if lenders else None


def _with_cores(share: NodeShare, table: CoreTable | None) -> NodeShare:
    if table is None or not share.lends_cores:
        return share
    parallel = replace(share.engine.parallel, share_cores=table.path)
    return replace(share, engine=replace(share.engine, parallel=parallel))


def router_names(config: ClusterConfig) -> list[str]:
    count = config.routers
    return [f"router-{index}" for index in range(count)] if count > 1 else ["router"]


def node_names(config: ClusterConfig) -> list[str]:
    return [f"{role}-{index}" for role, count in config.nodes.items() for index in range(count)]


def role_of(name: str) -> str:
    return name.partition("-")[0]


def _with_key(auth: AuthConfig) -> AuthConfig:
    """Returns `auth` with a random cluster key unless it has one."""
    return replace(auth, cluster_key=auth.cluster_key or secrets.token_hex(32))


def own_session(server: ServerConfig, timeout: float | None = None) -> aiohttp.ClientSession:
    """Returns a client session for our own router on this host. It does not verify the certificate,
    which need not name this address."""
    keys = server.admin_api_key or server.api_key
    key = keys and keys.split(",")[0].strip()
    return client_session(key, verify=False, timeout=timeout)


async def _reason(response: aiohttp.ClientResponse) -> str:
    """Returns why a router is not ready."""
    reason: str = (await response.json())["error"]["message"]
    return reason


def connect_host(host: str) -> str:
    """Returns the address, in URL form, that reaches a server bound to `host` from this host."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
