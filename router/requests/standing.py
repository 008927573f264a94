"""Why a running request makes no progress: what it waits for, the time limit after which the
router ends it, and its previous failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from pdserve.common.core.printable import printable
from pdserve.router.requests.request_state import RequestState
from pdserve.router.requests.stages import ROUTER, Phase

MAX_MESSAGE = 500  # characters of a failure that are shown

_AT_WORK = {
    Phase.RESERVE: "{} to reserve KV blocks",
    Phase.PREFILL: "{} to compute the prompt",
    Phase.HAND_OFF: "{} to get the rest of the KV",
    Phase.DECODE: "{} to make the next token",
    Phase.STREAM: "the decode node to take over",
    Phase.MIGRATION: "another try",
}


Look = Callable[[str], dict[str, Any]]
"""Returns what is known of a node, by id: `ClusterView.glance`."""


@dataclass(frozen=True, slots=True)
class Standing:
    waits_for: str
    node: dict[str, Any] | None  # the state of the node that must act, if any
    seconds: float  # since its last progress
    gives_up_in: float | None  # seconds until it fails without progress; None: no time limit
    failures: int  # of nodes and transfers, so far
    last_error: str | None


def standing_of(state: RequestState, look: Look) -> Standing:
    now, deadline, retries = monotonic(), state.deadline, state.retries
    span = state.stages.spans[-1]
    waits_for, node = deadline.waits_for, None
    if not waits_for:
        node = None if span.node == ROUTER else look(span.node)
        waits_for = _AT_WORK.get(span.phase, "the router").format(span.node)
    left, error = deadline.left(), retries.last_error
    return Standing(
        waits_for=waits_for,
        node=node,
        seconds=round(now - deadline.moved, 3),
        gives_up_in=None if left is None else round(left, 3),
        failures=retries.failures,
        last_error=None if error is None else printable(str(error), MAX_MESSAGE),
    )
