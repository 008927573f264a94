"""A cluster of many nodes that start in a moment and may be killed, stopped and cut off."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

# Where the processes find connectors that tests name as module:Class, and this checkout's code,
# whichever is installed.
IMPORTS = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS, EXAMPLE / "src")))}

# Many tests count on which node an idle cluster takes, which does not depend on measured rates.
SPREADING = {"prefill_policy": "least-load", "decode_policy": "least-load"}
# Seconds of silence, of nodes and of transfers, times `slowness`.
HASTY = {"heartbeat_timeout": FAST["heartbeat_timeout"], "kv_lease": 3.0}
PATIENT = {"heartbeat_timeout": 10.0, "kv_lease": 15.0}
WORK = 0.2  # seconds of CPU
BESIDE_OTHERS = 3.0  # what takes a second alone may take so many: other tests run, too


@cache
def shared() -> WarmStart:
    """One for all clusters of this run of pytest, whose workers share it."""
    warm = WarmStart(IMPORTS, os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    atexit.register(warm.close)
    return warm


@cache
def slowness() -> float:
    """How many times slower this machine is than two cores that run the suite and nothing else, 1
    at least. What tells a node that is gone from one that is late grows with it."""
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < WORK:
        pass
    return max(1.0, (time.monotonic() - began) / WORK / BESIDE_OTHERS)


def run_roles(
    folder: Path, commands: Sequence[Sequence[str]], patience: float = 2 * START_TIMEOUT
) -> list[tuple[int, str]]:
    """Exit code and output of roles that end by themselves, all run at once: each command is a
    role (as `WarmStart.start` has it) and its flags. A log of each is left in `folder`."""
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
    """The rank processes of a warm node, in order."""
    children = psutil.Process(pid).children()
    return [child for child in children if child.name() != warm_ranks.NAME]


@contextmanager
def suspended(*ranks: psutil.Process) -> Iterator[None]:
    """They do nothing, as on a host that swaps."""
    for rank in ranks:
        rank.suspend()
    try:
        yield
    finally:
        for rank in ranks:
            rank.resume()


@contextmanager
def networked(
    model: str, router: dict[str, Any], **options: Any
) -> Iterator[tuple[hosts.Network, WarmCluster]]:
    """A router on a host of its own, in which this thread is, too, and the network around it."""
    shared()  # a fork is where what it was forked from is
    with hosts.network() as network:
        router = {"host": "0.0.0.0", **router}
        before = network.enter_router
        with WarmCluster(model, 0, 0, router, before, hasty=True, **options) as cluster:
            yield network, cluster


class WarmCluster(Fleet, Service):
    """Router and nodes, each a process of its own, by name: `router`, `prefill-1` …"""

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
        """`before`: what the routers call first, as `WarmStart.start` has it. `hasty`: who says
        nothing is soon given up, for tests in which nodes freeze or are cut off; else only who is
        dead, so that none is lost because it is late."""
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
        """The same cluster, asked through another router."""
        other = copy(self)
        other.ports = self.routers[router]
        return other

    def start_held(self, role: str, **options: Any) -> str:
        """A node of one rank whose steps wait within `standing_still(role)`."""
        return self.start_node(role, ("mortal:hold", str(self.hold(role))), **options)

    def hold(self, what: str) -> Path:
        """The file that is there within `standing_still(what)`."""
        return self.home.path / f"hold-{what}"

    def let(self, what: str, steps: int) -> None:
        """Lets so many steps begin within `standing_still(what)`, no matter how many have begun."""
        new = self.home.path / "hold-new"
        new.write_text(f"{next(self._holds)} {steps}")
        new.replace(self.hold(what))

    @contextmanager
    def standing_still(self, what: str, steps: int = 0) -> Iterator[None]:
        """Holds up what waits for `hold(what)`, when so many `steps` have begun, until this is
        left."""
        self.let(what, steps)
        try:
            yield
        finally:
            self.hold(what).unlink()

    def wait_nodes(self) -> None:
        """Until every node that was started and not ended is ready. A process that ends by itself
        fails the test at once."""

        def ready() -> bool:
            ended = self.pids.keys() - self.running()
            assert not ended, f"{sorted(ended)} ended\n{self.log()[-6000:]}"
            return self.all_ready()

        self.wait_for(ready, START_TIMEOUT)

    def busy(self, role: str) -> str:
        """The node of a role with a request of the router on it."""

        def find() -> str | None:
            nodes = (node for node in self.state()["nodes"] if node["role"] == role)
            names = [node["name"] for node in nodes if node["in_flight"]]
            return next((name for name in names if name in self.pids), None)

        return str(self.wait_for(find))
