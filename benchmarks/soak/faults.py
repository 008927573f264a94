"""The fault plan, determined by a seed, and its execution on a fleet."""

from __future__ import annotations

import asyncio
import math
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from time import monotonic

from benchmarks.fleet import Fleet
from benchmarks.soak.attack import GONE, UNEXPLAINED, Fault, NotNow, Patience
from benchmarks.soak.attackers import ATTACKS, Attackers

ROLES = ("prefill", "decode")
ATTACKED = ("client", "registry")  # targets of hostile clients and of strangers
DRAIN_TIMEOUT = 90.0  # seconds after which a node that drains is given up
READY_TIMEOUT = 180.0  # seconds after which a node that should serve is given up
NURSE_PERIOD = 0.5  # seconds between looks after nodes that have ended by themselves
ROUTER_AWAY = 1.0  # seconds at most
CROWD_SETTLES = 3.0  # seconds until a server has closed the connections of a crowd that has left
SETTLE = 2.0  # seconds after a router's return in which clients may still learn of its end


class Gone(Exception):
    """A node ended without a request to end."""


@dataclass(frozen=True, slots=True)
class Kind:
    strike: Callable[[Faults, Fault], Awaitable[None]]  # raises NotNow
    targets: tuple[str, ...] = ROLES
    longest: float | None = None  # longest duration in seconds, if not the plan's
    weight: float = 1.0  # relative frequency


def targets_of(fleet: Fleet, kinds: dict[str, Kind]) -> dict[str, Kind]:
    """Returns the kinds; if the fleet has nodes of both roles, node faults also hit these."""
    more = ("both",) if fleet.names("both") else ()
    return {
        name: replace(kind, targets=(*ROLES, *more)) if kind.targets == ROLES else kind
        for name, kind in kinds.items()
    }


def make_plan(
    kinds: dict[str, Kind], seconds: float, period: float, longest: float, seed: int
) -> list[Fault]:
    """Returns faults at random intervals of `period` seconds on average, up to `longest` each."""
    rng = random.Random(seed)
    plan: list[Fault] = []
    weights = [kind.weight for kind in kinds.values()]
    at = rng.expovariate(1 / period)
    while at < seconds:
        [name] = rng.choices(list(kinds), weights)
        bound = rng.choice((longest, kinds[name].longest or longest))
        target = rng.choice(kinds[name].targets)
        plan.append(Fault(at, name, target, rng.uniform(0.1, bound), rng.getrandbits(32)))
        at += rng.expovariate(1 / period)
    return plan


class Spans:
    """Time spans, on the clock `time.monotonic`."""

    def __init__(self, settle: float = 0.0) -> None:
        """Extends each span by `settle` seconds."""
        self._settle = settle
        self._spans: list[tuple[float, float]] = []

    @contextmanager
    def lasting(self) -> Iterator[None]:
        number, since = len(self._spans), monotonic()
        self._spans.append((since, math.inf))
        try:
            yield
        finally:
            self._spans[number] = (since, monotonic() + self._settle)

    def ended_since(self, since: float) -> bool:
        """Returns whether a span ended after `since`, or has not ended."""
        return any(end > since for _, end in self._spans)

    def meet(self, since: float, until: float) -> bool:
        return any(start < until and end > since for start, end in self._spans)

    def seconds(self, since: float, until: float) -> float:
        """Returns the seconds between the two times that spans cover."""
        return sum(max(0.0, min(until, end) - max(since, start)) for start, end in self._spans)


class Faults:
    """Executes the plan. `counts`: faults by kind and target. `answers`: outcomes of hostile
    clients' attacks by kind. At least one node per role, and one of several routers, stays healthy:
    a fault without another target is skipped."""

    def __init__(self, fleet: Fleet, patience: Patience | None = None) -> None:
        """`patience`: with hostile clients' requests."""
        self.fleet = fleet
        self.attackers = Attackers(fleet, patience)
        self.well = {*fleet.pids}
        self.counts: Counter[tuple[str, str]] = Counter()
        self.answers: Counter[tuple[str, str]] = Counter()
        self.waits: defaultdict[str, list[float]] = defaultdict(list)  # their seconds, by kind
        self.hung: list[str] = []  # requests of theirs, described
        self.crashed: list[str] = []  # what should run and did not, in words
        self.busy: set[tuple[str, str]] = set()  # edges between nodes that are bad now, and attacks
        self.router_dead = {name: Spans(SETTLE) for name in fleet.routers}
        self.router_frozen = {name: Spans() for name in fleet.routers}
        self.greed = Spans()
        self.crowds = Spans(CROWD_SETTLES)  # spans in which thousands of calls or connections exist

    async def carry_out(self, kinds: dict[str, Kind], plan: Sequence[Fault]) -> None:
        """Executes the plan; returns when the last fault is over and every node is ready."""
        start, nurse = monotonic(), asyncio.create_task(self._nurse())
        async with asyncio.TaskGroup() as group:
            for fault in plan:
                await asyncio.sleep(start + fault.at - monotonic())
                group.create_task(self._strike(kinds[fault.kind], fault))
        nurse.cancel()

    async def _strike(self, kind: Kind, fault: Fault) -> None:
        name = f"{fault.kind} {fault.target} ({fault.seconds:.1f} s)"
        self.fleet.note(f"{name} begins")
        try:
            with self._alone(fault):
                await kind.strike(self, fault)
        except NotNow:
            self.fleet.note(f"{name} is skipped")
            return
        except Gone:
            pass  # `_nurse` reports it
        except TimeoutError as error:
            self.crashed.append(f"{fault.kind} {fault.target}: {error}")
        self.counts[fault.kind, fault.target] += 1
        self.fleet.note(f"{name} is over")

    @contextmanager
    def _alone(self, fault: Fault) -> Iterator[None]:
        """On a full machine attacks last for minutes. Raises NotNow: the last one of this kind goes
        on; they would pile up."""
        attack = (fault.kind, fault.target)
        if fault.target not in ATTACKED:
            yield
            return
        if attack in self.busy:
            raise NotNow
        self.busy.add(attack)
        try:
            yield
        finally:
            self.busy.discard(attack)

    async def _nurse(self) -> None:
        """Replaces each node that ends by itself."""
        while True:
            for name in await asyncio.to_thread(self.fleet.bury):
                self.crashed.append(name)
                self.well.discard(name)
                with suppress(Gone):
                    self.well.add(await start_another(self.fleet, name))
            await asyncio.sleep(NURSE_PERIOD)

    def take(self, role: str, rng: random.Random) -> str:
        """Picks a healthy node of a role, or router, and marks it as faulty. Raises NotNow."""
        running = self.well & self.fleet.running()
        well = sorted(name for name in running if name.startswith(role))
        if len(well) < 2 and not len(self.fleet.names(role)) == 1 == len(well):
            raise NotNow
        name = rng.choice(well)
        self.well.discard(name)
        return name


# ---- faults of nodes; each returns the name of the recovered or new node ----


async def kill(fleet: Fleet, name: str, seconds: float) -> str:
    """Sends SIGKILL; starts another node later."""
    fleet.kill(name)
    await asyncio.sleep(seconds)
    return await start_another(fleet, name)


async def stop(fleet: Fleet, name: str, seconds: float) -> str:
    """Sends SIGSTOP, then SIGCONT: the router may have given the node up meanwhile."""
    fleet.send(name, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    fleet.send(name, signal.SIGCONT)
    await ready(fleet, name)
    return name


async def restart(fleet: Fleet, name: str, seconds: float) -> str:
    """Starts another node, then sends SIGTERM to this one, which drains."""
    new = await start_another(fleet, name)
    pid = fleet.drain(name)
    async with asyncio.timeout(DRAIN_TIMEOUT):
        while await asyncio.to_thread(fleet.exit_code, pid) is None:
            await asyncio.sleep(0.1)
    return new


async def start_another(fleet: Fleet, name: str) -> str:
    new = await asyncio.to_thread(fleet.start_node, name.rpartition("-")[0])
    await ready(fleet, new)
    return new


async def ready(fleet: Fleet, name: str) -> None:
    """Waits until the router uses the node. Raises Gone, TimeoutError."""
    deadline = monotonic() + READY_TIMEOUT
    while name not in await asyncio.to_thread(fleet.ready):
        if name not in fleet.pids:
            raise Gone
        if monotonic() > deadline:
            raise TimeoutError(f"{name} is not ready after {READY_TIMEOUT:g} s")
        await asyncio.sleep(0.1)


def _on_a_node(act: Callable[[Fleet, str, float], Awaitable[str]]) -> Kind:
    async def strike(faults: Faults, fault: Fault) -> None:
        name = faults.take(fault.target, fault.random)
        faults.well.add(await act(faults.fleet, name, fault.seconds))

    return Kind(strike)


NODE_KINDS = {"kill": _on_a_node(kill), "stop": _on_a_node(stop), "restart": _on_a_node(restart)}


# ---- a router ----


async def stop_router(faults: Faults, fault: Fault) -> None:
    """Sends SIGSTOP, then SIGCONT: clients wait, and no request is lost."""
    name = faults.take("router", fault.random)
    with faults.router_frozen[name].lasting():
        faults.fleet.send(name, signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        faults.fleet.send(name, signal.SIGCONT)
    faults.well.add(name)


async def kill_router(faults: Faults, fault: Fault) -> None:
    """Sends SIGKILL: requests in flight are lost. Another router starts at the same address."""
    name = faults.take("router", fault.random)
    with faults.router_dead[name].lasting():
        faults.fleet.kill(name)
        await asyncio.sleep(min(fault.seconds, ROUTER_AWAY))
        await asyncio.to_thread(faults.fleet.start_router, name=name)
        deadline = monotonic() + READY_TIMEOUT
        while not await asyncio.to_thread(faults.fleet.ready):
            if monotonic() > deadline:
                raise TimeoutError(f"no node is ready {READY_TIMEOUT:g} s after its start")
            await asyncio.sleep(0.1)
    faults.well.add(name)


ROUTER_KINDS = {
    "router-stop": Kind(stop_router, ("router",), weight=0.5),  # all clients wait
    "router-kill": Kind(kill_router, ("router",), weight=0.25),  # all that is in flight is lost
}


# ---- hostile clients ----


async def attack(faults: Faults, fault: Fault) -> None:
    """Has the hostile clients attack, and notes the outcomes. A call without a reason is a failure,
    unless its router was killed."""
    hostile, since = ATTACKS[fault.kind], monotonic()
    with ExitStack() as stack:
        if hostile.crowds:
            stack.enter_context(faults.crowds.lasting())
        if hostile.greedy:
            stack.enter_context(faults.greed.lasting())
        outcome = await faults.attackers.attack(fault)
    told = Counter(outcome.told)
    if not faults.router_dead["router"].meet(since, monotonic()):
        for words in [words for words in told if words.endswith(GONE)]:
            told[words.removesuffix(GONE) + UNEXPLAINED] += told.pop(words)
    for words, count in told.items():
        faults.answers[fault.kind, words] += count
    faults.waits[fault.kind] += outcome.waits
    faults.hung += outcome.hung


ATTACK_KINDS = {
    name: Kind(attack, hostile.targets, hostile.longest, hostile.weight)
    for name, hostile in ATTACKS.items()
}
