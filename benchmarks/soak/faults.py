"""What goes wrong, and when: a plan that a seed determines, carried out on a fleet."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from benchmarks.fleet import Fleet

ROLES = ("prefill", "decode")
DRAIN_TIMEOUT = 90.0  # seconds after which a node that drains is given up
READY_TIMEOUT = 60.0  # seconds after which a node that should serve is given up


@dataclass(frozen=True, slots=True)
class Fault:
    at: float  # seconds from the start
    kind: str  # a key of KINDS
    role: str
    which: float  # of the role's nodes that are well, as a share: [0, 1)
    seconds: float  # how long it lasts


def make_plan(
    kinds: Sequence[str], seconds: float, period: float, longest: float, seed: int
) -> list[Fault]:
    """Faults with random gaps of `period` seconds on average, each lasting up to `longest`."""
    rng = random.Random(seed)
    plan: list[Fault] = []
    at = rng.expovariate(1 / period)
    while at < seconds:
        kind, role = rng.choice(list(kinds)), rng.choice(ROLES)
        plan.append(Fault(at, kind, role, rng.random(), rng.uniform(0.1, longest)))
        at += rng.expovariate(1 / period)
    return plan


class Faults:
    """`counts` says what was done, by kind and role. A role with several nodes keeps one that
    is well: a fault that finds no other is left out."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._well = {*fleet.names("prefill"), *fleet.names("decode")}
        self.counts: Counter[tuple[str, str]] = Counter()

    async def carry_out(self, plan: Sequence[Fault]) -> None:
        """Returns when the last fault is over and every node is ready again."""
        start = monotonic()
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(start + fault.at - monotonic())
                well = sorted(name for name in self._well if name.startswith(fault.role))
                if len(well) > 1 or len(self._fleet.names(fault.role)) == 1 == len(well):
                    name = well[int(fault.which * len(well))]
                    group.create_task(self._strike(fault, name))

    async def _strike(self, fault: Fault, name: str) -> None:
        self.counts[fault.kind, fault.role] += 1
        self._well.discard(name)
        self._well.add(await KINDS[fault.kind](self._fleet, name, fault.seconds))


# ---- the kinds: each returns the name of the node that is well again, or new ----


async def kill(fleet: Fleet, name: str, seconds: float) -> str:
    """SIGKILL; another one starts later."""
    fleet.kill(name)
    await asyncio.sleep(seconds)
    return await start_another(fleet, name)


async def stop(fleet: Fleet, name: str, seconds: float) -> str:
    """SIGSTOP, then SIGCONT: others may have given it up, but it does not know."""
    fleet.send(name, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    fleet.send(name, signal.SIGCONT)
    await ready(fleet, name)
    return name


async def restart(fleet: Fleet, name: str, seconds: float) -> str:
    """SIGTERM: it drains and ends, while another one is there already."""
    new = await start_another(fleet, name)
    pid = fleet.drain(name)
    async with asyncio.timeout(DRAIN_TIMEOUT):
        while await asyncio.to_thread(fleet.exit_code, pid) is None:
            await asyncio.sleep(0.1)
    return new


KINDS: dict[str, Callable[[Fleet, str, float], Awaitable[str]]] = {
    "kill": kill,
    "stop": stop,
    "restart": restart,
}


async def start_another(fleet: Fleet, name: str) -> str:
    new = await asyncio.to_thread(fleet.start_node, name.rpartition("-")[0])
    await ready(fleet, new)
    return new


async def ready(fleet: Fleet, name: str) -> None:
    """Waits until the router uses it. Raises TimeoutError."""
    async with asyncio.timeout(READY_TIMEOUT):
        while name not in await asyncio.to_thread(fleet.ready):
            await asyncio.sleep(0.1)
