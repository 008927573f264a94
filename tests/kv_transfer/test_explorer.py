"""Every order of events keeps every promise of the hand-off; and no promise is kept by accident:
for each, there is a mutant of the tables or of their drivers that breaks it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest

from explorer import NONE, Explorer, Report
from handoff.party import (
    A_FAILS,
    B_FAILS,
    BAD,
    CRASH,
    DUPLICATE,
    Invariant,
    Rules,
    Violation,
)
from pdserve.kv_transfer.control.protocol import (
    SINK,
    SOURCE,
    Action,
    SinkEvent,
    SinkState,
    SourceEvent,
    SourceState,
    Step,
)

_A, _S, _E, _T, _F = Action, SinkState, SinkEvent, SourceState, SourceEvent
RENEWAL = (_T.SENDING, _F.RENEW_REFUSED)
DEEP = os.environ.get("PDSERVE_EXPLORE_DEEP") == "1"


@dataclass(frozen=True)
class Scenario:
    name: str
    rules: Rules
    budget: dict[str, float]
    states: int  # there are at least so many
    deep: bool = False


SCENARIOS = [
    Scenario("damaged twice", Rules(ranks=1), {BAD: 2}, 130_000),
    Scenario("renewed", Rules(ranks=1, asks=0, renewals=True), {BAD: 1}, 2_000),
    Scenario("renewed, two sources", Rules(ranks=1, renewals=True), {BAD: 1}, 200_000, deep=True),
    Scenario("two ranks", Rules(), {}, 175_000),
    Scenario("messages come twice", Rules(ranks=1), {DUPLICATE: 1}, 87_000),
    Scenario("a party crashes", Rules(ranks=1), {BAD: 1, CRASH: 1}, 175_000),
    Scenario("nothing to move", Rules(empty=True), {}, 14_000),
    Scenario("a third turn", Rules(ranks=1, asks=2), NONE | {A_FAILS: inf, B_FAILS: inf}, 110_000),
    Scenario("a third turn, all may end", Rules(ranks=1, asks=2), {}, 370_000, deep=True),
    Scenario("two ranks, damaged", Rules(), {BAD: 1}, 1_100_000, deep=True),
    Scenario("two ranks, a crash", Rules(), {CRASH: 1}, 440_000, deep=True),
    Scenario("two ranks, twice", Rules(), {DUPLICATE: 1}, 1_050_000, deep=True),
    Scenario("everything", Rules(ranks=1), {BAD: 1, CRASH: 1, DUPLICATE: 1}, 1_250_000, deep=True),
]


@pytest.mark.parametrize("scenario", [pytest.param(each, id=each.name) for each in SCENARIOS])
def test_no_order_of_events_breaks_a_promise(scenario: Scenario) -> None:
    if scenario.deep and not DEEP:
        pytest.skip("set PDSERVE_EXPLORE_DEEP=1")
    report = explore(scenario.rules, scenario.budget)
    print(f"\n{scenario.name}: {report.HEAD}\n{report}")
    assert report.complete
    assert report.states >= scenario.states
    if scenario.name == "damaged twice":
        cells = [(state, event) for state, row in [*SINK.items(), *SOURCE.items()] for event in row]
        assert scenario.rules.taken == {*cells} - {RENEWAL}
    assert (RENEWAL in scenario.rules.taken) == scenario.rules.renewals


def explore(rules: Rules, budget: dict[str, float], succeeds: bool = False) -> Report:
    try:
        return Explorer(rules, budget, succeeds=succeeds).run()
    except Violation as violation:
        pytest.fail("\n".join(("a counterexample:", *violation.trace)))


@pytest.mark.parametrize(
    ("rules", "trouble"),
    [
        (Rules(), {}),
        (Rules(empty=True), {}),
        (Rules(asks=0), {BAD: 1}),
        (Rules(ranks=1, asks=0, renewals=True), {BAD: 1}),
        (Rules(asks=0), {DUPLICATE: 1}),
        (Rules(), {A_FAILS: inf}),
        (Rules(), {A_FAILS: inf, BAD: 1}),
    ],
)
def test_what_can_succeed_succeeds(rules: Rules, trouble: dict[str, float]) -> None:
    """Damaged data is sent again; when A fails, B takes over, and A cannot get in its way."""
    assert explore(rules, NONE | trouble, succeeds=True).complete


# ---- mutants ----


def sink(*cells: tuple[SinkState, SinkEvent, Step[SinkState] | None], **rules: Any) -> Rules:
    """Rules whose sink has other cells; None: the cell is missing."""
    return Rules(sink=changed(SINK, cells), **{"ranks": 1} | rules)


def source(*cells: tuple[SourceState, SourceEvent, Step[SourceState]], **rules: Any) -> Rules:
    return Rules(source=changed(SOURCE, cells), **{"ranks": 1} | rules)


def changed(table: Any, cells: Iterable[tuple[Any, Any, Any]]) -> Any:
    copy = {state: dict(row) for state, row in table.items()}
    for state, event, step in cells:
        copy[state].pop(event, None)
        if step is not None:
            copy[state][event] = step
    return copy


_WRITABLE = (_S.RESERVED, _S.COMMITTED, _S.LANDED, _S.VERIFYING)
_VERIFIES = (_S.VERIFYING, (_A.VERIFY,))
_ACTIVATES = (_S.READY, (_A.ACTIVATE, _A.REPLY_COMMIT))
_FREES = (_S.FREED, (_A.REJECT_COMMIT, _A.REPORT_FAILURE, _A.FREE))
_REOPENS = (_S.OPENING, (_A.REJECT_COMMIT, _A.OPEN))
_MOVES_ON = (_S.MOVING, (_A.QUIESCE,))


def rules(**changes: Any) -> Rules:
    return Rules(**{"ranks": 1} | changes)


@dataclass(frozen=True)
class Mutant:
    name: str
    rules: Rules
    breaks: Invariant
    budget: dict[str, float] = field(default_factory=dict)


MUTANTS = [
    # the sink's table
    Mutant(
        "frees before ranks are quiet",
        sink(*((state, _E.CANCEL, _FREES) for state in _WRITABLE)),
        Invariant.GIVEN_WHILE_WRITTEN,
    ),
    Mutant(
        "activates before data is there",
        sink((_S.RESERVED, _E.COMMIT, _ACTIVATES)),
        Invariant.GIVEN_WHILE_WRITTEN,
    ),
    Mutant(
        "activates before digests are compared",
        sink((_S.COMMITTED, _E.RANKS_LANDED, _ACTIVATES), (_S.LANDED, _E.COMMIT, _ACTIVATES)),
        Invariant.RIGHT_CONTENT,
        {BAD: 1},
    ),
    Mutant(
        "activates what is wrong",
        sink((_S.VERIFYING, _E.MISMATCH, _ACTIVATES)),
        Invariant.RIGHT_CONTENT,
        {BAD: 1},
    ),
    Mutant(
        "retargets without quiesce",
        sink(*((state, _E.RETARGET, _REOPENS) for state in _WRITABLE)),
        Invariant.NO_STALE_WRITE,
    ),
    Mutant(
        "forgets the commit at a retarget",
        sink((_S.COMMITTED, _E.RETARGET, _MOVES_ON)),
        Invariant.ONE_ANSWER,
    ),
    Mutant(
        "takes a commit twice",
        sink((_S.READY, _E.COMMIT, _ACTIVATES)),
        Invariant.ONE_OUTCOME,
        {DUPLICATE: 1},
    ),
    Mutant(
        "takes a commit after the stop",
        sink((_S.STOPPING, _E.COMMIT, _VERIFIES), (_S.SUSPENDED, _E.COMMIT, _VERIFIES)),
        Invariant.ONE_ANSWER,
    ),
    Mutant(
        "ignores the cancel while suspended",
        sink((_S.SUSPENDED, _E.CANCEL, None)),
        Invariant.CANCEL_ENDS_IT,
    ),
    Mutant(
        "suspends without lease",
        sink((_S.SUSPENDED, _E.LEASE_LAPSED, None)),
        Invariant.TERMINATION,
    ),
    Mutant(
        "suspends when a rank refuses",
        sink((_S.OPENING, _E.FAILED, (_S.SUSPENDED, ()))),
        Invariant.GIVEN_WHILE_WRITTEN,
    ),
    # how the sink drives it
    Mutant("has no lease", rules(sink_lease=False), Invariant.TERMINATION),
    Mutant("compares no digest", rules(digests_compared=False), Invariant.RIGHT_CONTENT, {BAD: 1}),
    Mutant("opens the same epoch again", rules(epoch_grows=False), Invariant.ONE_HOLDER),
    Mutant(
        "obeys an abort of an old epoch",
        rules(unchecked=frozenset({_E.ABORT})),
        Invariant.STALE_IS_INERT,
    ),
    Mutant(
        "takes a commit of an old epoch",
        rules(unchecked=frozenset({_E.COMMIT})),
        Invariant.STALE_IS_INERT,
    ),
    Mutant(
        "believes digests of an old epoch",
        rules(unchecked=frozenset({_E.VERIFIED})),
        Invariant.STALE_IS_INERT,
    ),
    Mutant(
        "gives the ticket to the earlier asker, too",
        rules(last_asker_alone=False, router_outbids=False),
        Invariant.ONE_HOLDER,
        {BAD: 1},
    ),
    Mutant(
        "quiesces before ranks have accepted",
        rules(quiesce_waits=False),
        Invariant.GIVEN_WHILE_WRITTEN,
    ),
    Mutant(
        "lets a source that was given up outbid the router",
        rules(router_outbids=False),
        Invariant.SUCCESS,
        NONE | {A_FAILS: inf, BAD: 1},
    ),
    Mutant(
        "forgets ranks that landed at once",
        rules(recalls_landing=False, empty=True),
        Invariant.SUCCESS,
        NONE,
    ),
    # its ranks
    Mutant("takes data of any epoch", rules(rank_checks_epoch=False), Invariant.NO_STALE_WRITE),
    Mutant(
        "takes data twice", rules(landed_is_final=False), Invariant.NO_LATE_WRITE, {DUPLICATE: 1}
    ),
    # the source
    Mutant("has no lease", rules(source_lease=False), Invariant.TERMINATION, NONE),
    Mutant(
        "frees when it commits",
        source((_T.SENDING, _F.COMMIT, (_T.COMMITTING, (_A.SEND_COMMIT, _A.FREE)))),
        Invariant.FREED_WHILE_READ,
    ),
    Mutant(
        "frees when the commit is answered",
        source((_T.COMMITTING, _F.COMMIT_ACKED, (_T.FREED, (_A.REPORT_SUCCESS, _A.FREE)))),
        Invariant.FREED_WHILE_READ,
    ),
    Mutant(
        "frees twice",
        source((_T.DRAINING, _F.QUIESCED, (_T.FREED, (_A.FREE, _A.FREE)))),
        Invariant.ONE_FREE,
    ),
    Mutant(
        "sends again for ever",
        source((_T.RECOMMITTING, _F.MISMATCH, (_T.REPULLING, (_A.REPULL,)))),
        Invariant.ONE_REPULL,
        {BAD: 2},
    ),
    Mutant(
        "gives up when a renewal is refused that is overtaken by wrong digests",
        source(
            *(
                (state, _F.RENEW_REFUSED, (_T.DRAINING, (_A.REPORT_FAILURE, _A.QUIESCE)))
                for state in (_T.COMMITTING, _T.REPULLING, _T.RECOMMITTING)
            ),
            renewals=True,
        ),
        Invariant.SUCCESS,
        NONE | {BAD: 1},
    ),
    Mutant(
        "reports success before the answer",
        source((_T.SENDING, _F.COMMIT, (_T.COMMITTING, (_A.SEND_COMMIT, _A.REPORT_SUCCESS)))),
        Invariant.HONEST_SUCCESS,
    ),
]


@pytest.mark.parametrize("mutant", [pytest.param(each, id=each.name) for each in MUTANTS])
def test_the_explorer_catches(mutant: Mutant) -> None:
    with pytest.raises(Violation) as caught:
        Explorer(mutant.rules, mutant.budget, succeeds=mutant.breaks is Invariant.SUCCESS).run()
    print("", *caught.value.trace, sep="\n")
    assert caught.value.invariant is mutant.breaks


def test_a_counterexample_reads_as_a_story() -> None:
    [mutant] = [each for each in MUTANTS if each.name == "retargets without quiesce"]
    with pytest.raises(Violation) as caught:
        Explorer(mutant.rules, mutant.budget).run()
    *story, end = caught.value.trace
    assert story == [
        "D: rank 0 accepts 1",
        "D: all ranks have accepted",
        "R: gets ticket of epoch 1 from D, for A",
        "R: gives the source up",
        "A: gets run of epoch 1 from R",
        "A: sends to rank 0",
        "D: gets retarget from R",
    ]
    assert "D: gets write of epoch 1 from A into rank 0" in end
    assert str(Invariant.NO_STALE_WRITE) in end


def test_every_promise_can_be_broken() -> None:
    assert {mutant.breaks for mutant in MUTANTS} == set(Invariant)
