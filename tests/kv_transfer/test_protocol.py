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

# States, events, the state after them, actions. What is not here is a late event.
SINK_CELLS = """
opening                                      opened                      reserved   issue_ticket
opening                                      failed,lease_lapsed,cancel  draining   reject_commit report_failure quiesce
opening,reserved,committed,landed,verifying  retarget                    moving     reject_commit quiesce
reserved,committed,landed,verifying          failed,abort                stopping   reject_commit quiesce
reserved,committed,landed,verifying          lease_lapsed,cancel         draining   reject_commit report_failure quiesce
reserved                                     commit                      committed
reserved                                     ranks_landed                landed
committed                                    ranks_landed                verifying  verify
landed                                       commit                      verifying  verify
verifying                                    verified                    ready      activate reply_commit
verifying                                    mismatch                    stopping   reject_commit quiesce
stopping                                     quiesced                    suspended
stopping,moving                              retarget                    moving
stopping,moving                              lease_lapsed,cancel         draining   report_failure
suspended                                    retarget                    opening    open
suspended                                    lease_lapsed,cancel         freed      report_failure free
moving                                       quiesced                    opening    open
draining                                     quiesced                    freed      free
"""  # noqa: E501
SOURCE_CELLS = """
sending                                    commit                     committing    send_commit
sending                                    renew_refused              draining      report_failure quiesce
sending,committing,repulling,recommitting  failed,abort,lease_lapsed  draining      send_abort report_failure quiesce
committing,repulling,recommitting          commit_refused             draining      report_failure quiesce
committing,recommitting                    commit_acked               draining      report_success quiesce
committing                                 mismatch                   repulling     repull
repulling                                  retargeted                 recommitting  resend send_commit
recommitting                               mismatch                   draining      report_failure quiesce
draining                                   quiesced                   freed         free
"""  # noqa: E501
TABLES: list[tuple[Any, Any, Any, str]] = [
    (SINK, SinkState, SinkEvent, SINK_CELLS),
    (SOURCE, SourceState, SourceEvent, SOURCE_CELLS),
]


def parsed(cells: str) -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    return {
        (state, event): (after, tuple(actions))
        for states, events, after, *actions in map(str.split, cells.strip().splitlines())
        for state, event in product(states.split(","), events.split(","))
    }


@pytest.mark.parametrize(("table", "states", "events", "cells"), TABLES)
def test_every_cell(table: Any, states: Any, events: Any, cells: str) -> None:
    expected = parsed(cells)
    for state, event in product(states, events):
        late: Counter[str] = Counter()
        machine: Machine[Any, Any] = Machine(table, state, 5, late)
        actions = machine.on(event, 5)
        where = f"{state}/{event}"
        if (step := expected.pop((state, event), None)) is None:
            assert (machine.state, machine.epoch, actions) == (state, 5, ()), where
            assert late == {where: 1}
        else:
            assert (machine.state, actions) == step, where
            assert machine.epoch == (6 if Action.OPEN in actions else 5), where
            assert not late, where
    assert not expected, "cells of no table"


@pytest.mark.parametrize(("table", "states", "events", "_"), TABLES)
def test_another_epoch_is_late_in_every_cell(table: Any, states: Any, events: Any, _: str) -> None:
    for state, event, epoch in product(states, events, (0, 4, 6)):
        late: Counter[str] = Counter()
        machine: Machine[Any, Any] = Machine(table, state, 5, late)
        assert machine.on(event, epoch) == ()
        assert (machine.state, machine.epoch) == (state, 5)
        assert late == {f"{state}/{event}": 1}


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


@pytest.mark.parametrize(("table", "states", "events", "_"), TABLES)
def test_silence_ends_every_state(table: Any, states: Any, events: Any, _: str) -> None:
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
        assert sink.epoch == epoch  # until nothing can write any more
        assert sink.on(SinkEvent.QUIESCED) == (Action.OPEN,)
        assert sink.epoch == epoch + 1
    assert source_machine(late).state is SourceState.SENDING
    assert not late
