"""How a request came to the router: noted where it comes in, read where it is served."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic


@dataclass(slots=True)
class Arrival:
    """Moments by the router's monotonic clock."""

    received: float = field(default_factory=monotonic)  # its head was there
    read: float | None = None  # all of it was
    wants_timeline: bool = False
    operation: str = "text_completion"  # as OpenTelemetry names it
    traceparent: str = ""  # the client's span


arrival_var: ContextVar[Arrival | None] = ContextVar("arrival", default=None)
"""The arrival of the request that the current task works for; what it awaits inherits it."""
