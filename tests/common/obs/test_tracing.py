"""Spans: what they need, where they go."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from time import monotonic

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from otlp import Span, spans_of
from pdserve.common.core.errors import ConfigError
from pdserve.common.obs.tracing import Tracer, plain_parent, traceparent, wall_ns


@pytest.fixture
def collected() -> Iterator[tuple[str, list[Span]]]:
    """(URL of a receiver over HTTP, what it has received)"""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            spans.extend(spans_of(trace_service_pb2.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", spans
    server.shutdown()
    server.server_close()


def test_spans_go_over_http_too_and_the_last_ones_at_the_end(
    collected: tuple[str, list[Span]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, spans = collected
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    tracer = Tracer(url, "router", "router-1")
    outer = tracer.begin("outer", "SERVER", start=wall_ns(monotonic() - 5))
    inner = tracer.begin("inner", "INTERNAL", traceparent(outer), attributes={"a": [1, 2]})
    inner.end()
    outer.end()
    tracer.close()
    first, second = spans
    assert (first.name, first.parent, first.attributes) == ("inner", second.id, {"a": [1, 2]})
    assert (second.service, second.parent) == ("pdserve-router", "")
    assert 4.5e9 < second.end - second.start < 60e9


def test_a_missing_dependency_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"give a URL, e\.g\. http://localhost:4317"):
        Tracer("not a url", "router", "r")
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "pigeon")
        with pytest.raises(ConfigError, match="'pigeon': one of grpc, http/protobuf"):
            Tracer("http://localhost:4317", "router", "r")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[otel\]'"):
        Tracer("localhost:4317", "router", "r")
    assert not Tracer(None, "router", "r").enabled


def test_a_client_s_parent_is_checked() -> None:
    good = f"00-{'ab' * 16}-{'cd' * 8}-01"
    assert plain_parent(good) == good
    for odd in (None, "", "00-1-2-3", f"{good}\n", "x" * 100_000):
        assert plain_parent(odd) == ""
