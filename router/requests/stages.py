"""The stages of a request, consecutive and without gaps.

The router's monotonic clock cuts the request's time into *phases*, at the moments when it sends a
call and when an answer is there:

    receive │ tokenize │ queue │ reserve │ queue │ prefill │ stream │ hand off │ decode │ stream
                                  on D             on P                on D       on D

Within a phase the node's own clock counts: its answer has the times of its stages. No two clocks
are compared, so they may differ. The rest of the phase is the network between the two, and has its
own stage. When a node fails, the time that it has not reported is `migration`, until another node
is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic

from pdserve.common.core.request import TimelineStage
from pdserve.router.requests.slo import NO_SLO, SLO

ROUTER = "router"


class Phase(StrEnum):
    RECEIVE = "receive"
    TOKENIZE = "tokenize"
    QUEUE = "queue"
    RESERVE = "reserve"
    PREFILL = "prefill"
    HAND_OFF = "hand_off"
    DECODE = "decode"
    STREAM = "stream"
    MIGRATION = "migration"


STAGES = (
    *("receive", "tokenize", "queue", "decode_slot", "prefill_queue", "prefill_compute"),
    *("first_token", "kv_transfer", "verification", "decode", "decode_compute", "decode_queue"),
    *("preempted", "migration", "detokenize_stream", "network"),
)
"""The names of all stages. The page has a colour for each."""

# The stage of the time in a phase that its node does not report.
_REST = {
    Phase.RESERVE: "network",
    Phase.PREFILL: "first_token",
    Phase.HAND_OFF: "network",
    Phase.DECODE: "detokenize_stream",
    Phase.STREAM: "detokenize_stream",
}


SESSION_ID = "x-session-id"
"""Header and metadata key by which clients say which of their requests belong together."""


@dataclass(slots=True)
class RequestArrival:
    """The arrival of a request, in times of the router's monotonic clock. The server that
    reads the request sets it."""

    received: float = field(default_factory=monotonic)  # the head was there
    read: float | None = None  # the body was there, too
    wants_timeline: bool = False
    operation: str = "text_completion"  # OpenTelemetry's name of it
    traceparent: str = ""  # the client's span
    slo: SLO = NO_SLO  # as its headers say
    session: str = ""  # which of the client's requests it belongs to


arrival_var: ContextVar[RequestArrival | None] = ContextVar("arrival", default=None)
"""The arrival of the request that the current task serves; tasks that it starts inherit it."""


@dataclass(slots=True)
class Span:
    """One phase of one request."""

    phase: Phase
    node: str
    start: float  # monotonic
    told: dict[str, float] = field(default_factory=dict)  # seconds by stage, in their order
    told_at: float = 0.0  # monotonic; 0: not yet


class Stages:
    """The stages of one request."""

    def __init__(self, arrival: RequestArrival | None = None) -> None:
        now = monotonic()
        self.start = now if arrival is None else arrival.received
        self.timed = arrival is not None and arrival.wants_timeline  # decode nodes split theirs
        self.spans: list[Span] = []
        if arrival is not None:
            self._enter(Phase.RECEIVE, ROUTER, arrival.received)
            self._enter(Phase.TOKENIZE, ROUTER, arrival.read or now)
        self._enter(Phase.QUEUE, ROUTER, now)

    @property
    def phase(self) -> Phase:
        return self.spans[-1].phase

    def enter(self, phase: Phase, node: str = ROUTER) -> None:
        """Starts a phase now."""
        self._enter(phase, node, monotonic())

    def leave(self, *phases: Phase, to: Phase, node: str = ROUTER) -> None:
        """Enters a phase if it is in one of `phases`: two nodes report a hand-off in any order."""
        if self.phase in phases:
            self.enter(to, node)

    def told(self, phase: Phase, **seconds: float) -> None:
        """Notes the times that the node reports for the last such phase, which may be over."""
        for span in reversed(self.spans):
            if span.phase is phase:
                span.told, span.told_at = seconds, monotonic()
                return

    def failed(self) -> None:
        """Leaves the current node: its last reported times stay, the rest is migration."""
        last = self.spans[-1]
        if last.phase is not Phase.MIGRATION:
            self._enter(Phase.MIGRATION, ROUTER, last.told_at or last.start)

    def stages(self, end: float) -> tuple[TimelineStage, ...]:
        """Returns the stages of some length until `end` (monotonic), each from where the last one
        ends."""
        found: list[TimelineStage] = []
        for name, node, start, seconds in self._parts(end):
            last = found[-1] if found else None
            if last is not None and (last.name, last.node) == (name, node):
                found[-1] = TimelineStage(name, node, last.start, last.seconds + seconds)
            elif seconds > 0.0:
                found.append(TimelineStage(name, node, start - self.start, seconds))
        return tuple(found)

    def _enter(self, phase: Phase, node: str, at: float) -> None:
        if self.spans and self.spans[-1].start > at:
            at = self.spans[-1].start
        self.spans.append(Span(phase, node, at))

    def _parts(self, end: float) -> Iterator[tuple[str, str, float, float]]:
        """(stage, node, start, seconds)"""
        ends = [*(span.start for span in self.spans[1:]), end]
        for span, until in zip(self.spans, ends, strict=True):
            at = span.start
            for name, seconds in span.told.items():
                seconds = min(max(seconds, 0.0), until - at)
                yield name, span.node, at, seconds
                at += seconds
            rest = _REST.get(span.phase, span.phase.value)
            node = span.node if span.phase is Phase.PREFILL else ROUTER
            if span.phase is Phase.DECODE and not self.timed:
                rest, node = "decode", span.node  # its node does not report its times
            yield rest, node, at, max(until - at, 0.0)
