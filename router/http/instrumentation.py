"""Metrics of HTTP requests, with names, labels and buckets of prometheus-fastapi-instrumentator,
which vLLM uses."""

from __future__ import annotations

from time import perf_counter

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

from pdserve.router.http.openapi import ROOT_PATH, Handler

PROBES = frozenset({"/metrics", "/health", "/ready", "/load", "/ping", "/version"})
"""The handlers that are not counted: what asks them every few seconds would drown the rest."""
NO_HANDLER = "none"  # no route has this path and method
OTHER_METHOD = "_OTHER"  # OpenTelemetry's name
CLIENT_GONE = 499  # nginx's status
FEW_SECONDS = (0.1, 0.5, 1)
SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30,
    60,
)  # fmt: skip


class HTTPMetrics:
    """Counts requests; the labels are bounded, whatever clients send."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests_total",
            "HTTP requests by method, status (2xx, 4xx …; a client that left: 4xx) and handler: "
            "the route, or none; without probes and scrapes",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds", "Until the end of the answer, or of its stream",
            ("method", "handler"), registry=registry, buckets=FEW_SECONDS,
        )  # fmt: skip
        self._seconds_of_all = Histogram(
            "http_request_duration_highr_seconds", "The same over all handlers, with more buckets",
            registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self._read = Summary(
            "http_request_size_bytes", "The Content-Length of requests; 0: they have none",
            ("handler",), registry=registry,
        )  # fmt: skip
        self._written = Summary(
            "http_response_size_bytes", "The Content-Length of answers; 0: streams have none",
            ("handler",), registry=registry,
        )  # fmt: skip

    def observe(self, request: web.Request, status: int, size: int, seconds: float) -> None:
        """Records an answered request. `size`: of the answer, in bytes."""
        if (handler := handler_of(request)) in PROBES:
            return
        method = request.method if request.method in hdrs.METH_ALL else OTHER_METHOD
        self._requests.labels(method, f"{status // 100}xx", handler).inc()
        self._seconds.labels(method, handler).observe(seconds)
        self._seconds_of_all.observe(seconds)
        self._read.labels(handler).observe(request.content_length or 0)
        self._written.labels(handler).observe(size)


HTTP_METRICS = web.AppKey("http metrics", HTTPMetrics)


@web.middleware
async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Records every request; the outermost middleware, so that it sees all refusals."""
    start, status, size = perf_counter(), CLIENT_GONE, 0
    try:
        response = await handler(request)
        status, size = response.status, response.content_length or 0
        return response
    finally:
        request.app[HTTP_METRICS].observe(request, status, size, perf_counter() - start)


def handler_of(request: web.Request) -> str:
    """Returns the route's path, with {…} for its variables and without --root-path."""
    resource = request.match_info.route.resource
    if resource is None:
        return NO_HANDLER
    return resource.canonical.removeprefix(request.app[ROOT_PATH])
