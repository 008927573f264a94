"""A request's span, by OpenTelemetry's conventions for generative AI, and its stages beneath it.

Attributes that vLLM has beside those conventions (`gen_ai.latency.…`) have its names.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from pdserve.common.core.errors import PdserveError
from pdserve.common.core.request import Timeline
from pdserve.common.obs.tracing import Tracer, traceparent, wall_ns
from pdserve.router.requests.generation import GenerationRequest, GenerationStats
from pdserve.router.requests.stages import RequestArrival, Stages


class RequestTraces:
    """Makes the span of each request."""

    def __init__(self, tracer: Tracer, model_name: str = "") -> None:
        self._tracer = tracer
        self.model_name = model_name

    def begin(
        self, request: GenerationRequest, arrival: RequestArrival | None, stages: Stages
    ) -> RequestTrace | None:
        """Begins the request's span; None: spans are off."""
        if not self._tracer.enabled:
            return None
        began = wall_ns(stages.start)
        operation = arrival.operation if arrival is not None else "text_completion"
        span = self._tracer.begin(
            f"{operation} {self.model_name}",
            "SERVER",
            arrival.traceparent if arrival is not None else "",
            began,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "pdserve",
                "gen_ai.request.model": self.model_name,
                "gen_ai.response.model": self.model_name,
                "gen_ai.response.id": request.request_id,
                "gen_ai.request.id": request.request_id,
                **_asked(request),
            },
        )
        return RequestTrace(self._tracer, span, began, stages)


class RequestTrace:
    """One request's span."""

    def __init__(self, tracer: Tracer, span: Any, began: int, stages: Stages) -> None:
        """`began`: wall clock, ns."""
        self._tracer = tracer
        self._span = span
        self._began = began
        self._stages = stages
        self.parent = traceparent(span)

    @property
    def recording(self) -> bool:
        """False: the sampler leaves it out, here and on the nodes."""
        return bool(self._span.is_recording())

    def finished(self, stats: GenerationStats, reasons: Sequence[str]) -> None:
        """Notes that every choice has finished."""
        if self.recording:
            self._span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": list(map(str, reasons)),
                    "gen_ai.usage.input_tokens": stats.prompt_tokens,
                    "gen_ai.usage.output_tokens": stats.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
                    **_latencies(stats.timeline),
                }
            )
        self._end()

    def failed(self, error: PdserveError) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", error.code)
        self._span.set_status(Status(StatusCode.ERROR, error.message))
        self._end()

    def _end(self) -> None:
        stages = self._stages.stages(monotonic()) if self.recording else ()
        for stage in stages:
            start = self._began + int(stage.start * 1e9)
            child = self._tracer.begin(
                stage.name, "INTERNAL", self.parent, start, {"pdserve.node.id": stage.node}
            )
            child.end(start + int(stage.seconds * 1e9))
        self._span.end()


def _asked(request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stop_sequences": list(request.stop),
        "gen_ai.request.choice.count": request.n,
    }


def _latencies(line: Timeline) -> dict[str, float]:
    first, end = line.first_token or 0.0, line.finished or 0.0
    return {
        "gen_ai.latency.time_in_queue": (line.queued or 0.0) + line.prefill_queue_seconds,
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.time_in_model_prefill": line.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": end - first,
        "gen_ai.latency.e2e": end,
    }
