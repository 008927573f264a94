"""A fleet on a network that can be cut, with relays on its edges: every node runs on its own host,
the router on this thread's. Linux, root only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fleet import Fleet, free_port
from benchmarks.hosts import ROUTER, Network, front, network
from benchmarks.relay import Relays
from benchmarks.warm_start import alive
from pdserve.cli import certs

MAX_HOSTS = 64  # hosts in the certificate: most nodes at a time


class Site(Fleet):
    """Nodes announce their relay's address; the KV data plane has no relay."""

    def __init__(self, network: Network, relays: Relays, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._network = network
        self._relays = relays
        self._router["host"] = "0.0.0.0"
        self._hosts: dict[str, str] = {"router": ROUTER}  # process name → host
        self._tenants: dict[str, int] = {}  # host → pid
        self._lock = threading.Lock()

    def start_node(self, role: str, before: Sequence[str] = (), **options: Any) -> str:
        with self._lock:
            host = self._free_host()
            ports = {"grpc_port": free_port(), "metrics_port": free_port()}
            self._relays.add(self._network.pid(host), front(host), host, [*ports.values()])
            places = {"host": host, "advertise_host": front(host), "kv_host": host, **ports}
            places |= {"router": self.registries(ROUTER)}
            enter = ("benchmarks.hosts:enter", str(self._network.pid(host)), *before)
            name = super().start_node(role, enter, **places, **options)
            self._hosts[name], self._tenants[host] = host, self.pids[name]
        return name

    def _free_host(self) -> str:
        """Returns a host whose node has ended, or a new one."""
        for host, pid in self._tenants.items():
            if not alive(pid):
                return host
        return self._network.add()[0]

    def drop(self, source: str, target: str, dropped: bool = True) -> None:
        """Drops, or no longer drops, traffic from one named process to another."""
        self._network.drop(self._hosts[source], self._hosts[target], dropped)

    def spoil(self, source: str, target: str, mode: str) -> None:
        """Sets an edge's mode (`Relays.set`); `target` is the server."""
        self._relays.set(self._hosts[source], front(self._hosts[target]), mode)


def make_certs(folder: Path) -> dict[str, Any]:
    """Makes certificates; returns the options of the router and of every node, which then reject
    data that is changed on the way. A client's files are in the same folder."""
    hosts = (f"10.77.0.{number}" for number in range(1, MAX_HOSTS))
    names = [name for host in hosts for name in (host, front(host))]
    certs.write(folder, [*certs.HOSTS, *names], client=True)
    files = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}
    return {option: folder / name for option, name in files.items()}


@contextmanager
def site_network() -> Iterator[tuple[Network, Relays]]:
    """Yields a network and its relays; this thread is on the router's host meanwhile."""
    with network() as made:
        relays = Relays()
        try:
            yield made, relays
        finally:
            relays.close()
