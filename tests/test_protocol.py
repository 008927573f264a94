"""The two tables of the hand-off: every cell, and every path."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Any

import pytest

from kv_transfer.protocol import (
    SINK,
    SOURCE,
    Action,
    Machine,
    SinkEvent,
    SinkState,
    SourceEvent,
    SourceState,
)

LATE = "late"

# One row per state, one letter per event, in the order of the enumeration.
SINK_CELLS = {
    #           commit        landed     failed      abort       lapsed      quiesced
    "reserved": ["committed", "landed", "draining", "draining", "draining", LATE],
    "committed": [LATE, "ready", "draining", "draining", "draining", LATE],
    "landed": ["ready", LATE, "draining", "draining", "draining", LATE],
    "ready": [LATE, LATE, LATE, LATE, LATE, LATE],
    "draining": [LATE, LATE, LATE, LATE, LATE, "freed"],
    "freed": [LATE, LATE, LATE, LATE, LATE, LATE],
}
SOURCE_CELLS = {
    #             commit       acked       refused     failed      abort       lapsed    quiesced
    "sending": ["committing", LATE, LATE, "draining", "draining", "draining", LATE],
    "committing": [LATE, "draining", "draining", "draining", "draining", "draining", LATE],
    "draining": [LATE, LATE, LATE, LATE, LATE, LATE, "freed"],
    "freed": [LATE, LATE, LATE, LATE, LATE, LATE, LATE],
}
CELLS = [
    (table, state, event, expected[column])
    for table, states, events, rows in (
        (SINK, SinkState, SinkEvent, SINK_CELLS),
        (SOURCE, SourceState, SourceEvent, SOURCE_CELLS),
    )
    for state in states
    for expected in [rows[state.value]]
    for column, event in enumerate(events)
]


@pytest.mark.parametrize(("table", "state", "event", "expected"), CELLS)
def test_every_cell(table: Any, state: StrEnum, event: StrEnum, expected: str) -> None:
    late: Counter[str] = Counter()
    machine: Machine[Any, Any] = Machine(table, state, late)
    actions = machine.on(event)
    if expected == LATE:
        assert (machine.state, actions) == (state, ())
        assert late == {f"{state}/{event}": 1}
    else:
        assert machine.state == expected
        assert not late


def paths(table: Any, start: StrEnum, events: type[StrEnum], depth: int) -> Any:
    """All sequences of `depth` events: (states seen, actions taken)."""
    stack: list[tuple[StrEnum, tuple[Action, ...], int]] = [(start, (), depth)]
    while stack:
        state, actions, left = stack.pop()
        if left == 0:
            yield state, actions
            continue
        for event in events:
            machine: Machine[Any, Any] = Machine(table, state, Counter())
            taken = machine.on(event)
            stack.append((machine.state, actions + taken, left - 1))


def test_sink_frees_or_activates_exactly_once() -> None:
    ends = set()
    for state, actions in paths(SINK, SinkState.RESERVED, SinkEvent, 6):
        outcomes = actions.count(Action.FREE) + actions.count(Action.ACTIVATE)
        assert outcomes == (state in (SinkState.READY, SinkState.FREED))
        assert actions.count(Action.REPLY_COMMIT) == (state is SinkState.READY)
        assert actions.count(Action.QUIESCE) <= 1
        assert actions.count(Action.REPORT_FAILURE) == actions.count(Action.QUIESCE)
        if Action.FREE in actions:
            assert actions.index(Action.QUIESCE) < actions.index(Action.FREE)
        ends.add(state)
    assert ends == set(SinkState)


def test_source_frees_once_and_reports_one_outcome() -> None:
    for state, actions in paths(SOURCE, SourceState.SENDING, SourceEvent, 5):
        over = state in (SourceState.DRAINING, SourceState.FREED)
        reports = actions.count(Action.REPORT_SUCCESS) + actions.count(Action.REPORT_FAILURE)
        assert reports == actions.count(Action.QUIESCE) == over
        assert actions.count(Action.FREE) == (state is SourceState.FREED)
        assert not (Action.REPORT_SUCCESS in actions and Action.SEND_ABORT in actions)


@pytest.mark.parametrize(
    ("table", "start", "lapse", "quiesced"),
    [
        (SINK, SinkState.RESERVED, SinkEvent.LEASE_LAPSED, SinkEvent.QUIESCED),
        (SOURCE, SourceState.SENDING, SourceEvent.LEASE_LAPSED, SourceEvent.QUIESCED),
    ],
)
def test_silence_ends_every_state(table: Any, start: Any, lapse: Any, quiesced: Any) -> None:
    """The lease and the answer to QUIESCE always come, so every hand-off ends."""
    for state in type(start):
        machine: Machine[Any, Any] = Machine(table, state, Counter())
        machine.on(lapse)
        machine.on(quiesced)
        assert machine.state in ("freed", "ready")
