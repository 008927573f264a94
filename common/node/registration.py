"""The registration of a node with its routers. Each is independent: a router that dies, hangs or
has another cluster key does not disturb the others."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import grpc

from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.tls import tls_mismatch

logger = logging.getLogger(__name__)

_RPC_TIMEOUT = 2.0  # seconds
_RETRY_DELAY = 0.3
_PATIENCE = 3.0  # seconds without a router after which a warning is logged
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_LOOK_UP_PERIOD = 5.0  # seconds between two look-ups of the routers' names
_LOOK_UP_TIMEOUT = 2.0

Load = Callable[[str], pb.NodeLoad]
"""Makes the load report for the router of this id."""


class Registrations:
    """Keeps a node registered with every router of --router, until `deregister`.

    A name with several addresses stands for a router at each. Names are resolved again regularly:
    the node registers with new routers, and keeps one that has left the name as long as it answers,
    so a failing name server has no effect. A router may name siblings on its host, its other
    worker processes; the node registers with them as if they were given.
    """

    def __init__(
        self,
        routers: Sequence[str],
        info: pb.NodeInfo,
        load: Load,
        channels: Channels,
        *,
        over_tls: bool = False,
    ) -> None:
        """`routers`: HOST:PORT each."""
        self._info, self._load = info, load
        self._channels, self._over_tls = channels, over_tls
        self._found: dict[str, list[str]] = {router: [router] for router in routers}
        self._kept: dict[str, Registration] = {}  # by address
        self._siblings_found = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Runs until cancelled, by `deregister` too."""
        self._running = asyncio.current_task()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.gather(*map(self._look_up, self._found))
                for address, router in self._wanted().items():
                    if address not in self._kept:
                        self._kept[address] = self._registration(router, address)
                        group.create_task(self._keep(address))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_UP_PERIOD):
                        await self._siblings_found.wait()
                self._siblings_found.clear()

    async def deregister(self) -> None:
        """Asks all routers to send no more jobs; unreachable ones are ignored."""
        if self._running is not None:  # a heartbeat after this would register the node again
            self._running.cancel()
            await asyncio.wait((self._running,))
        await asyncio.gather(*(each.deregister() for each in self._kept.values()))

    def _registration(self, router: str, address: str) -> Registration:
        if address != router:  # its certificate has the name, not the address
            self._channels.name(address, router.rpartition(":")[0])
        return Registration(
            address, self._info, self._load_for, self._channels, over_tls=self._over_tls,
            on_siblings=self._siblings_found.set,
        )  # fmt: skip

    def _load_for(self, router: str) -> pb.NodeLoad:
        load = self._load(router)
        # Count routers by id: two addresses may lead to one router.
        load.routers = len({each.router_id for each in self._kept.values() if each.registered})
        return load

    async def _keep(self, address: str) -> None:
        await self._kept[address].run(lambda: address in self._wanted())
        del self._kept[address]
        await self._channels.drop([address])
        logger.info("router %s is no longer among --router and does not answer: left", address)

    def _wanted(self) -> dict[str, str]:
        """Returns the addresses to register at → the router of --router that each belongs to: the
        resolved addresses, and the siblings of the routers that answer there."""
        named = {each: router for router, found in self._found.items() for each in found}
        siblings = {
            _joined(address.rpartition(":")[0].strip("[]"), str(port)): router
            for address, router in named.items()
            if address in self._kept
            for port in self._kept[address].sibling_ports
        }
        return {**siblings, **named}

    async def _look_up(self, router: str) -> None:
        """Resolves the router's name; if that fails, the name keeps its addresses."""
        host, _, port = router.rpartition(":")
        if _is_ip(host):
            return
        try:
            async with asyncio.timeout(_LOOK_UP_TIMEOUT):
                found = await asyncio.get_running_loop().getaddrinfo(
                    host, int(port), type=socket.SOCK_STREAM
                )
        except (OSError, UnicodeError) as error:
            logger.debug("router %s: %s", router, error)
            return
        hosts = several(str(address[0]) for *_, address in found)
        self._found[router] = [_joined(each, port) for each in hosts] or [router]


def several(hosts: Iterable[str]) -> list[str]:
    """Returns the IP addresses of the family that has the most, in order. Returns none if that is
    only one: a name with one address per family is one host, which is dialled by its name."""
    families: defaultdict[int, dict[str, None]] = defaultdict(dict)
    for host in hosts:
        families[ipaddress.ip_address(host.partition("%")[0]).version][host] = None
    most = max(families.values(), key=len, default={})
    return list(most) if len(most) > 1 else []


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _outcome(error: grpc.aio.AioRpcError | TimeoutError) -> tuple[bool, str]:
    """Returns (whether no router answers there, the reason to log)."""
    if isinstance(error, TimeoutError):
        return False, f"no answer to a heartbeat within {_RPC_TIMEOUT:g} s"
    return error.code() in _AWAY, error.details() or error.code().name


class Registration:
    """Keeps one node registered with one router until `deregister`, by heartbeats with its load.

    Router and node may start in any order, and the router may restart: whenever the router does not
    know the node, the node registers again. It also retries after a refusal, which may be about a
    node of the same id that has just died.
    """

    def __init__(
        self,
        router: str,
        info: pb.NodeInfo,
        load: Load,
        channels: Channels,
        *,
        over_tls: bool = False,
        on_siblings: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_siblings` is called when the router names other siblings than before."""
        self._router = router
        self._channels = channels
        self._info = info
        self._load = load
        self._over_tls = over_tls
        self._interval = 1.0
        self.registered = False
        self.router_id = ""  # once it has been registered
        self.sibling_ports: list[int] = []  # as the router last named them
        self._on_siblings = on_siblings
        self._beats: Any = None  # the stream of heartbeats, once it is open

    def _stub(self) -> pb_grpc.RegistryStub:
        return pb_grpc.RegistryStub(self._channels.get(self._router))

    async def run(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Retries as long as the router is `wanted`, or answers. One that answered a moment ago
        may be restarting, or stopping with this node, so its absence is not logged at once."""
        reported, last_contact = "", -math.inf
        while True:
            try:
                await self._beat()
                reported, last_contact = "", monotonic()
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                self.registered = False
                if not wanted():
                    return
                is_away, reason = _outcome(error)
                if not is_away and reason != reported:
                    logger.warning("router %s: %s; trying again", self._router, reason)
                    reported = reason
                elif not reported and monotonic() - last_contact > _PATIENCE:
                    mismatch = await tls_mismatch(self._router, self._over_tls)
                    logger.warning("router %s: %s; trying again", self._router, mismatch or reason)
                    reported = reason
            await asyncio.sleep(self._interval if self.registered else _RETRY_DELAY)

    async def _beat(self) -> None:
        node_id, instance = self._info.node_id, self._info.instance
        if self.registered:
            beat = pb.HeartbeatRequest(
                node_id=node_id,
                load=self._load(self.router_id),
                instance=instance,
                time_s=time.time(),
            )
            answer = await self._answer(beat)
            self.registered = answer is not None and answer.known
            if answer is not None:
                self._interval = answer.heartbeat_interval_s or self._interval
        if not self.registered:
            load = self._load(self.router_id)
            request = pb.RegisterRequest(node=self._info, load=load, time_s=time.time())
            response = await self._stub().Register(request, timeout=_RPC_TIMEOUT)
            self._interval, self.router_id = response.heartbeat_interval_s, response.router
            self.registered = True
            if (siblings := list(response.sibling_ports)) != self.sibling_ports:
                self.sibling_ports = siblings
                self._on_siblings()
            logger.info("registered with router %s as %s", self._router, self._info.node_id)

    async def _answer(self, beat: pb.HeartbeatRequest) -> pb.HeartbeatResponse | None:
        """Sends a heartbeat; returns the answer, None if the router has ended the stream.

        Raises:
            TimeoutError: the router did not answer in time.
            grpc.aio.AioRpcError: the stream has failed.
        """
        if self._beats is None:
            self._beats = self._stub().Heartbeats()
        answer, beats = None, self._beats
        try:
            async with asyncio.timeout(_RPC_TIMEOUT):
                await beats.write(beat)
                answer = await beats.read()
        except (asyncio.InvalidStateError, grpc.aio.UsageError):  # it has ended since the last one
            pass
        except grpc.aio.AioRpcError as error:
            # grpc.aio calls it so when a call ends during a write, whatever its status is: the next
            # call says why.
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
        finally:
            if not isinstance(answer, pb.HeartbeatResponse):
                self._hang_up()
        return answer if isinstance(answer, pb.HeartbeatResponse) else None

    def _hang_up(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None

    async def deregister(self) -> None:
        """Asks the router to send no more jobs; an unreachable router is ignored."""
        self.registered = False
        try:
            request = pb.DeregisterRequest(node_id=self._info.node_id, instance=self._info.instance)
            await self._stub().Deregister(request, timeout=_RPC_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            logger.info("router %s is away: %s", self._router, error.details())
