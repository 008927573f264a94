"""A node: replicas of a model behind a gRPC server. What the roles have in common, start to stop.

A role adds its services and its sessions; a session is one job on one replica, hears the engine's
events about its sequences, and must be closed whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic

from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.core.errors import Blame, NodeError, PdserveError, Unavailable
from pdserve.common.core.ids import new_node_id
from pdserve.common.core.request import GenerateJob
from pdserve.common.demo_model.embedded import resolve_model
from pdserve.common.engine.block_pool import hash_blocks
from pdserve.common.engine.messages import ExpertLoad, RankReady
from pdserve.common.node import load as totals
from pdserve.common.node.balance import choose
from pdserve.common.node.host import ModelFacts, Ranks, start_replicas, stop_ranks
from pdserve.common.node.replica import Call, Replica, S, T
from pdserve.common.node.server import NodeServer
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.common.rpc.credentials import Credentials
from pdserve.common.rpc.lifecycle import serve_until_stopped
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.worker.worker import ExtensionConfig

logger = logging.getLogger(__name__)

_TRANSFERS_STOP = 5.0  # seconds hand-offs get to be quiesced
_LOOKS = 4  # of the watchdog within its time-out


class EngineNode(ABC, Generic[S, T]):
    """`serve` runs the node from start to stop and returns the process's exit code."""

    role: ClassVar[pb.Role]
    blame: ClassVar[Blame]

    def __init__(self, config: WorkerNodeConfig) -> None:
        engine = replace(config.engine, model=resolve_model(config.engine.model))
        self.config = replace(config, engine=engine)
        self.facts = ModelFacts.read(engine)
        self.node_id = new_node_id(self.blame)
        self.metrics = NodeMetrics()
        hosts = (config.node.host, config.transfer.kv_host)
        self.server = NodeServer(
            config.node,
            Credentials.load(self.blame, self.node_id, config.tls, config.auth, hosts),
        )
        self.address = ""
        self.draining = False
        self.replicas: list[Replica[S, T]] = []  # from `serve` on at least one
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open: dict[S, Replica[S, T]] = {}
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
    def make_transfers(self, ranks: Sequence[RankReady], call: Call) -> T:
        """The role's half of the hand-off, for the ranks of one replica; `call` reaches them."""

    @abstractmethod
    def add_services(self) -> None:
        """Adds the role's gRPC services."""

    # ---- start → serve → drain → stop -------------------------------------------------------

    async def serve(self, stopping: Callable[[], None] = lambda: None) -> int:
        """Returns the exit code. `stopping` is called when serving is over, drained or not."""
        self.address = self.server.bind()
        count = self.config.engine.parallel.data_parallel_size
        ranks = await start_replicas(self._start_ranks, count)
        try:
            return await self._serve(ranks, stopping)
        finally:
            await stop_ranks(ranks)

    async def _start_ranks(self, replica: int) -> Ranks:
        engine, log = self.config.engine, self.config.log
        ranks = await Ranks.start(self.blame, engine, self.facts, self.extension(), log, replica)
        # At once: one may die while other replicas still start.
        ranks.executor.on_death(partial(self._rank_died, replica))
        return ranks

    async def _serve(self, ranks: Sequence[Ranks], stopping: Callable[[], None]) -> int:
        try:
            self.replicas = [self._replica(index, each) for index, each in enumerate(ranks)]
            await self._start()
            timeout = self.config.node.drain_timeout
            return await serve_until_stopped(self._failed, self._drain, timeout)
        finally:
            stopping()
            await self._stop()

    def _replica(self, index: int, ranks: Ranks) -> Replica[S, T]:
        config, limit = self.config.engine.scheduler, self.facts.max_model_len
        name, make = self._name(index), self.make_transfers
        return Replica(index, name, self.blame, ranks, config, limit, make, self._routed)

    def _routed(self, load: ExpertLoad) -> None:
        self.metrics.observe_experts(load.assignments, load.balancedness)

    def _name(self, replica: int) -> str:
        """For messages about it; empty: there is no other."""
        return f"replica {replica}: " if self.config.engine.parallel.data_parallel_size > 1 else ""

    async def _start(self) -> None:
        totals.expose(self.replicas, self.metrics)
        self.metrics.healthy.set_function(lambda: float(self.ready()[0]))
        self.add_services()
        for replica in self.replicas:
            self.spawn(replica.engine.run())
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
        closing = asyncio.gather(*(each.transfers.close() for each in self.replicas))
        try:
            async with asyncio.timeout(_TRANSFERS_STOP):
                await closing
        except TimeoutError:
            logger.warning("hand-offs did not end within %.0f s", _TRANSFERS_STOP)
        for task in self._tasks:
            task.cancel()

    async def _watch(self) -> None:
        """Once a rank stands still, the sessions of its replica fail, so that routers move them
        elsewhere. Their blocks stay held until it goes on: `EngineCore.stop` and the KV transfer
        wait for it."""
        period = min(0.5, self.config.engine.scheduler.engine_stall_timeout / _LOOKS)
        while True:
            for replica in self.replicas:
                if replica.look():
                    error = self._stalled(replica.complaint)
                    logger.warning("%s; requests that fail: %d", error, len(replica.sessions))
                    replica.fail_sessions(error)
            await asyncio.sleep(period)

    def _stalled(self, reason: str) -> NodeError:
        message = f"{self.node_id}: {reason}"
        return NodeError(message, code="ENGINE_STALLED", blame=self.blame)

    def _rank_died(self, replica: int, rank: int, reason: str) -> None:
        message = self._name(replica) + reason
        self._fail(NodeError(message, code="RANK_DIED", blame=self.blame))

    def _fail(self, error: BaseException) -> None:
        """The first cause wins; the process ends with it."""
        if self._failed.done():
            return
        self._failed.set_exception(error)
        self.draining = True
        cause = NodeError(f"{self.node_id} failed; its log says why", blame=self.blame)
        self._fail_sessions(error if isinstance(error, PdserveError) else cause)

    def _fail_sessions(self, error: PdserveError) -> None:
        for replica in self.replicas:
            replica.fail_sessions(error)

    # ---- sessions ---------------------------------------------------------------------------

    def admit(self, job: GenerateJob, make: Callable[[Replica[S, T]], S]) -> S:
        """Opens a session on the replica that shall take the job.

        Raises:
            Unavailable: this node drains. NodeError: all its engines are stalled.
            InvalidRequest: it cannot do the job.
        """
        if self.draining:
            raise Unavailable(f"{self.node_id} is draining", code="DRAINING", blame=self.blame)
        able = [each for each in self.replicas if not each.watchdog.stalled]
        if not able:
            raise self._stalled(totals.complaints(self.replicas))
        self.facts.check(job)
        replica = self._choose(able, job)
        session = make(replica)
        replica.sessions.add(session)
        self._open[session] = replica
        return session

    def _choose(self, able: Sequence[Replica[S, T]], job: GenerateJob) -> Replica[S, T]:
        if len(able) == 1:
            return able[0]  # without hashing the prompt
        tokens, cache = job.token_ids, self.config.engine.cache
        hashes = (
            hash_blocks(tokens, cache.block_size, cache_salt=job.cache_salt)
            if cache.enable_prefix_caching
            else []
        )
        return self.replicas[choose(each.offer(len(tokens), hashes) for each in able)]

    @property
    def sessions(self) -> Sequence[S]:
        """Those that are not closed."""
        return tuple(self._open)

    def close(self, session: S) -> None:
        """Ends a session in the background; until it is closed the node is not idle."""
        self.spawn(self._close(session))

    async def _close(self, session: S) -> None:
        try:
            await session.close()
        except Exception as error:
            logger.exception("a session did not close")
            raise NodeError(
                "a session did not close, its blocks may be lost; the log says why",
                code="SESSION_NOT_CLOSED",
                blame=self.blame,
            ) from error
        finally:
            self._open.pop(session).forget(session)

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

    # ---- what others may know ---------------------------------------------------------------

    def ready(self) -> tuple[bool, str]:
        """Whether this node could produce tokens for a new job, and what is wrong. It could while
        one replica can."""
        reason = "draining" if self.draining else self.ailment()
        return not reason, reason or totals.complaints(self.replicas) or "ok"

    def ailment(self) -> str:
        """What keeps a node that lives from producing tokens; empty: nothing. It may pass by
        itself."""
        all_ail = all(each.complaint for each in self.replicas)
        return totals.complaints(self.replicas) if all_ail else ""

    def kv_identity(self) -> dict[str, str]:
        """What goes into the fingerprint."""
        return self.facts.kv_identity(self.config.engine.cache.block_size)

    def load(self) -> pb.NodeLoad:
        return totals.load(self.replicas, *self.ready())

    def _info(self) -> pb.NodeInfo:
        parallel = self.config.engine.parallel
        return pb.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            address=self.address,
            model=self.facts.name,
            fingerprint=self.fingerprint(),
            fingerprint_parts=self.kv_identity(),
            kv_connectors=self.connectors,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            expert_parallel_size=parallel.expert_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            max_model_len=self.facts.max_model_len,
            block_size=self.config.engine.cache.block_size,
            num_blocks=totals.num_blocks(self.replicas),
            instance=secrets.token_hex(16),
        )
