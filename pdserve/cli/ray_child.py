"""A process of a cluster on a host of a Ray cluster.

    RayChild, in `pdserve up`  ─▶  Seat, an actor in a bundle of a placement group  ─▶  the process

The process ends with its actor, and the actor with `up`. Ray finds the host and notices when it is
lost.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pdserve.cli.child import Child, ChildSpec, Write
from pdserve.common.obs.process import read_ports

# Placeholders in commands for values that only the process's host knows.
HOST, FOLDER = "{host}", "{folder}"
PORTS_FILE = f"{FOLDER}/ports.json"
MAX_LINES = 10_000  # lines of output that are buffered; older ones are dropped
PROBE = 0.1  # seconds between two checks for the ports file

Bundle = tuple[PlacementGroup, int]


class Seat:
    """The actor: runs one process on its host."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-")
        self._child: Child | None = None

    async def run(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> AsyncIterator[list[str] | int]:
        """Yields the process's output, some lines at a time, and at last its exit code."""
        lines: deque[str] = deque(maxlen=MAX_LINES)
        news = asyncio.Event()

        def write(_: str, line: str) -> None:
            lines.append(line)
            news.set()

        filled = [self._filled(each) for each in command[1:]]
        self._child = Child(ChildSpec(name, [sys.executable, *filled], environment), write)
        await self._child.start()
        ended = asyncio.create_task(self._child.wait())
        ended.add_done_callback(lambda _: news.set())
        while not ended.done() or lines:
            await news.wait()
            news.clear()
            if said := list(lines):
                lines.clear()
                yield said
            elif ended.done():
                break
        self._folder.cleanup()
        yield ended.result()

    def _filled(self, argument: str) -> str:
        here = ray.util.get_node_ip_address()
        return argument.replace(HOST, here).replace(FOLDER, self._folder.name)

    async def ports(self) -> tuple[str, dict[str, int]]:
        """Waits for a router's ports; returns (host, ports)."""
        while (found := read_ports(Path(self._filled(PORTS_FILE)))) is None:
            await asyncio.sleep(PROBE)
        return ray.util.get_node_ip_address(), found

    async def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()


class RayChild(Child):
    """Like `Child`, for a process in a bundle. `reserve` returns the bundle for each start, and
    `leave` takes it back."""

    def __init__(
        self,
        spec: ChildSpec,
        write: Write,
        reserve: Callable[[], Awaitable[Bundle]],
        leave: Callable[[Bundle], Awaitable[None]],
        share: Mapping[str, float],
    ) -> None:
        """`share`: the actor's resources within the bundle, as Ray's options."""
        super().__init__(spec, write)
        self._reserve = reserve
        self._leave = leave
        self._share = share
        self._actor: Any = None
        self._run: asyncio.Task[int] | None = None

    @property
    def running(self) -> bool:
        return self._run is not None and not self._run.done()

    async def start(self) -> None:
        """Starts the process; raises ConfigError if no host has room."""
        bundle = await self._reserve()
        group, index = bundle
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        kind: Any = ray.remote(Seat)
        self._actor = kind.options(scheduling_strategy=strategy, **self._share).remote()
        self._run = asyncio.create_task(self._follow(bundle))

    async def _follow(self, bundle: Bundle) -> int:
        """Forwards the process's output; returns its exit code."""
        spec, code = self.spec, -int(signal.SIGKILL)
        run = self._actor.run.options(num_returns="streaming")
        try:
            async for answer in run.remote(spec.name, [*spec.command], dict(spec.environment)):
                said = await answer
                if isinstance(said, int):
                    code = said
                else:
                    for line in said:
                        self.write(self.name, line)
        except RayError as error:
            why = str(error).splitlines()[-1].partition(" Some common causes")[0]
            self.write("up", f"{self.name}: its host or its actor was lost: {why}")
        finally:
            ray.kill(self._actor)
            await self._leave(bundle)
        return code

    async def wait(self) -> int:
        return 0 if self._run is None else await asyncio.shield(self._run)

    async def address(self) -> tuple[str, dict[str, int]]:
        """Waits for a starting router; returns (host, ports)."""
        host, ports = await self._actor.ports.remote()
        return host, ports

    def terminate(self) -> None:
        if self.running:
            self._actor.terminate.remote()

    def kill(self) -> None:
        if self.running:
            ray.kill(self._actor)
