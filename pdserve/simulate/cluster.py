"""A router and its nodes on a virtual clock.

    arrival ─▶ Admission.slot ─▶ NodeSelector.decode ─▶ blocks reserved ─▶ NodeSelector.prefill
            ─▶ prefill steps; their KV is moved meanwhile ─▶ KV complete ─▶ decode steps

Placement, admission and scheduling are production code. Nodes do not fail, and heartbeats arrive
on time.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean

from pdserve.common.config.engine import SchedulerConfig
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import ConfigError, PdserveError
from pdserve.common.core.kv_groups import KVGroup
from pdserve.common.core.request import PromptPath
from pdserve.common.core.sampling import SamplingParams
from pdserve.common.engine.kv_pool import KVPool
from pdserve.common.engine.scheduler import Scheduler
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.in_flight import InFlightLoad
from pdserve.router.cluster.node import ROLE_NAMES, Node
from pdserve.router.cluster.placement import NodeSelector
from pdserve.router.cluster.policy import Blocks, Policy
from pdserve.router.cluster.prefix_index import PrefixIndex
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.role_policy import PlacementRequest
from pdserve.router.requests.admission import Admission, Ask
from pdserve.router.requests.queue_bounds import Batch
from pdserve.router.requests.slo import SLO
from pdserve.simulate.calibration import Calibration, Times, drawn
from pdserve.simulate.clock import run_virtually
from pdserve.simulate.engine import Job, SimulatedEngine
from pdserve.simulate.host import Host
from pdserve.simulate.nodes import HashedBlocks, SimulatedNode, Stream
from pdserve.simulate.outcome import Answered, Outcome
from pdserve.simulate.workloads import BLOCK, Arrival

ROLES: dict[str, int] = {"P": pb.ROLE_PREFILL, "D": pb.ROLE_DECODE, "B": pb.ROLE_BOTH}
_LAYOUT = re.compile(r"([0-9]{1,9})([PDB])(?:@([0-9]{1,9}(?:\.[0-9]+)?))?\+?")
MOST_NODES = 512
_GROUP = KVGroup((0,), 1, 1)  # the KV's shape does not matter here


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a simulation."""

    layout: str  # parsed by `read_layout`
    calibration: Calibration
    policies: Mapping[int, Policy]  # by role
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int = 10_000  # per node
    block_size: int = BLOCK
    event_delay: float = 0.0  # seconds until the router hears what a node has cached
    host_cores: float = 0.0  # of one host with all nodes; 0: each node has cores of its own
    seed: int = 0  # of the draws from the calibration's scatter
    clients: int = 0  # which ask in turn, each as soon as it is answered; 0: at the arrivals' times
    joining: str = ""  # nodes that join later with empty caches, written like `layout`
    join_after: float = 0.0  # seconds


def read_layout(text: str) -> list[tuple[int, float]]:
    """Parses `2P3D`, `1P+1P@0.5+2D` or `4B`: counts of nodes by role, and after @ their speed
    relative to the calibration. Returns (role, speed) per node.

    Raises:
        ConfigError: the text has another form, or the layout cannot serve.
    """
    nodes = _read_nodes(text)
    roles = {role for role, _ in nodes}
    if pb.ROLE_BOTH not in roles and not {pb.ROLE_PREFILL, pb.ROLE_DECODE} <= roles:
        raise ConfigError(
            f"--layout {text}: it needs prefill and decode nodes, or nodes of both roles"
        )
    return nodes


def _read_nodes(text: str) -> list[tuple[int, float]]:
    found = list(_LAYOUT.finditer(text))
    if not found or "".join(each[0] for each in found) != text or text.endswith("+"):
        raise ConfigError(
            f"--layout {text}: write counts and roles, such as 2P3D, 1P+1P@0.5+2D or 4B"
        )
    parts = [(int(each[1]), ROLES[each[2]], float(each[3] or 1)) for each in found]
    if sum(part[0] for part in parts) > MOST_NODES or any(part[2] == 0 for part in parts):
        raise ConfigError(f"--layout {text}: at most {MOST_NODES} nodes, and none of speed 0")
    return [(role, speed) for number, role, speed in parts for _ in range(number)]


def _host(setup: Setup) -> Host | None:
    """Returns the host that all nodes share. Raises ConfigError: the nodes have GPUs."""
    if not setup.host_cores:
        return None
    if not setup.calibration.cores:
        raise ConfigError("--host-cores: the calibration is of GPUs, which nodes do not share")
    return Host(setup.host_cores / setup.calibration.cores)


def _ignore(num_tokens: int) -> None:
    """Ignores computed tokens."""


class Cluster:
    """Serves arrivals. Create it on the loop whose clock it uses."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        routing = setup.routing
        self._registry = Registry(routing, self.now, "simulated")
        self._index = PrefixIndex()
        self._times = Times(setup.calibration)
        self._view = view = ClusterView(self._registry)
        self._selector = NodeSelector(routing, view, setup.policies, self._match, now=self.now)
        self._admission = Admission(
            routing.max_concurrent_requests,
            routing.max_queued_requests,
            routing.queue_timeout,
            routing.max_client_share,
            slo=SLO(routing.slo_ttft or None, routing.slo_itl or None),
            prefill_backlog=routing.prefill_work,
        )
        self._nodes: dict[Node, SimulatedNode] = {}
        self._host = _host(setup)
        self._start_nodes(read_layout(setup.layout))
        self._joining = _read_nodes(setup.joining) if setup.joining else []
        self._seq_ids = count()
        self._chance = random.Random(f"router {setup.seed}")
        self._answered: list[Answered] = []
        self._refused: Counter[str] = Counter()
        self._gaps: Counter[float] = Counter()
        self._hits = self._queries = 0
        self._open = 0  # requests
        self._asked = asyncio.Event()

    # ---- nodes ------------------------------------------------------------------------------

    def _start_nodes(self, nodes: Iterable[tuple[int, float]]) -> None:
        for number, (role, speed) in enumerate(nodes, len(self._nodes)):
            self._start_node(number, role, Times(self._setup.calibration, speed))
        self._admission.cluster(*self._view.replicas())

    async def _join(self) -> None:
        await asyncio.sleep(self._setup.join_after)
        self._start_nodes(self._joining)

    def _start_node(self, number: int, role: int, times: Times) -> None:
        setup = self._setup
        name = f"{ROLE_NAMES[role]}-{number:03}"
        info = pb.NodeInfo(
            node_id=name,
            role=role,  # type: ignore[arg-type]
            instance=name,
            fingerprint="simulated",
            kv_connectors=["simulated"],
            block_size=setup.block_size,
            num_blocks=setup.num_blocks,
        )
        self._registry.register(info, pb.NodeLoad(healthy=True, routers=1))
        node = next(each for each in self._registry.nodes() if each.id == name)
        pool = KVPool((_GROUP,), (setup.num_blocks,), setup.block_size)
        scheduler = Scheduler(pool, setup.scheduler, (), now=self.now)
        chance = random.Random(f"{name} {setup.seed}")  # its own: whatever other nodes compute
        engine = SimulatedEngine(scheduler, times, self._host or Host(), chance, self._gap)
        self._nodes[node] = SimulatedNode(node, engine, self._index, setup.event_delay)

    async def _heartbeats(self) -> None:
        """Reports every node's load at each heartbeat, until cancelled. While nothing is served all
        heartbeats are the same, so only the last one is sent, by the request that ends that time.
        """
        interval = self._setup.routing.heartbeat_interval
        while True:
            self._beat()
            await asyncio.sleep(interval)
            if not self._open:
                since = self.now()
                self._asked.clear()
                await self._asked.wait()
                await asyncio.sleep(interval - (self.now() - since) % interval)

    def _beat(self) -> None:
        for node, simulated in self._nodes.items():
            self._registry.heartbeat(node.id, simulated.load(), node.info.instance)

    # ---- requests ---------------------------------------------------------------------------

    async def serve(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Serves each arrival at its time, or in turn for `clients`; returns when the last one is
        answered."""
        beating = self._loop.create_task(self._heartbeats())
        joining = self._loop.create_task(self._join())
        began = self.now()
        async with asyncio.TaskGroup() as requests:
            numbered = enumerate(arrivals)
            for _ in range(self._setup.clients):
                requests.create_task(self._client(numbered))
            for number, arrival in () if self._setup.clients else numbered:
                await asyncio.sleep(began + arrival.time - self.now())
                requests.create_task(self._request(str(number), arrival))
        beating.cancel()
        joining.cancel()
        return self._outcome()

    async def _client(self, left: Iterator[tuple[int, Arrival]]) -> None:
        for number, arrival in left:
            await self._request(str(number), arrival)

    async def _request(self, request_id: str, arrival: Arrival) -> None:
        if not self._open and not self._asked.is_set():
            self._beat()
            self._asked.set()
        self._open += 1
        try:
            await self._ask(request_id, arrival)
        finally:
            self._open -= 1

    async def _ask(self, request_id: str, arrival: Arrival) -> None:
        placement = self._placement(request_id, arrival)
        ask = Ask(
            tokens=self._selector.least_missing(placement),
            priority=arrival.priority,
            batch=Batch(arrival.client, arrival.num_tokens),
            prompt_tokens=arrival.num_tokens,
        )
        try:
            async with self._admission.slot(ask):
                answered = await self._answer(placement, arrival, ask)
                ask.generated = arrival.output_tokens
                if arrival.output_tokens > 1:
                    decoded = answered.ended - answered.first
                    ask.itl = decoded / (arrival.output_tokens - 1)
        except PdserveError as error:
            self._refused[error.code] += 1
        else:
            self._answered.append(answered)

    async def _answer(self, placement: PlacementRequest, arrival: Arrival, ask: Ask) -> Answered:
        """Serves a request that has a slot, like `router.requests.attempt`; returns its figures."""
        node, path = await self._selector.decode(placement)
        late = self._lasts("router", self._setup.calibration.router_s, node)
        if path is PromptPath.TRANSFERRED:
            first, ended = await self._apart(placement, arrival, ask, node)
        else:
            with self._in_flight(placement, node, True) as use:
                job = self._job(arrival, node)
                first = await self._prefilled(job, use, ask)
                ended = await job.ended
                self._nodes[node].engine.release(job)
        return Answered(ask.arrived, first + late, ended + late, arrival.output_tokens)

    async def _apart(
        self, placement: PlacementRequest, arrival: Arrival, ask: Ask, decode: Node
    ) -> tuple[float, float]:
        """Returns the times of the first and the last token."""
        engine = self._nodes[decode].engine
        times = self._setup.calibration
        with self._in_flight(placement, decode, False):
            job = self._job(arrival, decode, remote=True)
            await job.admitted
            await asyncio.sleep(self._lasts("reserve", times.reserve_s, decode))
            first = job.last = await self._handed_over(placement, arrival, ask, job, decode)
            moved = arrival.num_tokens - (job.sequence.num_cached or 0)
            engine.rates.handed_over(moved, self.now() - first)
            engine.activate(job)
            ended = await job.ended
            engine.release(job)
        return first, ended + times.answer_s

    def _lasts(self, kind: str, seconds: float, decode: Node) -> float:
        """Returns how long work besides the steps takes whose median is `seconds`: longer while the
        decode node computes. `kind`: a list of `Scatter`."""
        times, share = self._setup.calibration, self._chance.random()
        if not self._nodes[decode].engine.computing:
            return seconds * drawn(getattr(times.scatter, kind), share)
        beside: float = getattr(times, f"{kind}_beside")
        return seconds * beside * drawn(getattr(times.scatter, f"{kind}_beside"), share)

    async def _handed_over(
        self,
        placement: PlacementRequest,
        arrival: Arrival,
        ask: Ask,
        remote: Job,
        decode: Node,
    ) -> float:
        """Returns the time of the first token, once the decode node has all KV."""
        prefill = await self._selector.prefill(placement, decode)
        assert prefill is not None, "all pairs fit"
        source = self._nodes[prefill]
        with self._in_flight(placement, prefill, True) as use:
            stream = Stream(source, self._times, remote.sequence.num_computed, self.now)
            job = self._job(arrival, prefill, on_computed=stream.computed)
            first = await self._prefilled(job, use, ask)
            left = stream.landing - self.now()
            await asyncio.sleep(self._lasts("transfer", left, decode))
            source.engine.release(job)
        return first

    async def _prefilled(self, job: Job, use: InFlightLoad, ask: Ask) -> float:
        first = await job.first
        use.progressed()
        self._admission.first_token(ask)
        self._queries += job.sequence.num_prompt_tokens
        self._hits += job.sequence.num_cached or 0
        return first

    def _job(
        self,
        arrival: Arrival,
        node: Node,
        remote: bool = False,
        on_computed: Callable[[int], None] | None = None,
    ) -> Job:
        """Starts the request's job on a node."""
        prefills, seq_id = node.info.role == pb.ROLE_PREFILL, next(self._seq_ids)
        sequence = EngineSequence(
            seq_id,
            SamplingParams(max_tokens=1 if prefills else arrival.output_tokens, ignore_eos=True),
            [seq_id] * arrival.num_tokens,  # unique tokens if the trace has no hashes
            arrival.num_tokens,
            client=arrival.client,
            remote=remote,
            priority=arrival.priority,
            block_hashes=list(arrival.blocks),
        )
        job = Job(sequence, on_computed or _ignore)
        self._nodes[node].engine.add(job)
        return job

    def _placement(self, request_id: str, arrival: Arrival) -> PlacementRequest:
        blocks = HashedBlocks(arrival.blocks)
        return PlacementRequest(
            request_id=request_id,
            num_tokens=arrival.num_tokens,
            longest=arrival.num_tokens + arrival.output_tokens,
            adapter="",
            version=None,
            avoid=(),
            local_prefill=False,
            last_chance=lambda role: False,
            session=arrival.session,
            waiting=self._patience,
            blocks=lambda size: blocks,
        )

    @contextmanager
    def _patience(self, _: str) -> Iterator[float]:
        yield self.now() + self._setup.routing.queue_timeout

    def _in_flight(self, placement: PlacementRequest, node: Node, prefills: bool) -> InFlightLoad:
        tokens = self._selector.missing(placement, node) if prefills else 0
        return InFlightLoad(self._registry, node, tokens)

    def _match(self, blocks: Callable[[int], Blocks]) -> dict[Node, int]:
        found = self._index.match(blocks(self._setup.block_size))
        return {place[0]: depth for place, depth in found.items()}  # type: ignore[index]

    # ---- figures ----------------------------------------------------------------------------

    def _gap(self, seconds: float, count: int) -> None:
        self._gaps[round(seconds, 6)] += count

    def _outcome(self) -> Outcome:
        computed = [
            each.engine.computed_tokens
            for node, each in self._nodes.items()
            if node.info.role != pb.ROLE_DECODE
        ]
        return Outcome(
            answered=tuple(self._answered),
            refused=dict(self._refused),
            gaps=tuple(sorted(self._gaps.items())),
            hit_ratio=self._hits / max(1, self._queries),
            imbalance=max(computed) / max(1, fmean(computed)),
        )


def simulate(setup: Setup, arrivals: Iterable[Arrival]) -> Outcome:
    """Serves all arrivals."""
    return run_virtually(lambda: Cluster(setup).serve(arrivals))
