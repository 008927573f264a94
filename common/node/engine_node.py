"""A node: replicas of a model behind a gRPC server, from start to stop, for all roles.

A role adds its services and its sessions. A session is one job on one replica. It gets the engine's
events about its sequences, and must always be closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, Protocol

from pdserve.common.config.node import WorkerNodeConfig
from pdserve.common.core.errors import Blame, NodeError, PdserveError, Unavailable
from pdserve.common.core.request import GenerateJob
from pdserve.common.engine.messages import RankReady
from pdserve.common.model.device import gpu_bytes
from pdserve.common.node.adapters import AdaptersService, NodeAdapters
from pdserve.common.node.balance import choose_replica
from pdserve.common.node.kv_events_service import KVEventsService
from pdserve.common.node.load import export, node_load, num_blocks, unhealthy_reasons
from pdserve.common.node.model_facts import ModelFacts, check_job, told
from pdserve.common.node.ranks import Ranks, start_replicas, stop_ranks
from pdserve.common.node.replica import Call, Replica, S, T
from pdserve.common.node.server import NodeServer
from pdserve.common.node.utilisation import Utilisation
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

logger = logging.getLogger(__name__)

_TRANSFERS_STOP = 5.0  # seconds in which KV transfers must be quiesced
_CHECKS = 4  # of the watchdog within its timeout


class TransferSetup(Protocol):
    """A node's settings for KV transfers; `kv_transfer/selection.py` makes it."""

    @property
    def fingerprint(self) -> str:
        """Nodes pair only when theirs are equal."""

    @property
    def connectors(self) -> tuple[str, ...]:
        """The names announced to the router, the preferred first; empty: no KV transfers."""

    @property
    def rank_factory(self) -> str: ...  # as `ExtensionConfig.factory`
    @property
    def rank_config(self) -> bytes: ...


def on_device(config: WorkerNodeConfig, device: str) -> WorkerNodeConfig:
    """Returns the config with the defaults that depend on the device filled in."""
    if device == "cpu":
        return config
    engine = config.engine
    usable = int(gpu_bytes() * engine.cache.gpu_memory_utilization)
    return replace(config, engine=replace(engine, scheduler=engine.scheduler.on_gpu(usable)))


class EngineNode(ABC, Generic[S, T]):
    """`serve` runs the node from start to stop and returns the process's exit code.

    A role sets `role` and `blame`, and overrides

        set_up_transfers   to choose its connectors and configure its ranks for KV transfers
        make_transfers     to make its half of the KV hand-off for a replica
        add_services       to add its gRPC services, which `admit` jobs and `close` sessions
        unhealthy_reason   if it knows more reasons than its engines
        end_streams        if it has calls that last as long as the node
    """

    role: ClassVar[pb.Role]
    blame: ClassVar[Blame]

    def __init__(self, config: WorkerNodeConfig) -> None:
        """Takes a config whose `engine.model.model` is a folder. Raises ConfigError."""
        self.facts = ModelFacts.read(config.engine)
        self.config = config = on_device(config, self.facts.device)
        engine = config.engine
        self.adapters = NodeAdapters(engine.lora, self.facts.spec, self.blame)
        self.kv_identity = self.facts.kv_identity(engine.cache.block_size)
        self.node_id = new_node_id(self.blame)
        self.metrics = NodeMetrics()
        self._kv_events = KVEventsService(self.metrics, self.blame)
        hosts = (config.node.host, config.transfer.kv_host)
        self.tracer = Tracer(config.observability.otlp_endpoint, self.blame, self.node_id)
        self.credentials = Credentials.load(
            self.blame, self.node_id, config.tls, config.auth, hosts
        )
        self.transfer_setup = self.set_up_transfers()
        self.server = NodeServer(
            config.node,
            self.credentials,
            TraceInterceptor(self.tracer, self.node_id) if self.tracer.enabled else None,
        )
        self.address = ""
        self.draining = False
        self.info = pb.NodeInfo()  # the current registration
        self.replicas: list[Replica[S, T]] = []  # at least one once `serve` runs
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- what a role overrides --------------------------------------------------------------

    @abstractmethod
    def set_up_transfers(self) -> TransferSetup:
        """Chooses the connectors; called once `facts` and `credentials` are set. Raises
        ConfigError."""

    @abstractmethod
    def make_transfers(self, ranks: Sequence[RankReady], call: Call) -> T:
        """Makes the role's half of the hand-off for the ranks of one replica, which it reaches by
        `call`."""

    @abstractmethod
    def add_services(self) -> None:
        """Adds the role's gRPC services to `server`."""

    def end_streams(self) -> None:
        """Ends the calls that last as long as the node."""

    def unhealthy_reason(self) -> str:
        """Returns why the node cannot produce tokens at present; empty if it can."""
        any_healthy = any(not each.unhealthy_reason for each in self.replicas)
        return "" if any_healthy else unhealthy_reasons(self.replicas)

    # ---- start → serve → drain → stop -------------------------------------------------------

    async def serve(self, stopping: Callable[[], None] = lambda: None) -> int:
        """Serves until a signal or a failure; returns the exit code. Calls `stopping` when serving
        ends, drained or not."""
        self.address = self.server.bind()
        count = self.config.engine.parallel.data_parallel_size
        if (events := self.config.events.kv_events) is not None:
            self._kv_events.bind(events, count)
        ranks = await start_replicas(self._start_ranks, count)
        try:
            return await self._serve(ranks, stopping)
        finally:
            await stop_ranks(ranks)

    async def _start_ranks(self, replica: int) -> Ranks:
        engine, log = self.config.engine, self.config.log
        ranks = await Ranks.start(self.blame, engine, self.facts, self._extension(), log, replica)
        # Set here because a rank may die while other replicas still start.
        ranks.executor.on_death(partial(self._rank_died, replica))
        return ranks

    def _extension(self) -> ExtensionConfig | None:
        """Configures the connectors that each rank hosts beside its cache, if there are any."""
        setup = self.transfer_setup
        if not setup.connectors:
            return None
        return ExtensionConfig(setup.rank_factory, setup.rank_config, self.config.transfer.kv_host)

    async def _serve(self, ranks: Sequence[Ranks], stopping: Callable[[], None]) -> int:
        try:
            self._fit_context(ranks)
            self.replicas = [self._replica(index, each) for index, each in enumerate(ranks)]
            await self._start()
            timeout = self.config.node.drain_timeout
            return await serve_until_stopped(self._failed, self._drain, timeout)
        finally:
            stopping()
            await self._stop()

    def _fit_context(self, ranks: Sequence[Ranks]) -> None:
        """Sets the context window to what every replica's cache holds (--max-model-len auto)."""
        num_blocks = min(each.ready[0].caches[0].num_blocks for each in ranks)
        self.facts = self.facts.within(self.config.engine, num_blocks)

    def _replica(self, index: int, ranks: Ranks) -> Replica[S, T]:
        engine = self.config.engine
        return Replica(
            index,
            self._name(index),
            self.blame,
            ranks,
            Utilisation.of(ranks, self.facts, engine.parallel),
            self.facts.max_model_len,
            engine.scheduler.engine_stall_timeout,
            self.make_transfers,
            self.metrics,
        )

    def _name(self, replica: int) -> str:
        """Returns a prefix for messages about a replica; empty if there is only one."""
        return f"replica {replica}: " if self.config.engine.parallel.data_parallel_size > 1 else ""

    async def _start(self) -> None:
        export(self.replicas, self.config.engine.parallel.share_cores, self.metrics)
        self.metrics.healthy.set_function(lambda: float(self.ready()[0]))
        self.add_services()
        self.server.add("KVEvents", pb_grpc.add_KVEventsServicer_to_server, self._kv_events)
        self._kv_events.start([each.scheduler.pool for each in self.replicas], self.spawn)
        if self.adapters.enabled:
            await self._serve_adapters()
        period = self.config.engine.scheduler.engine_stall_timeout / _CHECKS
        for replica in self.replicas:
            self.spawn(replica.engine.run())
            for rank in replica.ranks.ready:
                self.spawn(replica.ping(rank.rank, period))
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
        """Deregisters first; jobs that the router placed before that are still taken."""
        await self.server.leave()
        self.draining = True
        await self.server.drain(lambda: not any(each.sessions for each in self.replicas))

    async def _stop(self) -> None:
        self.draining = True
        self._fail_sessions(
            Unavailable(f"{self.node_id} is stopping", code="NODE_STOPPING", blame=self.blame)
        )
        self.end_streams()
        self._kv_events.end()
        await self.server.stop()
        closing = asyncio.gather(*(each.transfers.close() for each in self.replicas))
        try:
            async with asyncio.timeout(_TRANSFERS_STOP):
                await closing
        except TimeoutError:
            logger.warning("KV transfers did not end within %.0f s", _TRANSFERS_STOP)
        for task in self._tasks:
            task.cancel()
        self._kv_events.close()
        await asyncio.to_thread(self.tracer.close)

    async def _watch(self) -> None:
        """Fails the sessions of a replica when a rank stalls, so that routers move them elsewhere.
        Their blocks stay held until the rank continues: `EngineCore.stop` and the KV transfer wait
        for it. Ends the node, which its supervisor restarts, when it does not."""
        period = min(0.5, self.config.engine.scheduler.engine_stall_timeout / _CHECKS)
        while True:
            for replica in self.replicas:
                replica.utilisation.sample()
                if replica.check_health():
                    error = self._stalled(replica.unhealthy_reason)
                    logger.warning("%s; %d requests fail", error, len(replica.sessions))
                    replica.fail_sessions(error)
                if replica.watchdog.hopeless:
                    raise self._stalled(f"{replica.unhealthy_reason}; the node ends")
            await asyncio.sleep(period)

    def _stalled(self, reason: str) -> NodeError:
        message = f"{self.node_id}: {reason}"
        return NodeError(message, code="ENGINE_STALLED", blame=self.blame)

    def _rank_died(self, replica: int, rank: int, reason: str) -> None:
        message = self._name(replica) + reason
        self._fail(NodeError(message, code="RANK_DIED", blame=self.blame))

    def _fail(self, error: BaseException) -> None:
        """Ends the process with this error, unless another one came first."""
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
        """Opens a session on the replica that takes the job; the caller must `close` it.

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
        """Closes a session in the background; the node is not idle until it is closed."""
        self.spawn(self._close(session))

    async def _close(self, session: S) -> None:
        try:
            await session.close()
        except Exception as error:
            logger.exception("a session could not be closed")
            raise NodeError(
                "a session could not be closed and may still hold blocks; the log says why",
                code="SESSION_NOT_CLOSED",
                blame=self.blame,
            ) from error
        finally:
            next(each for each in self.replicas if session in each.sessions).forget(session)
        self.adapters.give_back(session)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in the background, at most until the node stops. An exception of `work` ends
        the node."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    # ---- health, load and registration ------------------------------------------------------

    def ready(self) -> tuple[bool, str]:
        """Returns whether this node, that is at least one replica, could produce tokens for a new
        job, and what is wrong otherwise."""
        reason = "draining" if self.draining else self.unhealthy_reason()
        return not reason, reason or unhealthy_reasons(self.replicas) or "ok"

    def load(self, router: str) -> pb.NodeLoad:
        """Reports the load to the router of this id."""
        return node_load(self.replicas, *self.ready(), router)

    def _info(self) -> pb.NodeInfo:
        parallel = self.config.engine.parallel
        return pb.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            address=self.address,
            model=self.facts.name,
            fingerprint=self.transfer_setup.fingerprint,
            fingerprint_parts={name: told(part) for name, part in self.kv_identity.items()},
            kv_connectors=self.transfer_setup.connectors,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            expert_parallel_size=parallel.expert_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            max_model_len=self.facts.max_model_len,
            block_size=self.config.engine.cache.block_size,
            num_blocks=num_blocks(self.replicas),
            instance=secrets.token_hex(16),
            pid=os.getpid(),
            takes_adapters=self.adapters.enabled,
            adapters=self.adapters.present,
            states_alone=self.facts.spec.kv_groups[0].state,
        )
