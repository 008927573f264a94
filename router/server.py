"""The router process: start → serve → drain → stop."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.common.config.router import RouterConfig
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.obs.process import propagate_failure, serve_until_stopped, write_ports
from pdserve.common.rpc.auth import ROUTER, new_node_id
from pdserve.common.rpc.channels import Channels, Credentials
from pdserve.common.rpc.pb import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.common.rpc.server import GrpcServer
from pdserve.router.auth import APIKeys
from pdserve.router.grpc_service import InferenceServicer
from pdserve.router.http.app import make_app
from pdserve.router.http.connection import Limits
from pdserve.router.http.request import Bodies
from pdserve.router.http.server import HTTPServer, https_context
from pdserve.router.pipeline import Pipeline
from pdserve.router.preprocess_workers import PreprocessWorkers, Spec
from pdserve.router.registry import Registry
from pdserve.router.registry_service import (
    MAX_MESSAGE_NBYTES,
    ElsewhereRegistry,
    RegistryService,
    probe_nodes,
)
from pdserve.router.served_model import load_served_model
from pdserve.router.serving import Serving

logger = logging.getLogger(__name__)

_HOUSEKEEPING = 1.0  # seconds, at most
# Bytes: parameters at their bounds, and a prompt as long as most windows. gRPC holds one message
# for each call, however many a client makes, and what it is parsed into is ten times as large.
_MAX_MESSAGE = 2**18
_GRPC_GRACE = 1.0  # seconds gRPC calls in flight get after the drain


async def serve(config: RouterConfig, stopping: Callable[[], None] = lambda: None) -> int:
    """Runs the router until a signal; returns the exit code. `stopping` is called when serving is
    over.

    Raises:
        ConfigError: the model or a certificate cannot be read, or an address cannot be bound.
    """
    credentials, https, keys = _secrets(config)
    model = load_served_model(config.model)
    registry, metrics = Registry(config.routing), RouterMetrics()
    channels = credentials.channels()
    pipeline = Pipeline(
        config.routing, registry, model.tokenizer, channels, metrics, model.vocab_size
    )
    metrics.registry.register(PipelineCollector(pipeline))
    workers = PreprocessWorkers(_spec(config))
    serving = Serving(
        pipeline=pipeline,
        model=model,
        keys=keys,
        trust_request_chat_template=config.server.trust_request_chat_template,
        workers=workers,
    )
    inference = InferenceServicer(serving, config.server.write_timeout)
    grpc_server = _inference_server(inference, _max_message(config, model.max_model_len))
    grpc_port = grpc_server.bind(config.server.host, config.server.grpc_port, credentials.tls)
    registration = RegistryService(registry, model.name, config.routing.heartbeat_interval)
    registry_server = _registry_server(registration, credentials)
    registry_port = registry_server.bind(
        config.server.host, config.server.registry_port, credentials.tls, "--registry-port"
    )
    size, routing = config.server.max_body_size, config.routing
    bodies = Bodies(size, routing.queue_timeout, routing.max_client_share)
    app = make_app(serving, metrics.registry, size, bodies)
    limits = Limits(config.server.timeout_keep_alive, config.server.write_timeout)
    http = await HTTPServer.start(app, config.server.host, config.server.port, https, limits)
    await grpc_server.start()
    await registry_server.start()
    await registry_server.set_healthy(True)
    logger.info(
        "serving %s: %s on %s:%d, gRPC%s on port %d; nodes register on port %d%s",
        model.name, "HTTPS" if https else "HTTP", config.server.host, http.port,
        " over mutual TLS" if credentials.tls else "", grpc_port, registry_port,
        " with the cluster key" if credentials.key else "",
    )  # fmt: skip
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    period = min(_HOUSEKEEPING, config.routing.heartbeat_timeout / 4)
    housekeeping = asyncio.create_task(
        _keep_house(grpc_server, pipeline, registry, channels, period)
    )
    probing = asyncio.create_task(probe_nodes(registry, channels, period))
    for task in (housekeeping, probing):
        propagate_failure(task, failed)
    timeout = config.server.drain_timeout
    try:
        if config.server.ports_file is not None:
            ports = {"http": http.port, "grpc": grpc_port, "registry": registry_port}
            write_ports(config.server.ports_file, ports)
        return await serve_until_stopped(failed, lambda: http.stop(timeout), timeout + 5)
    finally:
        stopping()
        housekeeping.cancel()
        probing.cancel()
        await http.stop(0)
        await asyncio.gather(grpc_server.stop(_GRPC_GRACE), registry_server.stop(_GRPC_GRACE))
        await channels.close()
        await workers.close()


def _secrets(config: RouterConfig) -> tuple[Credentials, ssl.SSLContext | None, APIKeys]:
    """What protects gRPC between roles, the HTTP port, and the use of both."""
    hosts = (config.server.host,)
    keys = APIKeys(config.server.api_key, salted=config.server.cache_salt_per_key)
    own = Credentials.load(ROUTER, new_node_id(ROUTER), config.tls, config.auth, hosts)
    return own, https_context(config.server), keys


def _spec(config: RouterConfig) -> Spec:
    trust = config.server.trust_request_chat_template
    return Spec(asdict(config.model), asdict(config.log), trust)


def _max_message(config: RouterConfig, max_model_len: int) -> int:
    """Bytes of a client's gRPC message: a prompt that fits the window, as token ids or as text,
    and no more than over HTTP."""
    return min(config.server.max_body_size, max(_MAX_MESSAGE, 8 * max_model_len))


def _inference_server(inference: InferenceServicer, max_message: int) -> GrpcServer:
    server = GrpcServer(max_message=max_message)
    server.add(
        inference_pb2.DESCRIPTOR.services_by_name["Inference"],
        inference_pb2_grpc.add_InferenceServicer_to_server,
        inference,
    )
    server.server.add_generic_rpc_handlers((ElsewhereRegistry(),))
    return server


def _registry_server(registry: RegistryService, credentials: Credentials) -> GrpcServer:
    server = GrpcServer(credentials.interceptor(), MAX_MESSAGE_NBYTES)
    server.add(
        cluster_pb2.DESCRIPTOR.services_by_name["Registry"],
        cluster_pb2_grpc.add_RegistryServicer_to_server,
        registry,
    )
    return server


async def _keep_house(
    server: GrpcServer, pipeline: Pipeline, registry: Registry, channels: Channels, period: float
) -> None:
    """gRPC health follows /ready; requests on silent nodes move, nodes silent for long are
    forgotten, and so are the connections to nodes that left."""
    while True:
        await server.set_healthy(pipeline.ready()[0])
        registry.sweep()
        await channels.keep({node.info.address for node in registry.connected()})
        with suppress(TimeoutError):
            async with asyncio.timeout(period):
                await registry.wait_for_change()


class PipelineCollector(Collector):
    """The router's present state, read when it is scraped."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterator[Metric]:
        admission = self._pipeline.admission
        for name, help, value in (
            ("num_requests_running", "Requests being served", admission.running),
            ("num_requests_waiting", "Requests waiting for a place", admission.waiting),
        ):
            yield GaugeMetricFamily(f"pdserve:{name}", help, value)
        nodes = GaugeMetricFamily("pdserve:nodes", "Registered nodes", labels=("role", "state"))
        for labels, count in self._pipeline.view.counts().items():
            nodes.add_metric(labels, count)
        yield nodes
        trips = GaugeMetricFamily("pdserve:breaker_trips", "Breakers opened on present nodes")
        nodes_now = self._pipeline.registry.nodes()
        trips.add_metric((), sum(node.breaker.trips for node in nodes_now))
        yield trips
