"""A node: an engine behind a gRPC server. What the roles have in common, start to stop.

A role adds its services and its sessions; a session is one job, hears the engine's events
about its sequences, and must be closed whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from common.config.schema import WorkerNodeConfig
from common.core.errors import Blame, NodeError, PdserveError, Unavailable
from common.core.ids import new_node_id
from common.core.request import GenerateJob
from common.core.sampling import SampledToken
from common.engine.collector import SchedulerCollector
from common.engine.core import EngineCore
from common.engine.host import ModelFacts, Ranks
from common.engine.messages import ExpertLoad
from common.engine.sequence import Finish, Sequence
from common.engine.watchdog import Watchdog
from common.engine.worker import ExtensionConfig
from common.model.default_model import resolve_model
from common.obs.metrics import NodeMetrics
from common.rpc.lifecycle import serve_until_stopped
from common.rpc.node import NodeServer
from common.rpc.pb import cluster_pb2 as pb
from common.rpc.tls import TLS

logger = logging.getLogger(__name__)

_TRANSFERS_STOP = 5.0  # seconds hand-offs get to be quiesced
_RANKS_STOP = 5.0  # seconds ranks get to end by themselves
_LOOKS = 4  # of the watchdog within its time-out


class Session(Protocol):
    """One job on a node."""

    def admitted(self, sequence: Sequence) -> None: ...
    def computed(self, sequence: Sequence) -> None: ...
    def sampled(self, sequence: Sequence, token: SampledToken, finish: Finish | None) -> None: ...
    def fail(self, error: PdserveError) -> None: ...
    async def close(self) -> None: ...


S = TypeVar("S", bound=Session)


class EngineNode(ABC, Generic[S]):
    """`serve` runs the node from start to stop and returns the process's exit code."""

    role: ClassVar[pb.Role]
    blame: ClassVar[Blame]

    def __init__(self, config: WorkerNodeConfig) -> None:
        engine = replace(config.engine, model=resolve_model(config.engine.model))
        self.config = replace(config, engine=engine)
        self.facts = ModelFacts.read(engine)
        self.node_id = new_node_id(self.blame)
        self.metrics = NodeMetrics()
        self.server = NodeServer(config.node, TLS.load(config.tls))
        self.watchdog = Watchdog(config.engine.scheduler.engine_stall_timeout)
        self.address = ""
        self.draining = False
        self.ranks: Ranks  # from `serve` on
        self.engine: EngineCore
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sessions: dict[int, S] = {}  # by sequence
        self._open: set[S] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- what a role defines ----------------------------------------------------------------

    @abstractmethod
    def fingerprint(self) -> str:
        """Nodes pair only when theirs are equal."""

    @property
    @abstractmethod
    def connectors(self) -> Mapping[str, Any]:
        """The KV connectors this node speaks, by name, the preferred first."""

    @abstractmethod
    def extension(self) -> ExtensionConfig:
        """What lives beside each rank."""

    @abstractmethod
    def add_services(self) -> None:
        """Makes the role's half of the hand-off and adds its gRPC services."""

    @abstractmethod
    async def close_transfers(self) -> None:
        """Ends the role's half of the hand-off."""

    # ---- start → serve → drain → stop -------------------------------------------------------

    async def serve(self) -> int:
        self.address = self.server.bind()
        self.ranks = await Ranks.start(
            self.blame, self.config.engine, self.facts, self.extension(), self.config.log
        )
        try:
            await self._start()
            timeout = self.config.node.drain_timeout
            return await serve_until_stopped(self._failed, self._drain, timeout)
        finally:
            await self._stop()

    async def _start(self) -> None:
        scheduler = self.ranks.scheduler
        self.engine = EngineCore(self.ranks.executor, scheduler, self, self.facts.max_model_len)
        self.ranks.executor.on_death(self._rank_died)
        self.metrics.registry.register(SchedulerCollector(scheduler))
        self.metrics.healthy.set_function(lambda: float(self.ready()[0]))
        self.add_services()
        self.spawn(self.engine.run())
        self.spawn(self._watch())
        await self.server.start(
            self._info(), self.load, self.metrics.registry, self.ready, self.spawn
        )

    async def _drain(self) -> None:
        """The router is told first: what it has placed until then is still taken."""
        await self.server.leave()
        self.draining = True
        await self.server.drain(lambda: not self._open)

    async def _stop(self) -> None:
        self.draining = True
        self._fail_sessions(
            Unavailable(f"{self.node_id} is stopping", code="NODE_STOPPING", blame=self.blame)
        )
        await self.server.stop()
        try:
            await asyncio.wait_for(self.close_transfers(), _TRANSFERS_STOP)
        except TimeoutError:
            logger.warning("hand-offs did not end within %.0f s", _TRANSFERS_STOP)
        for task in self._tasks:
            task.cancel()
        await self.ranks.executor.shutdown(_RANKS_STOP)

    async def _watch(self) -> None:
        """Once a rank stands still, the sessions fail, so that routers move them elsewhere. Their
        blocks stay held until it goes on: `EngineCore.stop` and the KV transfer wait for it."""
        period = min(0.5, self.config.engine.scheduler.engine_stall_timeout / _LOOKS)
        while True:
            stalled = self.watchdog.stalled
            self.watchdog.look(self.engine.work())
            if self.watchdog.stalled and not stalled:
                self._fail_sessions(self._stalled())
            await asyncio.sleep(period)

    def _stalled(self) -> NodeError:
        message = f"{self.node_id}: {self.watchdog.reason}"
        return NodeError(message, code="ENGINE_STALLED", blame=self.blame)

    def _rank_died(self, rank: int, reason: str) -> None:
        self._fail(NodeError(reason, code="RANK_DIED", blame=self.blame))

    def _fail(self, error: BaseException) -> None:
        """The first cause wins; the process ends with it."""
        if self._failed.done():
            return
        self._failed.set_exception(error)
        self.draining = True
        cause = NodeError(f"{self.node_id} failed: {error}", blame=self.blame)
        self._fail_sessions(error if isinstance(error, PdserveError) else cause)

    def _fail_sessions(self, error: PdserveError) -> None:
        for session in self._open:
            session.fail(error)

    # ---- sessions ---------------------------------------------------------------------------

    def admit(self, job: GenerateJob, make: Callable[[], S]) -> S:
        """Opens a session.

        Raises:
            Unavailable: this node drains. NodeError: its engine is stalled.
            InvalidRequest: it cannot do the job.
        """
        if self.draining:
            raise Unavailable(f"{self.node_id} is draining", code="DRAINING", blame=self.blame)
        if self.watchdog.stalled:
            raise self._stalled()
        self.facts.check(job)
        session = make()
        self._open.add(session)
        return session

    def adopt(self, sequence: Sequence, session: S) -> None:
        """From now on the engine's events about the sequence go to the session."""
        self._sessions[sequence.seq_id] = session

    def close(self, session: S) -> None:
        """Ends a session in the background; until it is closed the node is not idle."""
        self.spawn(self._close(session))

    async def _close(self, session: S) -> None:
        try:
            await session.close()
        except Exception as error:
            logger.exception("a session did not close")
            raise NodeError(
                f"a session did not close, its blocks may be lost: {error!r}",
                code="SESSION_NOT_CLOSED",
                blame=self.blame,
            ) from error
        finally:
            self._open.discard(session)
            self._sessions = {i: s for i, s in self._sessions.items() if s is not session}

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in the background, until the node stops at the latest. An exception that
        `work` lets pass is the node's end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    # ---- the engine's listener --------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        self._sessions[sequence.seq_id].admitted(sequence)

    def computed(self, sequence: Sequence) -> None:
        self._sessions[sequence.seq_id].computed(sequence)

    def sampled(self, sequence: Sequence, token: SampledToken, finish: Finish | None) -> None:
        self._sessions[sequence.seq_id].sampled(sequence, token, finish)

    def routed(self, load: ExpertLoad) -> None:
        self.metrics.observe_experts(load.assignments, load.balancedness)

    # ---- what others may know ---------------------------------------------------------------

    def ready(self) -> tuple[bool, str]:
        """Whether this node could produce tokens now, and why not."""
        reason = "draining" if self.draining else self.ailment()
        return not reason, reason or "ok"

    def ailment(self) -> str:
        """What keeps a node that lives from producing tokens; empty: nothing. It may pass by
        itself."""
        return self.watchdog.reason

    def kv_identity(self) -> dict[str, str]:
        """What goes into the fingerprint."""
        return self.facts.kv_identity(self.config.engine.cache.block_size)

    def load(self) -> pb.NodeLoad:
        scheduler = self.ranks.scheduler
        healthy, reason = self.ready()
        return pb.NodeLoad(
            running=len(scheduler.running) + len(scheduler.remote),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.pool.num_free,
            total_blocks=scheduler.pool.num_blocks,
            waiting_tokens=sum(each.num_pending for each in scheduler.waiting),
            healthy=healthy,
            reason=reason,
        )

    def _info(self) -> pb.NodeInfo:
        return pb.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            address=self.address,
            model=self.facts.name,
            fingerprint=self.fingerprint(),
            fingerprint_parts=self.kv_identity(),
            kv_connectors=self.connectors,
            tensor_parallel_size=len(self.ranks.ready),
            max_model_len=self.facts.max_model_len,
            block_size=self.config.engine.cache.block_size,
            num_blocks=self.ranks.scheduler.pool.num_blocks,
        )
