"""Routers and their nodes on this host, each a process that may be killed, frozen, drained and
replaced while the others serve."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.access import Access, measured
from benchmarks.warm_start import WarmStart, alive
from pdserve.common.config.node import TransferConfig

FAST = {"heartbeat_interval": 0.2, "heartbeat_timeout": 1.5, "queue_timeout": 30}
START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 20.0
PORTS = ("http", "grpc", "registry")  # of a router
SHARES = 16  # processes per host that draw from different ports
TRANSFER = {each.name for each in fields(TransferConfig)}
BUSY = ("num_requests_running", "num_requests_waiting", "num_requests_remote")


class Fleet(Access):
    """Processes by name: `router`, `router-2`, `prefill-1`, `decode-2` … `router` and `options`:
    flags of every router and of every node, without dashes, such as `kv_lease=3`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        environment: Mapping[str, str],
        router: Mapping[str, Any] | None = None,
        warm: WarmStart | None = None,
        routers: int = 1,
        **options: Any,
    ) -> None:
        """`warm`: its owner closes it; without it the fleet makes and closes its own."""
        names = ["router", *(f"router-{number}" for number in range(2, routers + 1))]
        ports = {name: {port: free_port() for port in PORTS} for name in names}
        super().__init__(ports, {**FAST, **(router or {})})
        self.model = model
        self.log_path = log
        self.drained: list[int] = []  # pids of the processes that are draining
        self._options = {"kv_lease": 3, **options}
        self._numbers = itertools.count(1)
        self._environment = environment
        self._warm = warm or WarmStart(environment)
        self._shared = warm is not None

    # ---- processes --------------------------------------------------------------------------

    def start_router(self, before: Sequence[str] = (), name: str = "router") -> None:
        """Starts a router; `before`: as in `WarmStart.start`."""
        ports = self.routers[name]
        options: dict[str, Any] = {"port": ports["http"], "grpc_port": ports["grpc"]}
        options = {"registry_port": ports["registry"], **options, **self._router}
        options = {"model": self.model, **options}
        self.pids[name] = self._start("router", flags(options), before)

    def start_node(self, role: str, before: Sequence[str] = (), **options: Any) -> str:
        """Starts a node and returns its name; `before`: as in `WarmStart.start`."""
        name, port = f"{role}-{next(self._numbers)}", options.pop("grpc_port", 0) or free_port()
        options = {"model": self.model, "router": self.registries(), **self._options, **options}
        options["grpc_port"] = port
        if role == "both":  # it takes no options of the KV transfer
            options = {key: value for key, value in options.items() if key not in TRANSFER}
        self.pids[name] = self._start(f"{role}_node", flags(options), before)
        host = options.get("advertise_host") or options.get("host", "127.0.0.1")
        self._by_address[f"{host}:{port}"] = name
        return name

    def _start(self, role: str, flags: list[str], before: Sequence[str] = ()) -> int:
        return self._warm.start(role, flags, self.log_path, before, self._environment)

    def send(self, name: str, number: int) -> None:
        os.kill(self.pids[name], number)

    def kill(self, name: str) -> None:
        """Sends SIGKILL and waits for the end of the process."""
        pid = self.pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        while alive(pid):
            time.sleep(0.002)

    def drain(self, name: str) -> int:
        """Sends SIGTERM, after which the process drains and ends; returns its pid."""
        self.drained.append(self.pids.pop(name))
        os.kill(self.drained[-1], signal.SIGTERM)
        return self.drained[-1]

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code; None: it is running."""
        return self._warm.exit_code(pid)

    def stop(self, number: int = signal.SIGTERM) -> dict[str, int]:
        """Ends all processes; returns name → exit code of those that should have been running."""
        running = [p for p in (*self.pids.values(), *self.drained) if self.exit_code(p) is None]
        for pid in filter(alive, running):
            with suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT
        while any(map(alive, running)) and time.monotonic() < deadline:
            time.sleep(0.01)
        codes = {name: self.exit_code(pid) for name, pid in self.pids.items()}
        for pid in filter(alive, running):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self._shared:
            self._warm.close()
        return {name: -signal.SIGKILL if code is None else code for name, code in codes.items()}

    def names(self, role: str) -> list[str]:
        return [name for name in self.pids if name.startswith(role)]

    # ---- state ------------------------------------------------------------------------------

    def ready(self) -> set[str]:
        """Returns the nodes that are registered at every running router, also those that fit no
        other node; none while a router is starting."""
        found: list[set[str]] = []
        for router in self.routers.keys() & self.pids.keys():
            try:
                nodes = self.state(router)["nodes"]
            except OSError:
                return set()
            found.append({n["name"] for n in nodes if n["state"] in ("ready", "unpaired")})
        return set.intersection(*found) if found else set()

    def all_ready(self) -> bool:
        """Whether every node that should run is ready."""
        return self.ready() >= self.pids.keys() - self.routers.keys()

    def wait_ready(self) -> None:
        """Waits until every node is ready. Raises TimeoutError, Refused."""
        deadline = time.monotonic() + START_TIMEOUT
        while not self.all_ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready: {self.log_path.read_text()[-2000:]}")
            time.sleep(0.02)

    def print_stacks(self) -> None:
        """Has every serving process write its stacks to the log."""
        if ready := self.ready():  # the signal would kill a process that has just started
            for name in (ready | self.routers.keys()) & self.pids.keys():
                self.send(name, signal.SIGUSR1)

    def note(self, words: str) -> None:
        """Writes a line of this program to the log of the processes."""
        now = datetime.now(UTC).strftime("%H:%M:%S.%f")[:-3]
        with self.log_path.open("a") as log:
            log.write(f"{now} NOTE    soak - {words}\n")

    def running(self) -> set[str]:
        """Returns the names of the processes that should run and do."""
        return {name for name, pid in list(self.pids.items()) if self.exit_code(pid) is None}

    def bury(self) -> list[str]:
        """Returns nodes that ended by themselves, and removes them from those that should run."""
        nodes = [(name, pid) for name, pid in list(self.pids.items()) if name not in self.routers]
        ended = [name for name, pid in nodes if self.exit_code(pid) is not None]
        # A node that is missing by now was ended on purpose.
        return [name for name in ended if self.pids.pop(name, None) is not None]

    def crashed(self) -> list[str]:
        """Returns processes that ended by themselves, or did not drain properly."""
        ended = [name for name, pid in self.pids.items() if self.exit_code(pid) is not None]
        return ended + [f"pid {pid}" for pid in self.drained if self.exit_code(pid)]

    def held(self) -> dict[str, int]:
        """Returns node → what it still holds: KV blocks, else requests."""
        running = self.running()
        router = next(name for name in self.routers if name in running)
        nodes = [node for node in self.state(router)["nodes"] if node["name"] in running]
        held = {node["name"]: _held(node["metrics_address"]) for node in nodes}
        return {name: count for name, count in held.items() if count}


def _held(address: str) -> int:
    values = measured(address)
    blocks = values["kv_blocks"] - values["kv_blocks_free"]
    return int(blocks or sum(values[name] for name in BUSY))


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a free port below the kernel's ephemeral range, so that no other process gets it by
    chance. Processes of one host draw from different ports, and a process reuses a port only after
    it has drawn all of them, so a dead process's port is not reused soon."""
    while True:
        port = next(_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port


def _all_ports() -> Iterator[int]:
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    highest = int(handed_out[0]) - 1
    with socket.socket(socket.AF_UNIX) as lock:
        mine = range(highest - _share(lock), max(1024, highest - 16_000), -SHARES)
        start = secrets.randbelow(len(mine))
        yield from itertools.cycle([*mine[start:], *mine[:start]])


def _share(lock: socket.socket) -> int:
    """Returns a number that no other process uses while this one keeps `lock` open; any number if
    all are taken. The lock is a name in the abstract namespace, which, like ports, belongs to the
    network namespace and ends with the process."""
    for share in range(SHARES):
        with suppress(OSError):
            lock.bind(f"\0pdserve-test-ports-{share}")
            return share
    return os.getpid() % SHARES


_ports = _all_ports()


def _draw_anew() -> None:
    """Gives a forked process ports of its own."""
    global _ports
    _ports = _all_ports()


os.register_at_fork(after_in_child=_draw_anew)


def flags(options: Mapping[str, Any]) -> list[str]:
    """Returns the flags of a command line; an empty value means a switch."""
    return [
        part
        for name, value in options.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
        if part
    ]
