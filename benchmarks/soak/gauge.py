"""Samples memory and open descriptors of processes over time, and the lag of this event loop.

Connections that a client holds open do not count, since a dead router's load moves to the others
with its connections. Connections that the client has closed but the router has not do count.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean
from time import monotonic

import psutil

from benchmarks.fleet import Fleet

PERIOD = 1.0  # seconds between samples
TICK = 0.2  # seconds between measurements of the lag
WARM_UP = 5.0  # seconds after a process's start that do not count
LONG_ENOUGH = 30.0  # shortest time of a process in seconds to judge its growth
MB = 1 << 20
# The growth allowed from the first to the last third of a process's time.
MAY_GROW = {"rss_mb": (1.15, 48.0), "fds": (1.25, 16.0)}  # (factor, constant)


@dataclass(slots=True)
class Life:
    """The samples of one process."""

    role: str
    times: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    fds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Growth:
    """Means over the first and last third of the role's process that grew most."""

    first: float
    last: float
    most: float  # maximum over all processes of the role
    grown: bool


class Gauge:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lives: dict[int, Life] = {}
        self.late: list[float] = []  # lags of this event loop in seconds

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each) for each in (self._watch(), self._tick())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def _tick(self) -> None:
        while True:
            due = monotonic() + TICK
            await asyncio.sleep(TICK)
            self.late.append(max(0.0, monotonic() - due))

    async def _watch(self) -> None:
        while True:
            await asyncio.to_thread(self._sample)
            await asyncio.sleep(PERIOD)

    def _sample(self) -> None:
        for name, pid in list(self._fleet.pids.items()):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                rss, fds = process.memory_info().rss / MB, process.num_fds()
                if ports := self._fleet.routers.get(name):
                    fds = max(0, fds - held_by_clients(process, [ports["http"], ports["grpc"]]))
                role = name.partition("-")[0]
                life = self._lives.setdefault(pid, Life(role))
                life.times.append(monotonic())
                life.rss_mb.append(rss)
                life.fds.append(fds)

    def growth(
        self, crowded: Callable[[float], bool] = lambda at: False
    ) -> dict[str, dict[str, Growth]]:
        """Returns role → measure → growth, without roles whose processes all ended too early.
        Samples of crowded times count only for the maximum, since they show the crowd's
        connections."""
        roles: defaultdict[str, list[Life]] = defaultdict(list)
        for life in self._lives.values():
            if life.times and life.times[-1] - life.times[0] >= LONG_ENOUGH:
                roles[life.role].append(life)
        return {
            role: {measure: _worst(lives, measure, crowded) for measure in MAY_GROW}
            for role, lives in sorted(roles.items())
        }


def held_by_clients(process: psutil.Process, ports: Sequence[int]) -> int:
    """Counts the connections at these ports that neither end has closed."""
    return sum(
        each.status == psutil.CONN_ESTABLISHED and each.laddr.port in ports
        for each in process.net_connections("tcp")
    )


def _worst(lives: Sequence[Life], measure: str, crowded: Callable[[float], bool]) -> Growth:
    times, plus = MAY_GROW[measure]
    most = max(max(getattr(life, measure)) for life in lives)
    found = [_thirds(_calm(life, getattr(life, measure), crowded)) for life in lives]
    first, last = max(found, key=lambda pair: pair[1] - pair[0])
    return Growth(round(first, 1), round(last, 1), round(most, 1), last > first * times + plus)


def _calm(life: Life, values: list[float], crowded: Callable[[float], bool]) -> list[float]:
    warm_up = int(WARM_UP / PERIOD)
    pairs = zip(life.times[warm_up:], values[warm_up:], strict=True)
    return [value for at, value in pairs if not crowded(at)] or values[-1:]


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    third = max(1, len(values) // 3)
    return fmean(values[:third]), fmean(values[-third:])
