"""A node: replicas of a model behind a gRPC server. What the roles have in common, start to stop.

A role adds its services and its sessions; a session is one job on one replica, is told the
engine's events about its sequences, and must be closed whatever happened.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic

from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.core.errors import Blame, NodeError, PdserveError, Unavailable
from pdserve.common.core.request import GenerateJob
from pdserve.common.engine.messages import RankReady
from pdserve.common.node.adapters import AdaptersService, NodeAdapters
from pdserve.common.node.balance import choose_replica
from pdserve.common.node.load import export, node_load, num_blocks, unhealthy_reasons
from pdserve.common.node.model_facts import ModelFacts, check_job
from pdserve.common.node.ranks import Ranks, start_replicas, stop_ranks
from pdserve.common.node.replica import Replica, S, T
from pdserve.common.node.server import NodeServer
from pdserve.common.node.utilisation import Utilisation, UtilisationCollector
from pdserve.common.obs.exposition import NODE_NAMES, Exposition
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.common.obs.process import serve_until_stopped
from pdserve.common.obs.tracing import Tracer
from pdserve.common.rpc.auth import new_node_id
from pdserve.common.rpc.channels import Credentials
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.trace import TraceInterceptor
from pdserve.common.worker.worker import ExtensionConfig
from pdserve.demo_model.embedded import resolve_model
from pdserve.kv_transfer.commands import Call
from pdserve.kv_transfer.layout import fingerprint
from pdserve.kv_transfer.rank.transfer_rank import FACTORY, rank_config
from pdserve.kv_transfer.selection import Connectors, choose_connectors, load_connector

logger = logging.getLogger(__name__)

_TRANSFERS_STOP = 5.0  # seconds hand-offs get to be quiesced
_CHECKS = 4  # of the watchdog within its time-out


class EngineNode(ABC, Generic[S, T]):
    """`serve` runs the node from start to stop and returns the process's exit code.

    A role says its `role` and `blame`, and overrides

        choose_connectors  where no KV comes to its nodes or goes from them
        make_transfers     its half of the KV hand-off, one for each replica
        add_services       its gRPC services, which `admit` jobs and `close` their sessions
        unhealthy_reason   where it knows more reasons than its engines
        end_streams        where calls would go on for ever
    """

    role: ClassVar[pb.Role]
    blame: ClassVar[Blame]

    def __init__(self, config: WorkerNodeConfig) -> None:
        engine = replace(config.engine, model=resolve_model(config.engine.model))
        self.config = replace(config, engine=engine)
        self.facts = ModelFacts.read(engine)
        self.adapters = NodeAdapters(engine.lora, self.facts.spec, self.blame)
        self.kv_identity = self.facts.kv_identity(engine.cache.block_size)
        self.fingerprint = fingerprint(self.kv_identity)  # nodes pair only when theirs are equal
        self.connectors = self.choose_connectors()
        lending = (load_connector(name).capabilities.lends for name in self.connectors)
        self.lends = self.facts.device == "cpu" and any(lending)
        self.node_id = new_node_id(self.blame)
        self.metrics = NodeMetrics()
        hosts = (config.node.host, config.transfer.kv_host)
        self.tracer = Tracer(config.observability.otlp_endpoint, self.blame, self.node_id)
        self.credentials = Credentials.load(
            self.blame, self.node_id, config.tls, config.auth, hosts
        )
        self.server = NodeServer(
            config.node,
            self.credentials,
            TraceInterceptor(self.tracer, self.node_id) if self.tracer.enabled else None,
        )
        self.address = ""
        self.draining = False
        self.info = pb.NodeInfo()  # what the router is told, as it is now
        self._utilisation: list[Utilisation] = []  # of each replica
        self.replicas: list[Replica[S, T]] = []  # from `serve` on at least one
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- what a role overrides --------------------------------------------------------------

    def choose_connectors(self) -> Connectors:
        """What carries KV, the preferred first."""
        return choose_connectors(self.config.transfer, self.facts.device)

    @abstractmethod
    def make_transfers(self, ranks: Sequence[RankReady], call: Call) -> T:
        """The role's half of the hand-off, for the ranks of one replica; `call` reaches them."""

    @abstractmethod
    def add_services(self) -> None:
        """Adds the role's gRPC services to `server`."""

    def end_streams(self) -> None:
        """Ends the calls that last as long as this node."""

    def unhealthy_reason(self) -> str:
        """What keeps a node that lives from producing tokens; empty: nothing. It may pass by
        itself."""
        any_healthy = any(not each.unhealthy_reason for each in self.replicas)
        return "" if any_healthy else unhealthy_reasons(self.replicas)

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
        ranks = await Ranks.start(self.blame, engine, self.facts, self._extension(), log, replica)
        # At once: one may die while other replicas still start.
        ranks.executor.on_death(partial(self._rank_died, replica))
        return ranks

    def _extension(self) -> ExtensionConfig | None:
        """Beside each rank its connectors."""
        if not self.connectors:
            return None
        source, tls = self.role == pb.ROLE_PREFILL, self.config.tls
        key = self.credentials.key
        config = rank_config(self.connectors, self.fingerprint, tls, source=source, key=key)
        return ExtensionConfig(FACTORY, config, self.config.transfer.kv_host, self.lends)

    async def _serve(self, ranks: Sequence[Ranks], stopping: Callable[[], None]) -> int:
        try:
            self.replicas = [self._replica(index, each) for index, each in enumerate(ranks)]
            parallel = self.config.engine.parallel
            self._utilisation = [Utilisation.of(each, self.facts, parallel) for each in ranks]
            await self._start()
            timeout = self.config.node.drain_timeout
            return await serve_until_stopped(self._failed, self._drain, timeout)
        finally:
            stopping()
            await self._stop()

    def _replica(self, index: int, ranks: Ranks) -> Replica[S, T]:
        return Replica(
            index,
            self._name(index),
            self.blame,
            ranks,
            self.facts.max_model_len,
            self.config.engine.scheduler.engine_stall_timeout,
            self.make_transfers,
            self.metrics,
        )

    def _name(self, replica: int) -> str:
        """For messages about it; empty: there is no other."""
        return f"replica {replica}: " if self.config.engine.parallel.data_parallel_size > 1 else ""

    async def _start(self) -> None:
        export(self.replicas, self.metrics)
        self.metrics.registry.register(UtilisationCollector(self._utilisation))
        self.metrics.healthy.set_function(lambda: float(self.ready()[0]))
        self.add_services()
        if self.adapters.enabled:
            await self._serve_adapters()
        for replica in self.replicas:
            self.spawn(replica.engine.run())
        self.spawn(self._watch())
        prefix = self.config.observability.metrics_prefix
        shown = Exposition(self.metrics.registry, self.facts.name, prefix, NODE_NAMES)
        self.info = self._info()
        await self.server.start(self.info, self.load, shown, self.ready, self.spawn)

    async def _serve_adapters(self) -> None:
        await self.adapters.start(
            [
                partial(replica.engine.call, rank.rank)
                for replica in self.replicas
                for rank in replica.ranks.ready
            ]
        )

        def announce() -> None:
            self.info.adapters[:] = self.adapters.present

        service = AdaptersService(self.adapters, self.spawn, announce, self.blame)
        self.server.add("Adapters", pb_grpc.add_AdaptersServicer_to_server, service)

    async def _drain(self) -> None:
        """The router is told first: what it has placed until then is still taken."""
        await self.server.leave()
        self.draining = True
        await self.server.drain(lambda: not any(each.sessions for each in self.replicas))

    async def _stop(self) -> None:
        self.draining = True
        self._fail_sessions(
            Unavailable(f"{self.node_id} is stopping", code="NODE_STOPPING", blame=self.blame)
        )
        self.end_streams()
        await self.server.stop()
        closing = asyncio.gather(*(each.transfers.close() for each in self.replicas))
        try:
            async with asyncio.timeout(_TRANSFERS_STOP):
                await closing
        except TimeoutError:
            logger.warning("hand-offs did not end within %.0f s", _TRANSFERS_STOP)
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self.tracer.close)

    async def _watch(self) -> None:
        """Once a rank stands still, the sessions of its replica fail, so that routers move them
        elsewhere. Their blocks stay held until it goes on: `EngineCore.stop` and the KV transfer
        wait for it."""
        period = min(0.5, self.config.engine.scheduler.engine_stall_timeout / _CHECKS)
        while True:
            for each in self._utilisation:
                each.sample()
            for replica in self.replicas:
                if replica.check_health():
                    error = self._stalled(replica.unhealthy_reason)
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
        """Opens a session on the replica that takes the job; whoever calls `close`s it.

        Raises:
            Unavailable: this node drains. NodeError: all its engines are stalled.
            InvalidRequest: it cannot do the job.
        """
        if self.draining:
            raise Unavailable(f"{self.node_id} is draining", code="DRAINING", blame=self.blame)
        able = {each.index: each.scheduler for each in self.replicas if not each.watchdog.stalled}
        if not able:
            raise self._stalled(unhealthy_reasons(self.replicas))
        check_job(job, self.facts.spec.vocab_size, self.facts.max_model_len)
        self.adapters.check(job.adapter)
        replica = self.replicas[choose_replica(able, job)]
        session = make(replica)
        replica.sessions.add(session)
        self.adapters.take(session, job.adapter)
        return session

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
            next(each for each in self.replicas if session in each.sessions).forget(session)
        self.adapters.give_back(session)

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
        reason = "draining" if self.draining else self.unhealthy_reason()
        return not reason, reason or unhealthy_reasons(self.replicas) or "ok"

    def load(self) -> pb.NodeLoad:
        return node_load(self.replicas, *self.ready())

    def _info(self) -> pb.NodeInfo:
        parallel = self.config.engine.parallel
        return pb.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            address=self.address,
            model=self.facts.name,
            fingerprint=self.fingerprint,
            fingerprint_parts=self.kv_identity,
            kv_connectors=self.connectors,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            expert_parallel_size=parallel.expert_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            max_model_len=self.facts.max_model_len,
            block_size=self.config.engine.cache.block_size,
            num_blocks=num_blocks(self.replicas),
            instance=secrets.token_hex(16),
            takes_adapters=self.adapters.enabled,
            adapters=self.adapters.present,
        )
