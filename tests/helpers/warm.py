"""A cluster of nodes that start quickly and may be killed, frozen and cut off."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from benchmarks import hosts, warm_ranks
from benchmarks.fleet import FAST, Fleet
from benchmarks.warm_start import WarmStart
from cluster import DEFAULTS, START_TIMEOUT, Service
from paths import EXAMPLE, HELPERS, ROOT

# The processes find here connectors that tests name as module:Class, and this checkout's code,
# whatever is installed.
IMPORTS = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS, EXAMPLE / "src")))}

# Many tests rely on the node that an idle cluster chooses, independent of measured rates.
SPREADING = {"prefill_policy": "least-load", "decode_policy": "least-load"}
# Seconds of silence, of nodes and of transfers, times `slowness`.
HASTY = {"heartbeat_timeout": FAST["heartbeat_timeout"], "kv_lease": 3.0}
PATIENT = {"heartbeat_timeout": 10.0, "kv_lease": 15.0}
WORK = 0.2  # seconds of CPU
BESIDE_OTHERS = 3.0  # factor for tests that run beside others


@cache
def shared() -> WarmStart:
    """Returns the WarmStart that all processes of this run share."""
    warm = WarmStart(IMPORTS, os.environ.get("TEST_RUN"))
    atexit.register(warm.close)
    return warm


@cache
def slowness() -> float:
    """Returns how many times slower this machine is than two cores that only run the suite, at
    least 1. Time-outs that distinguish dead from slow nodes grow with it."""
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < WORK:
        pass
    return max(1.0, (time.monotonic() - began) / WORK / BESIDE_OTHERS)


def run_roles(
    folder: Path, commands: Sequence[Sequence[str]], patience: float = 2 * START_TIMEOUT
) -> list[tuple[int, str]]:
    """Runs roles that end by themselves, concurrently; returns exit code and output of each. A
    command is a role (as in `WarmStart.start`) and its flags. Each log stays in `folder`."""
    logs = [folder / f"role-{number}.log" for number in range(len(commands))]
    pids = [
        shared().start(role, flags, log) for (role, *flags), log in zip(commands, logs, strict=True)
    ]
    deadline = time.monotonic() + patience
    while None in (codes := [shared().exit_code(pid) for pid in pids]):
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.02)
    return [(code or 0, log.read_text()) for code, log in zip(codes, logs, strict=True)]


def ranks_of(pid: int) -> list[psutil.Process]:
    """Returns the rank processes of a warm node, in order."""
    children = psutil.Process(pid).children()
    return [child for child in children if child.name() != warm_ranks.NAME]


@contextmanager
def suspended(*ranks: psutil.Process) -> Iterator[None]:
    """Suspends the ranks, like a host that swaps."""
    for rank in ranks:
        rank.suspend()
    try:
        yield
    finally:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):  # its node has ended it
                rank.resume()


@contextmanager
def networked(
    model: str, router: dict[str, Any], **options: Any
) -> Iterator[tuple[hosts.Network, WarmCluster]]:
    """Yields a network whose router's host this thread is on."""
    shared()  # a fork is in its parent's network namespace
    with hosts.network() as network:
        router = {"host": "0.0.0.0", **router}
        before = network.enter_router
        with WarmCluster(model, 0, 0, router, before, hasty=True, **options) as cluster:
            yield network, cluster


class WarmCluster(Fleet, Service):
    """Router and nodes as processes, by name: `router`, `prefill-1` …"""

    def __init__(
        self,
        model: str | Path,
        prefill: int = 1,
        decode: int = 1,
        router: dict[str, Any] | None = None,
        before: Sequence[str] = (),
        hasty: bool = False,
        **options: Any,
    ) -> None:
        """`before`: a function that routers call first, as in `WarmStart.start`. `hasty`: peers
        that are silent are soon given up, for tests in which nodes freeze or are cut off; otherwise
        only dead ones are, so that slow nodes are not lost."""
        Service.__init__(self, model)
        environment = {**self.home.environment, **IMPORTS}
        late = HASTY if hasty else PATIENT
        lease = late["kv_lease"] * slowness()
        heartbeats = {"heartbeat_timeout": late["heartbeat_timeout"] * slowness()}
        options = {**DEFAULTS, "kv_lease": lease, **options}
        router = {**heartbeats, "queue_timeout": 60.0, **SPREADING, **(router or {})}
        Fleet.__init__(self, self.model, self.log_path, environment, router, shared(), **options)
        self._before, self._holds = before, count()
        self._sizes = {"prefill": prefill, "decode": decode}

    def __enter__(self) -> WarmCluster:
        try:
            for name in self.routers:
                self.start_router(self._before, name)
            for role, size in self._sizes.items():
                for _ in range(size):
                    self.start_node(role)
            self.wait_nodes()
        except BaseException:
            self.__exit__(None, AssertionError(), None)
            raise
        return self

    def at(self, router: str) -> WarmCluster:
        """Returns the same cluster, accessed through another router."""
        other = copy(self)
        other.ports = self.routers[router]
        return other

    def start_held(self, role: str, **options: Any) -> str:
        """Starts a node of one rank whose steps wait within `standing_still(role)`."""
        return self.start_node(role, ("mortal:hold", str(self.hold(role))), **options)

    def hold(self, what: str) -> Path:
        """Returns the file that exists within `standing_still(what)`."""
        return self.home.path / f"hold-{what}"

    def let(self, what: str, steps: int) -> None:
        """Lets `steps` more steps begin within `standing_still(what)`."""
        new = self.home.path / "hold-new"
        new.write_text(f"{next(self._holds)} {steps}")
        new.replace(self.hold(what))

    @contextmanager
    def standing_still(self, what: str, steps: int = 0) -> Iterator[None]:
        """Holds whatever waits for `hold(what)`, after `steps` steps have begun, until the block
        ends."""
        self.let(what, steps)
        try:
            yield
        finally:
            self.hold(what).unlink()

    def wait_nodes(self) -> None:
        """Waits until every started node that was not ended is ready. A process that ends by itself
        fails the test immediately."""

        def ready() -> bool:
            ended = self.pids.keys() - self.running()
            assert not ended, f"{sorted(ended)} ended\n{self.log()[-6000:]}"
            return self.all_ready()

        self.wait_for(ready, START_TIMEOUT)

    def busy(self, role: str) -> str:
        """Waits for a node of the role with a request; returns its name."""

        def find() -> str | None:
            nodes = (node for node in self.state()["nodes"] if node["role"] == role)
            names = [node["name"] for node in nodes if node["in_flight"]]
            return next((name for name in names if name in self.pids), None)

        return str(self.wait_for(find))
