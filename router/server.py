"""The router process: start → serve → drain → stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from time import monotonic

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.common.config.router import OPEN_FILES, RouterConfig
from pdserve.common.core.host import open_file_limit
from pdserve.common.core.waits import saying
from pdserve.common.http.connection import Limits
from pdserve.common.obs.exposition import ROUTER_NAMES, Exposition
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.obs.process import propagate_failure, serve_until_stopped, write_ports
from pdserve.common.obs.tracing import Tracer
from pdserve.common.rpc.auth import ROUTER, new_node_id
from pdserve.common.rpc.channels import Credentials
from pdserve.common.rpc.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.common.rpc.server import GrpcServer
from pdserve.router.api.app_state import AppState
from pdserve.router.api.auth import APIKeys
from pdserve.router.api.parsers.detect import resolved
from pdserve.router.api.parsers.tool_parser import tool_parser
from pdserve.router.api.preprocess_worker import Spec
from pdserve.router.api.preprocess_workers import PreprocessWorkers
from pdserve.router.api.trial import load_tried
from pdserve.router.cluster.adapter_sync import AdapterSync
from pdserve.router.cluster.adapters import AdaptersCollector, read_adapters
from pdserve.router.cluster.probes import probe_nodes
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.registry_service import (
    MAX_MESSAGE_NBYTES,
    ElsewhereRegistry,
    RegistryService,
)
from pdserve.router.grpc.door import MAX_NBYTES, ClientDoor, Messages, max_streams
from pdserve.router.grpc.service import InferenceServicer
from pdserve.router.http.app import make_app
from pdserve.router.http.cors import CORS
from pdserve.router.http.request import Bodies
from pdserve.router.http.server import (
    LAME_DUCK,
    HTTPServer,
    https_context,
    https_renewals,
    load_pair,
)
from pdserve.router.requests.pipeline import Pipeline
from pdserve.router.requests.trace import RequestTraces
from pdserve.router.workers.siblings import Siblings

logger = logging.getLogger(__name__)

_HOUSEKEEPING = 1.0  # seconds between two rounds, at most
_PAUSE = 0.05  # seconds at least: a thousand nodes may come at once
_MIN_CONNECTIONS = 64  # HTTP's, however few files the process may open
_DRAIN_GRACE = 5.0  # seconds past the drain time-out, in which clients are told
_GRPC_GRACE = 1.0  # seconds that gRPC calls in flight get after the drain


async def serve(config: RouterConfig, stopping: Callable[[], None] = lambda: None) -> int:
    """Runs the router until a signal and returns the exit code. Calls `stopping` when it has
    stopped serving.

    Raises:
        ConfigError: the model or a certificate cannot be read, or an address cannot be bound.
    """
    router = RouterServer(config)
    await router.start()
    try:
        return await router.run_until_stopped()
    finally:
        stopping()
        await router.stop()


class RouterServer:
    """The router's parts, and their start and stop."""

    def __init__(self, config: RouterConfig, siblings: Siblings | None = None) -> None:
        """`siblings`: other workers, which listen at the same ports for clients."""
        self._config = config
        self._siblings = siblings or Siblings()
        self._shares_ports = siblings is not None
        server, routing = config.server, config.routing
        node_id = new_node_id(ROUTER)
        self._credentials = Credentials.load(
            ROUTER, node_id, config.tls, config.auth, (server.host,)
        )
        self._https = https_context(server)
        self._https_files = https_renewals(server)
        with saying("loading the tokenizer"):
            self._model, cheap = load_tried(config.model)  # forks: before gRPC has threads
        model = self._model
        self._channels = self._credentials.channels()
        self._registry = Registry(routing, router_id=node_id)
        adapters = read_adapters(config.lora, model)
        metrics = RouterMetrics(model.max_model_len)
        keys = APIKeys(
            server.api_key,
            server.admin_api_key,
            salted=server.cache_salt_per_key,
            weights=server.api_key_weights,
        )
        self._tracer = Tracer(config.observability.otlp_endpoint, "router", node_id)
        self._pipeline = Pipeline(
            *(routing, self._registry, model.tokenizer, self._channels, metrics, model.vocab_size),
            RequestTraces(self._tracer, model.name),
            adapters,
            keys.weights,
            server.stream_interval,
        )
        metrics.registry.register(PipelineCollector(self._pipeline))
        if config.lora.enable_lora:
            metrics.registry.register(AdaptersCollector(adapters, config.lora.max_loras))
        prefix = config.observability.metrics_prefix
        shown = Exposition(metrics.registry, model.name, prefix, ROUTER_NAMES)
        chat = resolved(config.chat, model.tokenizer.chat_template)
        spec = Spec(asdict(config.model), asdict(config.log), asdict(chat))
        self._workers = PreprocessWorkers(spec)
        self._state = AppState(
            pipeline=self._pipeline,
            served=model,
            window=lambda: self._registry.window,
            metrics=metrics,
            adapters=adapters,
            keys=keys,
            chat=chat,
            priorities=routing.scheduling_policy == "priority",
            tool_parser=tool_parser(chat.calls) if chat.calls else None,
            workers=self._workers,
            cheap_template=cheap,
            event_keys=key.derive("event ids") if (key := self._credentials.key) else (),
        )
        bodies = Bodies(server.max_body_size, routing.queue_timeout, routing.max_client_share)
        cors, root_path, limit = CORS.of(server), server.root_path or "", server.max_body_size
        self._sync = AdapterSync(
            config.lora, server.runtime_lora_dir, model, adapters, self._registry, self._channels
        )
        by_clients = self._sync if server.runtime_lora_dir is not None else None
        self._app = make_app(
            *(self._state, shown, limit, bodies, cors, root_path, server.ui, by_clients),
            self._siblings,
        )
        self._inference = InferenceServicer(self._state, server.write_timeout)
        self._grpc = self._inference_server()
        self._registrations = self._registry_server()
        self._draining = False
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _inference_server(self) -> GrpcServer:
        # A client's message may have a prompt that fits the window, as token ids or as text, or the
        # ids of an answer that does, and no more bytes than over HTTP.
        config, routing, state = self._config.server, self._config.routing, self._state
        limit = min(config.max_body_size, max(MAX_NBYTES, 48 * self._model.max_model_len))
        messages = Messages(limit, routing.queue_timeout, routing.max_client_share)
        streams = max_streams(routing)
        door = ClientDoor(state.keys, messages, state.refused, streams)
        server = GrpcServer(
            door, limit, shares_port=self._shares_ports, max_streams=streams, patient=True
        )
        server.add(
            inference_pb2.DESCRIPTOR.services_by_name["Inference"],
            inference_pb2_grpc.add_InferenceServicer_to_server,
            self._inference,
        )
        server.server.add_generic_rpc_handlers((ElsewhereRegistry(self._registry),))
        return server

    def _registry_server(self) -> GrpcServer:
        service = RegistryService(
            *(self._registry, self._model.name, self._config.routing),
            self._siblings.registry_ports,
        )
        auth = self._credentials.interceptor()
        auth.on_refused = service.refused
        server = GrpcServer(auth, MAX_MESSAGE_NBYTES, shares_port=self._shares_ports)
        server.add(
            cluster_pb2.DESCRIPTOR.services_by_name["Registry"],
            cluster_pb2_grpc.add_RegistryServicer_to_server,
            service,
        )
        return server

    async def start(self) -> None:
        """Listens on all three ports."""
        config, tls = self._config.server, self._credentials.tls
        ports = {
            "grpc": self._grpc.bind(config.host, config.grpc_port, tls),
            "registry": self._registrations.bind(
                config.host, config.registry_port, tls, "--registry-port"
            ),
        }
        most = max(_MIN_CONNECTIONS, open_file_limit() - OPEN_FILES)
        limits = Limits(config.timeout_keep_alive, config.write_timeout, most)
        self._http = await HTTPServer.start(
            self._app, config.host, config.port, self._https, limits, self._shares_ports
        )
        ports["http"] = self._http.port
        await self._grpc.start()
        await self._registrations.start()
        await self._registrations.set_healthy(True)
        logger.info(
            "serving %s: %s on %s:%d, gRPC%s on port %d; nodes register on port %d%s",
            self._model.name, "HTTPS" if self._https else "HTTP", config.host, ports["http"],
            " over mutual TLS" if tls else "", ports["grpc"], ports["registry"],
            " with the cluster key" if self._credentials.key else "",
        )  # fmt: skip
        timeout = self._config.routing.heartbeat_timeout
        period = min(_HOUSEKEEPING, timeout / 4)
        self._tasks = [
            asyncio.create_task(self._registry.clock.run()),
            asyncio.create_task(self._keep_house(period)),
            asyncio.create_task(self._pipeline.history.run()),
            asyncio.create_task(probe_nodes(self._registry, self._channels, timeout)),
        ]
        if self._config.lora.enable_lora:
            self._tasks.append(asyncio.create_task(self._sync.keep()))
        if self._pipeline.caches.wanted:
            self._tasks.append(asyncio.create_task(self._pipeline.caches.run()))
        for task in self._tasks:
            propagate_failure(task, self._failed)
        self._ports = ports

    async def run_until_stopped(self) -> int:
        """Returns the exit code."""
        if (ports_file := self._config.server.ports_file) is not None:
            write_ports(ports_file, self._ports)
        limit = self._config.server.drain_timeout + _DRAIN_GRACE
        return await serve_until_stopped(self._failed, self._drain, limit)

    async def _drain(self) -> None:
        """Refuses new requests, and waits for those in flight."""
        self._draining = True
        timeout = self._config.server.drain_timeout
        await self._grpc.set_healthy(False)
        has_balancer = self._http.has_balancer
        await asyncio.gather(self._http.stop(timeout), self._drain_grpc(timeout, has_balancer))

    async def _drain_grpc(self, timeout: float, has_balancer: bool) -> None:
        """gRPC cancels calls that come while it stops, so it first waits until none do."""
        until = monotonic() + timeout
        await self._inference.quiet(min(timeout, LAME_DUCK), has_balancer)
        # Health watches would last for minutes: they end with `stop`.
        self._tasks.append(asyncio.create_task(self._grpc.stop(timeout + _DRAIN_GRACE)))
        await self._inference.drain(max(0.0, until - monotonic()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._http.stop(0)
        await asyncio.gather(self._grpc.stop(_GRPC_GRACE), self._registrations.stop(0))
        await self._channels.close()
        await self._workers.close()
        await asyncio.to_thread(self._tracer.close)

    async def _keep_house(self, period: float) -> None:
        """Sets gRPC's health to /ready's, moves requests off silent nodes, forgets nodes that are
        silent for long, counts what other routers have placed, and closes the connections to nodes
        that left; serves HTTPS with a certificate that has been renewed."""
        while True:
            await self._grpc.set_healthy(self._pipeline.ready()[0] and not self._draining)
            if self._https is not None and self._https_files.renewed():
                load_pair(self._https, self._config.server)
            self._registry.sweep()
            self._pipeline.look_around()
            addresses = {node.info.address for node in self._registry.connected()}
            await self._channels.keep(addresses)
            await asyncio.sleep(_PAUSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await self._registry.wait_for_change()


class PipelineCollector(Collector):
    """Metrics that are read from the router's state when it is scraped."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        admission = self._pipeline.admission
        for name, help, value in (
            ("num_requests_running", "Requests being served", admission.running),
            ("num_requests_waiting", "Requests waiting for a slot", admission.waiting),
            (
                "longest_standing_seconds",
                "Longest time that a running request has made no progress",
                self._pipeline.timelines.longest_standing(),
            ),
            ("ready", "1 while a request could be served", float(self._pipeline.ready()[0])),
        ):
            yield GaugeMetricFamily(f"pdserve_{name}", help, value)
        reasons = GaugeMetricFamily(
            "pdserve_num_requests_waiting_by_reason",
            "Requests waiting, by reason: capacity (a slot)",
            labels=("reason",),
        )
        reasons.add_metric(("capacity",), admission.waiting)
        yield reasons
        known = GaugeMetricFamily(
            "pdserve_prefix_index_blocks",
            "Blocks that nodes have cached, by their KV events",
            labels=("role",),
        )
        for role, count in self._pipeline.caches.num_blocks().items():
            known.add_metric((role,), count)
        yield known
        yield CounterMetricFamily(
            "pdserve_prefix_index_evicted_blocks",
            "Blocks that a full prefix index has forgotten",
            self._pipeline.caches.index.num_evicted,
        )
        nodes = GaugeMetricFamily("pdserve_nodes", "Registered nodes", labels=("role", "state"))
        none = {(role, "ready"): 0 for role in ("prefill", "decode", "both")}
        for labels, count in (none | self._pipeline.view.counts()).items():
            nodes.add_metric(labels, count)
        yield nodes
        trips = GaugeMetricFamily("pdserve_breaker_trips", "Breakers opened on present nodes")
        nodes_now = self._pipeline.registry.nodes()
        trips.add_metric((), sum(node.breaker.trips for node in nodes_now))
        yield trips
