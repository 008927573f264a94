"""A rank that has met the others of its world, and makes groups with them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from common.distributed.communicator import (
    CommunicatorContext,
    DeviceCommunicator,
    make_communicator,
    rank_lost,
)
from common.distributed.group import CPU, GroupCoordinator


@dataclass(slots=True)
class DistributedEnvironment:
    """A rank that has met all others; it makes groups. Groups of the same ranks share their
    connections."""

    rank: int
    world_size: int
    device: torch.device
    timeout: float
    communicator: str
    store: Any = None  # torch's Store; None in a world of one
    hosts: tuple[str, ...] = ("",)
    address: str = "127.0.0.1"
    _made: dict[tuple[int, ...], dict[str, DeviceCommunicator]] = field(default_factory=dict)

    def group(self, name: str, ranks: Sequence[int]) -> GroupCoordinator:
        """The group of `ranks`, which holds this one; all of them must call.

        Raises:
            NodeError: RANK_LOST, they did not all come in time.
        """
        members = tuple(ranks)
        if len(members) > 1 and members not in self._made:
            with _meeting():
                self._made[members] = self._connect(name, members)
        connections = self._made.get(members, {})
        rank = members.index(self.rank)
        return GroupCoordinator(name, members, rank, connections, self.device)

    def _connect(self, name: str, members: tuple[int, ...]) -> dict[str, DeviceCommunicator]:
        """What is not on the group's device (counts, outlines) goes over the CPU."""
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
            address=self.address,
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
    """Blocks until all ranks have met at `init_method` ("file:///new/path", or "tcp://host:port"
    of rank 0's host); a world of one needs none. `timeout` is in seconds and holds for every
    later collective too. `communicator` is --device-communicator.

    Raises:
        NodeError: RANK_LOST, not all of them came in time.
    """
    environment = DistributedEnvironment(rank, world_size, device, timeout, communicator)
    if world_size == 1:
        return environment
    with _meeting():
        waits = timedelta(seconds=timeout)
        store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=waits))
        store.set_timeout(waits)  # a file's does not take it from the rendezvous
        store.set(f"host {rank}", host_identity())
        hosts = [store.get(f"host {peer}").decode() for peer in range(world_size)]
        environment.store, environment.hosts = store, tuple(hosts)
        environment.address = _address_towards(init_method)
    return environment


def host_identity() -> str:
    """Equal for two processes exactly where they share memory, loopback and abstract sockets: the
    same running kernel and the same network namespace."""
    if not os.path.exists("/proc/self/ns/net"):
        return socket.gethostname()
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def _address_towards(init_method: str) -> str:
    """This host's address on the way to the meeting point. (Connecting a datagram socket sends
    nothing; it asks the routing table.)"""
    place = urlsplit(init_method)
    if place.scheme != "tcp" or place.hostname is None:
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(
        place.hostname, place.port or 1, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextmanager
def _meeting() -> Iterator[None]:
    """torch reports who did not come as a RuntimeError (DistError is one)."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise rank_lost(f"the ranks could not meet: {reason}") from error
