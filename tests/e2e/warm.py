"""A cluster of many nodes that start in a moment and may be killed, stopped and cut off."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.warm_start import WarmStart, alive
from cluster import DEFAULTS, START_TIMEOUT, Service, flags, free_port

FAST = {"heartbeat_interval": 0.2, "heartbeat_timeout": 1.5, "queue_timeout": 30}


class WarmCluster(Service):
    """Router and nodes, each a process of its own, by name: `router`, `prefill-1` …"""

    def __init__(
        self,
        model: str | Path,
        prefill: int = 1,
        decode: int = 1,
        router: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model)
        self.pids: dict[str, int] = {}
        self._warm = WarmStart(
            {"TMPDIR": str(self.home.tmp), "PYTHONPATH": str(Path(__file__).parent)}
        )
        self._options = {"kv_lease": 3, **DEFAULTS, **options}
        self._numbers = itertools.count(1)
        self._by_address: dict[str, str] = {}
        self.ports = {"http": free_port(), "grpc": free_port()}
        self._router = {"port": self.ports["http"], "grpc_port": self.ports["grpc"], **FAST}
        self._router |= router or {}
        self._sizes = {"prefill": prefill, "decode": decode}

    def __enter__(self) -> WarmCluster:
        try:
            self.start_router()
            for role, size in self._sizes.items():
                for _ in range(size):
                    self.start_node(role)
            self.wait_nodes()
        except BaseException:
            self.__exit__(None, AssertionError(), None)
            raise
        return self

    def start_router(self) -> None:
        options = {"model": self.model, **self._router}
        self.pids["router"] = self._warm.start("router", flags(options), self.log_path)

    def start_node(self, role: str, before: Sequence[str] = (), **options: Any) -> str:
        """Returns its name; `before` as in `WarmStart.start`."""
        name, port = f"{role}-{next(self._numbers)}", free_port()
        options = {"model": self.model, "router": self.grpc, **self._options, **options}
        options["grpc_port"] = port
        command = (f"{role}_node", flags(options), self.log_path, before)
        self.pids[name] = self._warm.start(*command)
        self._by_address[f"127.0.0.1:{port}"] = name
        return name

    def names(self, role: str) -> list[str]:
        return [name for name in self.pids if name.startswith(role)]

    def wait_nodes(self) -> None:
        """Until every node that was started and not killed is ready."""

        def ready() -> bool:
            states = {self._by_address[n["address"]]: n["state"] for n in self.nodes()}
            return all(states.get(name) == "ready" for name in self.pids if name != "router")

        self.wait_for(ready, START_TIMEOUT)

    def send(self, name: str, number: int) -> None:
        os.kill(self.pids[name], number)

    def kill(self, name: str) -> None:
        """SIGKILL, and waits until it is gone."""
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        while alive(pid):
            time.sleep(0.002)

    def busy(self, role: str) -> str:
        """The node of a role with a request of the router on it."""

        def find() -> str | None:
            names = [self._by_address[n["address"]] for n in self.nodes(role) if n["in_flight"]]
            return next((name for name in names if name in self.pids), None)

        return str(self.wait_for(find))

    def stop(self, number: int = signal.SIGTERM) -> dict[str, int]:
        for pid in filter(alive, self.pids.values()):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, number)
        deadline = time.monotonic() + 20
        while any(map(alive, self.pids.values())) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._warm.close()
        return {}
