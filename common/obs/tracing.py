"""OpenTelemetry spans, sent to `--otlp-endpoint` on a background thread: creating spans never
blocks, and spans are dropped while the receiver is away.

OpenTelemetry's variables configure the rest: OTEL_EXPORTER_OTLP_PROTOCOL (`grpc`, the default, or
`http/protobuf`), OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME …
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from pdserve.common.core.errors import ConfigError

PARENT = "traceparent"  # header and metadata key (W3C Trace Context)
GRPC, HTTP = PROTOCOLS = ("grpc", "http/protobuf")
_PERIOD = 1000.0  # milliseconds between two batches
_FLUSH = 1.0  # seconds to send the last spans at the end of the process
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINT = re.compile(r"(?:https?://)?(?:[\w.-]+|\[[0-9a-fA-F:]+\])(?::\d{1,5})?(?:/\S*)?")


def plain_parent(given: str | None) -> str:
    """Returns a client's `traceparent` if it is valid, else ""."""
    return given if given and _TRACEPARENT.fullmatch(given) else ""


def wall_ns(monotonic: float) -> int:
    """Converts a time of the monotonic clock to wall-clock nanoseconds."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


class Tracer:
    """Creates spans; disabled without an endpoint."""

    def __init__(self, endpoint: str | None = None, service: str = "", instance: str = "") -> None:
        """`service`: the role. `instance`: the process.

        Raises:
            ConfigError: OpenTelemetry is not installed, or its options are invalid.
        """
        self._provider: Any = None
        self._tracer: Any = None
        if endpoint is not None:
            exporter = _exporter(endpoint)
            self._provider = _provider(exporter, service, instance)
            self._tracer = self._provider.get_tracer("pdserve")

    @property
    def enabled(self) -> bool:
        return self._tracer is not None

    def begin(
        self,
        name: str,
        kind: str,
        parent: str = "",
        start: int | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> Any:
        """Starts an OpenTelemetry span, which the caller ends. `kind`: SERVER, CLIENT or INTERNAL;
        `parent`: a traceparent; `start`: wall-clock nanoseconds, default now."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({PARENT: parent} if parent else {})
        return self._tracer.start_span(
            name,
            context,
            SpanKind[kind],
            attributes=dict(attributes or {}),
            start_time=start,
        )

    def close(self) -> None:
        """Sends the remaining spans, for at most _FLUSH seconds."""
        if self._provider is not None:
            last = threading.Thread(target=self._provider.shutdown, daemon=True)
            last.start()
            last.join(_FLUSH)


def traceparent(span: Any) -> str:
    """Returns the traceparent of calls whose spans are children of `span`."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _exporter(endpoint: str) -> Any:
    if not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"--otlp-endpoint {endpoint!r}: give a URL, e.g. http://localhost:4317")
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in names if os.environ.get(name)), GRPC)
    try:
        if protocol == GRPC:
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

            return over_grpc.OTLPSpanExporter(endpoint=url)
        if protocol == HTTP:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

            path = "" if "/" in url.partition("://")[2].rstrip("/") else "/v1/traces"
            return over_http.OTLPSpanExporter(endpoint=url.rstrip("/") + path)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry, which is not installed ({error}): "
            "pip install 'pdserve[otel]'"
        ) from None
    raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol!r}: one of {', '.join(PROTOCOLS)}")


def _provider(exporter: Any, service: str, instance: str) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Log a missing receiver once per lost batch, not at every retry.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    name = os.environ.get("OTEL_SERVICE_NAME", f"pdserve-{service}")
    resource = Resource.create({"service.name": name, "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    period = float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY", _PERIOD))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=period))
    return provider
