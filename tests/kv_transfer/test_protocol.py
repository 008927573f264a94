"""The two tables of the hand-off: every cell, and what holds along every path. What holds among
several nodes is `test_explorer.py`'s."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from pdserve.kv_transfer.control.protocol import (
    SINK,
    SOURCE,
    Action,
    Machine,
    SinkEvent,
    SinkState,
    SourceEvent,
    SourceState,
    sink_machine,
    source_machine,
)

# state, event, state after it, actions. What is not here is a late event.
SINK_CELLS = """
opening     opened        reserved    issue_ticket
opening     failed        draining    reject_commit report_failure quiesce
opening     retarget      moving      reject_commit quiesce
opening     lease_lapsed  draining    reject_commit report_failure quiesce
opening     cancel        draining    reject_commit report_failure quiesce
reserved    commit        committed
reserved    ranks_landed  landed
reserved    failed        stopping    reject_commit quiesce
reserved    abort         stopping    reject_commit quiesce
reserved    retarget      moving      reject_commit quiesce
reserved    lease_lapsed  draining    reject_commit report_failure quiesce
reserved    cancel        draining    reject_commit report_failure quiesce
committed   ranks_landed  verifying   verify
committed   failed        stopping    reject_commit quiesce
committed   abort         stopping    reject_commit quiesce
committed   retarget      moving      reject_commit quiesce
committed   lease_lapsed  draining    reject_commit report_failure quiesce
committed   cancel        draining    reject_commit report_failure quiesce
landed      commit        verifying   verify
landed      failed        stopping    reject_commit quiesce
landed      abort         stopping    reject_commit quiesce
landed      retarget      moving      reject_commit quiesce
landed      lease_lapsed  draining    reject_commit report_failure quiesce
landed      cancel        draining    reject_commit report_failure quiesce
verifying   verified      ready       activate reply_commit
verifying   mismatch      stopping    reject_commit quiesce
verifying   failed        stopping    reject_commit quiesce
verifying   abort         stopping    reject_commit quiesce
verifying   retarget      moving      reject_commit quiesce
verifying   lease_lapsed  draining    reject_commit report_failure quiesce
verifying   cancel        draining    reject_commit report_failure quiesce
stopping    quiesced      suspended
stopping    retarget      moving
stopping    lease_lapsed  draining    report_failure
stopping    cancel        draining    report_failure
suspended   retarget      opening     open
suspended   lease_lapsed  freed       report_failure free
suspended   cancel        freed       report_failure free
moving      quiesced      opening     open
moving      retarget      moving
moving      lease_lapsed  draining    report_failure
moving      cancel        draining    report_failure
draining    quiesced      freed       free
"""
SOURCE_CELLS = """
sending       commit          committing    send_commit
sending       failed          draining      send_abort report_failure quiesce
sending       abort           draining      send_abort report_failure quiesce
sending       lease_lapsed    draining      send_abort report_failure quiesce
sending       renew_refused   draining      report_failure quiesce
committing    commit_acked    draining      report_success quiesce
committing    commit_refused  draining      report_failure quiesce
committing    mismatch        repulling     repull
committing    failed          draining      send_abort report_failure quiesce
committing    abort           draining      send_abort report_failure quiesce
committing    lease_lapsed    draining      send_abort report_failure quiesce
repulling     retargeted      recommitting  resend send_commit
repulling     commit_refused  draining      report_failure quiesce
repulling     failed          draining      send_abort report_failure quiesce
repulling     abort           draining      send_abort report_failure quiesce
repulling     lease_lapsed    draining      send_abort report_failure quiesce
recommitting  commit_acked    draining      report_success quiesce
recommitting  commit_refused  draining      report_failure quiesce
recommitting  mismatch        draining      report_failure quiesce
recommitting  failed          draining      send_abort report_failure quiesce
recommitting  abort           draining      send_abort report_failure quiesce
recommitting  lease_lapsed    draining      send_abort report_failure quiesce
draining      quiesced        freed         free
"""
TABLES: list[tuple[Any, Any, Any, str]] = [
    (SINK, SinkState, SinkEvent, SINK_CELLS),
    (SOURCE, SourceState, SourceEvent, SOURCE_CELLS),
]


def parsed(cells: str) -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    rows = [line.split() for line in cells.strip().splitlines()]
    return {(row[0], row[1]): (row[2], tuple(row[3:])) for row in rows}


CELLS = [
    pytest.param(table, state, event, parsed(cells).get((state, event)), id=f"{state}-{event}")
    for table, states, events, cells in TABLES
    for state in states
    for event in events
]


@pytest.mark.parametrize(("table", "state", "event", "expected"), CELLS)
def test_every_cell(table: Any, state: Any, event: Any, expected: Any) -> None:
    late: Counter[str] = Counter()
    machine: Machine[Any, Any] = Machine(table, state, 5, late)
    actions = machine.on(event, 5)
    if expected is None:
        assert (machine.state, machine.epoch, actions) == (state, 5, ())
        assert late == {f"{state}/{event}": 1}
    else:
        assert (machine.state, actions) == expected
        assert machine.epoch == (6 if Action.OPEN in actions else 5)
        assert not late


@pytest.mark.parametrize(("table", "states", "events", "_"), TABLES)
def test_another_epoch_is_late_in_every_cell(table: Any, states: Any, events: Any, _: str) -> None:
    for state, event, epoch in product(states, events, (0, 4, 6)):
        late: Counter[str] = Counter()
        machine: Machine[Any, Any] = Machine(table, state, 5, late)
        assert machine.on(event, epoch) == ()
        assert (machine.state, machine.epoch) == (state, 5)
        assert late == {f"{state}/{event}": 1}


def test_every_row_is_of_the_table() -> None:
    for _, states, events, cells in TABLES:
        for (state, event), (after, actions) in parsed(cells).items():
            assert states(state) and events(event) and states(after)
            assert all(map(Action, actions))


# ---- every path ----

# What a driver has to keep in mind: (state, quiesce under way, answered, outcomes so far).
Place = tuple[StrEnum, bool, bool, int]
OUTCOMES = (Action.ACTIVATE, Action.REPORT_FAILURE, Action.REPORT_SUCCESS)
ANSWERS = (Action.REPLY_COMMIT, Action.REJECT_COMMIT)


def places(table: Any, start: Any, events: Any) -> set[Place]:
    """All that can be reached when QUIESCED answers a QUIESCE, and comes once."""
    found: set[Place] = set()
    todo: list[Place] = [(start, False, False, 0)]
    while todo:
        place = todo.pop()
        if place not in found:
            found.add(place)
            todo += [follow(table, place, event) for event in events if event != "quiesced"]
            todo += [follow(table, place, events("quiesced"))] if place[1] else []
    return found


def follow(table: Any, place: Place, event: Any) -> Place:
    state, quiescing, answered, outcomes = place
    machine: Machine[Any, Any] = Machine(table, state, 1, Counter())
    actions = machine.on(event)
    taken = Counter(actions)
    answers = sum(taken[each] for each in ANSWERS)
    assert not (quiescing and taken[Action.QUIESCE])
    assert not (answered and answers)
    quiescing = (quiescing and event != "quiesced") or bool(taken[Action.QUIESCE])
    assert not (quiescing and (taken[Action.FREE] or taken[Action.OPEN] or taken[Action.ACTIVATE]))
    answered = (answered or answers > 0) and not taken[Action.OPEN]
    return machine.state, quiescing, answered, outcomes + sum(taken[each] for each in OUTCOMES)


def test_sink_has_one_outcome_and_answers_each_epoch_once() -> None:
    found = places(SINK, SinkState.OPENING, SinkEvent)
    assert {state for state, *_ in found} == set(SinkState)
    for state, quiescing, _, outcomes in found:
        assert quiescing == (state in ("stopping", "moving", "draining"))
        assert outcomes == (state in ("ready", "draining", "freed"))


def test_source_has_one_outcome() -> None:
    found = places(SOURCE, SourceState.SENDING, SourceEvent)
    assert {state for state, *_ in found} == set(SourceState)
    for state, quiescing, _, outcomes in found:
        assert quiescing == (state == "draining")
        assert outcomes == (state in ("draining", "freed"))


@pytest.mark.parametrize(
    ("table", "states", "events"),
    [(SINK, SinkState, SinkEvent), (SOURCE, SourceState, SourceEvent)],
)
def test_silence_ends_every_state(table: Any, states: Any, events: Any) -> None:
    """The lease and the answer to QUIESCE always come, so every hand-off ends."""
    for state in states:
        machine: Machine[Any, Any] = Machine(table, state, 1, Counter())
        machine.on(events("lease_lapsed"))
        machine.on(events("quiesced"))
        assert machine.state in ("freed", "ready")


def test_a_sink_opens_one_epoch_after_another_and_a_source_none() -> None:
    late: Counter[str] = Counter()
    sink = sink_machine(late)
    assert (sink.state, sink.epoch) == (SinkState.OPENING, 1)
    for epoch in (1, 2, 3):
        assert sink.on(SinkEvent.OPENED, epoch) == (Action.ISSUE_TICKET,)
        sink.on(SinkEvent.RETARGET)
        assert sink.epoch == epoch  # until nobody can write any more
        assert sink.on(SinkEvent.QUIESCED) == (Action.OPEN,)
        assert sink.epoch == epoch + 1
    assert source_machine(late).state is SourceState.SENDING
    assert not late
