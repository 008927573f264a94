"""Spans of calls between roles: a call carries its parent span and gets its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any

import grpc

from pdserve.common.core.errors import PdserveError
from pdserve.common.obs.tracing import PARENT, Tracer, plain_parent, traceparent
from pdserve.common.rpc.status import CODE_KEY, REQUEST_ID_KEY

SPANS = {
    "/pdserve.v1.Prefill/Run": "prefill",
    "/pdserve.v1.Decode/Run": "decode",
    "/pdserve.v1.KVTransfer/Commit": "commit",
}

traceparent_var: ContextVar[str] = ContextVar("traceparent", default="")
"""The span that the current task works for; calls between nodes carry it."""
_span_var: ContextVar[Any] = ContextVar("span", default=None)
"""The span of the call that is being served."""


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call within the current span."""
    parent = traceparent_var.get()
    return ((PARENT, parent),) if parent else ()


def event_noter() -> Callable[[Any], None]:
    """Returns a function that adds events to the span of the current call, from any task."""
    span = _span_var.get()
    return lambda event: None if span is None else _note(span, event)


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Gives the calls named above a span on this node, whose events are the answers of a stream,
    and what `event_noter` notes."""

    def __init__(self, tracer: Tracer, node_id: str) -> None:
        self._tracer = tracer
        self._node_id = node_id

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        name = SPANS.get(details.method)
        if handler is None or name is None:
            return handler

        async def unary(request: Any, context: Any) -> Any:
            with self._span(name, details):
                return await handler.unary_unary(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._span(name, details) as span:
                async with aclosing(handler.unary_stream(request, context)) as answers:
                    async for answer in answers:
                        _note(span, answer)
                        yield answer

        coding = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, *coding)
        return grpc.unary_unary_rpc_method_handler(unary, *coding)

    @contextmanager
    def _span(self, name: str, details: Any) -> Iterator[Any]:
        metadata = dict(details.invocation_metadata or ())
        service, _, method = details.method[1:].rpartition("/")
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "pdserve.node.id": self._node_id,
        }
        if request_id := metadata.get(REQUEST_ID_KEY):
            attributes["pdserve.request.id"] = request_id
        parent = plain_parent(metadata.get(PARENT))
        span = self._tracer.begin(name, "SERVER", parent, attributes=attributes)
        traceparent_var.set(traceparent(span))
        _span_var.set(span)
        try:
            yield span
        except PdserveError as error:
            span.set_attribute("error.type", error.code)
            raise
        except grpc.aio.AbortError:
            span.set_attribute("error.type", "aborted")
            raise
        finally:
            span.end()


def _note(span: Any, answer: Any) -> None:
    """Adds an event for an answer, with its numbers; a failure also marks the span as failed."""
    if (kind := answer.WhichOneof("event")) is None:
        return
    told = getattr(answer, kind)
    if kind == "ended" and told.HasField("failure"):
        span.set_attribute("error.type", told.failure.metadata.get(CODE_KEY, "aborted"))
    numbers = {f.name: value for f, value in told.ListFields() if isinstance(value, (int, float))}
    span.add_event(kind, {f"pdserve.{name}": value for name, value in numbers.items()})
