"""Connects the ranks of a world, and creates groups of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from pdserve.common.core.host import host_identity, is_loopback
from pdserve.common.distributed.communicator import (
    CommunicatorContext,
    DeviceCommunicator,
    make_communicator,
    rank_lost,
)
from pdserve.common.distributed.group import CPU, GroupCoordinator

LOOPBACK = "127.0.0.1"
_FIRST_ATTEMPT = timedelta(seconds=1)
_ELSEWHERE = "udp://192.0.2.1"  # a documentation address, outside any network (RFC 5737)


@dataclass(slots=True)
class DistributedEnvironment:
    """A rank's connection to its world; creates groups. Groups of equal ranks share connections."""

    rank: int
    world_size: int
    device: torch.device
    timeout: float
    communicator: str
    store: Any = None  # torch's Store; None in a world of one
    hosts: tuple[str, ...] = ("",)
    address: str = LOOPBACK
    addresses: tuple[str, ...] = (LOOPBACK,)
    _made: dict[tuple[int, ...], dict[str, DeviceCommunicator]] = field(default_factory=dict)

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this host, including this one."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def is_first_of_host(self) -> bool:
        """Whether no rank before this one is on its host."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    @property
    def address_for_others(self) -> str:
        """This host's address for processes other than the ranks: the one towards the rendezvous;
        if that is loopback, the one of the default route; without a default route, as on an
        internal container network, the one of the host's name."""
        ways = (lambda: self.address, lambda: address_towards(_ELSEWHERE), address_of_name)
        return next((way for each in ways if not is_loopback(way := each())), LOOPBACK)

    def group(self, name: str, ranks: Sequence[int]) -> GroupCoordinator:
        """Returns the group of `ranks`, which include this one. All of them must call this.

        Raises:
            NodeError: RANK_LOST, not all ranks connected in time.
        """
        members = tuple(ranks)
        if len(members) > 1 and members not in self._made:
            with _rank_lost_errors():
                self._made[members] = self._connect(name, members)
        connections = self._made.get(members, {})
        rank = members.index(self.rank)
        return GroupCoordinator(name, members, rank, connections, self.device)

    def _connect(self, name: str, members: tuple[int, ...]) -> dict[str, DeviceCommunicator]:
        """Connects the group for its device and for the CPU (counts, metadata)."""
        devices = {device.type: device for device in (CPU, self.device)}
        return {
            kind: make_communicator(
                self.communicator if kind == self.device.type else "auto",
                self._context(f"{name} {members} {kind}", members, device),
            )
            for kind, device in devices.items()
        }

    def _context(
        self, name: str, members: tuple[int, ...], device: torch.device
    ) -> CommunicatorContext:
        return CommunicatorContext(
            name=name,
            ranks=members,
            rank=members.index(self.rank),
            hosts=tuple(self.hosts[rank] for rank in members),
            addresses=tuple(self.addresses[rank] for rank in members),
            device=device,
            store=dist.PrefixStore(name, self.store),
            timeout=self.timeout,
        )


def init_distributed_environment(
    rank: int,
    world_size: int,
    init_method: str = "",
    device: torch.device = CPU,
    timeout: float = 30.0,
    communicator: str = "auto",
) -> DistributedEnvironment:
    """Blocks until all ranks have met at `init_method` ("file:///new/path", "tcp://host:port" of
    rank 0's host, or a `Rendezvous`'s); a world of one needs none. `timeout`: seconds, also for
    every later collective. `communicator`: --device-communicator.

    Raises:
        NodeError: RANK_LOST, not all ranks connected in time.
    """
    environment = DistributedEnvironment(rank, world_size, device, timeout, communicator)
    environment.address = address_towards(init_method)
    if world_size == 1:
        return environment
    with _rank_lost_errors():
        waits = timedelta(seconds=timeout)
        store = _join_store(init_method, rank, world_size, waits)
        store.set_timeout(waits)  # a FileStore does not get it from the rendezvous
        store.set(f"host {rank}", f"{host_identity()} {environment.address}")
        hosts = [store.get(f"host {peer}").decode().split(" ") for peer in range(world_size)]
        environment.store = store
        environment.hosts, environment.addresses = zip(*hosts, strict=True)
    return environment


class Rendezvous:
    """A store on a free port of this host through which ranks connect; it lives as long as this
    object. It is not authenticated, like all communication of torch's ranks.

    Raises:
        OSError: `address` is not this host's.
    """

    def __init__(self, address: str) -> None:
        self._store = _retry(partial(_serve_store, address), timedelta(seconds=30))
        self.init_method = f"store://{address}:{self._store.port}"


def _serve_store(address: str, timeout: timedelta) -> dist.TCPStore:
    listener = socket.create_server((address, 0))
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns it now
    )


def _join_store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    parsed = urlsplit(init_method)
    if parsed.scheme != "store":
        return next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))[0]
    host, port = parsed.hostname or "", parsed.port or 0
    client = partial(dist.TCPStore, host, port, wait_for_workers=False)
    return _retry(lambda attempt: client(timeout=attempt), timeout)


def _retry(connect: Callable[[timedelta], dist.TCPStore], timeout: timedelta) -> dist.TCPStore:
    """Connects to torch's store with several attempts, the first a short one, because a connection
    sometimes hangs (torch 2.13: one in fifty, on loopback)."""
    deadline = time.monotonic() + timeout.total_seconds()
    attempt_limit = _FIRST_ATTEMPT
    while True:
        try:
            return connect(min(attempt_limit, timeout))
        except dist.DistNetworkError:
            if time.monotonic() > deadline:
                raise
            attempt_limit *= 2


def address_towards(url: str) -> str:
    """Returns this host's address on the route to `url`; loopback if it has no host or no route.
    (Connecting a datagram socket sends nothing; it only looks up the route.)"""
    parsed = urlsplit(url)
    if parsed.hostname is None:
        return LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            parsed.hostname, parsed.port or 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


def address_of_name() -> str:
    """Returns the address of this host's name; loopback if it does not resolve."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    except OSError:
        return LOOPBACK


@contextmanager
def _rank_lost_errors() -> Iterator[None]:
    """Turns torch's errors about missing ranks (RuntimeError, of which DistError is one) into
    RANK_LOST."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise rank_lost(f"the ranks could not meet: {reason}") from error
