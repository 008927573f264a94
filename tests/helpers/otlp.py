"""Receives spans over OTLP, like a collector."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    name: str
    service: str
    trace_id: str
    id: str
    parent: str
    start: int  # ns
    end: int
    attributes: dict[str, Any]
    events: tuple[str, ...]


def spans_of(message: Any) -> Iterator[Span]:
    """Returns the spans of an ExportTraceServiceRequest."""
    for of_process in message.resource_spans:
        service = str(_values(of_process.resource.attributes)["service.name"])
        for scope in of_process.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    service,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _values(span.attributes),
                    tuple(event.name for event in span.events),
                )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Any, context: Any) -> Any:
        self._spans += list(spans_of(request))  # atomic: a reader sees a whole batch or none of it
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, names: set[str]) -> list[Span]:
        """Waits until the trace has spans of these names; returns all of its spans."""
        found = [span for span in tuple(self._spans) if span.trace_id == trace_id]
        return found if names <= {span.name for span in found} else []

    def __enter__(self) -> Receiver:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop(None).wait()
