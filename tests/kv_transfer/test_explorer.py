"""No order of events breaks a promise of the hand-off; and no promise is kept by accident: for each
there is a change to the tables or to the drivers that breaks it, and is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from explorer import Explorer, Report
from handoff.promises import Promise, Violation
from handoff.world import (
    A_ENDS,
    ANYBODY_ENDS,
    BAD,
    CRASH,
    CUT,
    DUPLICATE,
    LOST,
    RENEW,
    STRAY,
    Setting,
)
from pdserve.kv_transfer.commands import Accept, Quiesce
from pdserve.kv_transfer.connector import SinkTransfer
from pdserve.kv_transfer.control import protocol
from pdserve.kv_transfer.control.announcer import RunAnnouncer
from pdserve.kv_transfer.control.background import Lease, new_future
from pdserve.kv_transfer.control.protocol import (
    SINK,
    SOURCE,
    Action,
    Machine,
    SinkEvent,
    SinkState,
    SourceEvent,
    SourceState,
)
from pdserve.kv_transfer.control.recv_transfer import Epoch, RecvResult, RecvTransfer
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.control.source import SendTransfer

_A, _S, _E, _T, _F = Action, SinkState, SinkEvent, SourceState, SourceEvent

SETTINGS = {
    "anybody ends": Setting(),
    "damaged twice": Setting(asks=0, damaged=True, budget=ANYBODY_ENDS | {BAD: 1}),
    "renewed": Setting(asks=0, damaged=True, budget=ANYBODY_ENDS | {RENEW: 1}),
    "somebody dies": Setting(damaged=True, budget={CRASH: 1}),
    "data is slow": Setting(slow="data", budget={}),
    "messages are lost": Setting(budget={LOST: 2}),
    "the network is cut": Setting(damaged=True, budget={CUT: 1}),
    "a window, or a state, beside all tokens": Setting(firsts=(0, 1), damaged=True),
    "hashed as it moves": Setting(damaged=True, as_sent=True, reads_again=False),
}
DEEP = {
    **SETTINGS,
    "damaged": Setting(damaged=True),
    "messages come twice": Setting(budget=ANYBODY_ENDS | {DUPLICATE: 1}),
    "nothing to move": Setting(ranks=2, empty=True),
    "a third turn": Setting(asks=2),
    "two ranks": Setting(ranks=2),
    "two ranks with two groups": Setting(ranks=2, firsts=(0, 1)),
}


def explore(setting: Setting, choices: int, most_runs: int | None = None) -> Report:
    try:
        return Explorer(setting).run(choices, most_runs)
    except Violation as violation:
        pytest.fail("\n".join(("a counterexample:", *violation.trace)))


@pytest.mark.parametrize("name", SETTINGS)
def test_two_events_out_of_turn_break_no_promise(name: str) -> None:
    """Takes the first two hundred: all that change one event, and the beginning of the others."""
    report = explore(SETTINGS[name], choices=2, most_runs=200)
    assert "activated" in report.outcomes and report.runs == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_three_events_out_of_turn_break_no_promise(name: str) -> None:
    """All pairs, and as many triples as half a minute allows. Where nothing fails and no client
    leaves, the blocks are always activated in the end."""
    report = explore(DEEP[name], choices=3, most_runs=20_000)
    assert report.outcomes >= ({"activated", "freed"} if DEEP[name].budget else {"activated"})


@pytest.mark.parametrize(
    "setting",
    [
        Setting(budget={}),
        Setting(budget={}, empty=True),
        Setting(asks=0, budget={BAD: 1}),
        Setting(asks=0, budget={BAD: 1}, firsts=(0, 1)),
        Setting(asks=0, budget={BAD: 1, RENEW: 1}),
        Setting(asks=0, budget={DUPLICATE: 1}),
        Setting(asks=0, budget={BAD: 1}, firsts=(0, 1), as_sent=True, reads_again=False),
        Setting(asks=0, budget={STRAY: 1}),
        Setting(damaged=True, budget={A_ENDS: 1}),
    ],
    ids=repr,
)
def test_transfers_that_can_succeed_succeed(setting: Setting) -> None:
    """Damaged data is sent again; when A fails, B takes over, and A cannot get in its way."""
    report = explore(replace(setting, succeeds=True), choices=3, most_runs=250)
    assert report.outcomes == {"activated"}


def test_a_stray_write_is_missed_after_the_hash_alone() -> None:
    """A sink that hashes as data lands does not see what is written afterwards. One that reads
    again does (above), and so do both what was spoilt before."""
    with pytest.raises(Violation) as missed:
        Explorer(Setting(reads_again=False, budget={STRAY: 1})).run(choices=1)
    assert missed.value.promise is P.RIGHT_CONTENT
    assert any("stray" in step for step in missed.value.trace)
    explore(Setting(reads_again=False, budget={BAD: 1}), choices=2, most_runs=200)


@pytest.mark.slow
def test_every_cell_of_both_tables_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, on = set(), Machine.on

    def watched(machine: Machine[Any, Any], event: Any, epoch: int | None = None) -> Any:
        if epoch in (None, machine.epoch):
            taken.add((machine.state, event))
        return on(machine, event, epoch)

    monkeypatch.setattr(Machine, "on", watched)
    for setting in (
        Setting(asks=2, damaged=True, budget=ANYBODY_ENDS | {BAD: 1}),
        Setting(asks=2, damaged=True, slow="data", budget=ANYBODY_ENDS | {RENEW: 1}),
    ):
        explore(setting, choices=2, most_runs=900)
    cells = {(state, event) for state, row in [*SINK.items(), *SOURCE.items()] for event in row}
    assert cells <= taken


# ---- what is found ----

Change = Callable[[pytest.MonkeyPatch], None]
Cell = tuple[Any, Any, tuple[Any, tuple[Action, ...]] | None]
P = Promise
ANYBODY, DAMAGED = Setting(), Setting(damaged=True)
GROUPS = Setting(firsts=(0, 1))


@dataclass(frozen=True)
class Mutant:
    name: str
    change: Change
    breaks: Promise
    setting: Setting = ANYBODY


MUTANTS: list[Mutant] = []


def sink(name: str, breaks: Promise, *cells: Cell, setting: Setting = ANYBODY) -> None:
    """The sink's table has other cells; None: the cell is missing."""

    def change(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(protocol, "SINK", changed(SINK, cells))
        # So that nothing else comes in the way of a table that activates too early.
        patch.setattr(Epoch, "result", lambda self: RecvResult(self.first_token, self.nbytes))

    MUTANTS.append(Mutant(name, change, breaks, setting))


def source(name: str, breaks: Promise, *cells: Cell, setting: Setting = ANYBODY) -> None:
    table = changed(SOURCE, cells)
    MUTANTS.append(
        Mutant(name, lambda patch: patch.setattr(protocol, "SOURCE", table), breaks, setting)
    )


def changed(table: Mapping[Any, Mapping[Any, Any]], cells: Sequence[Cell]) -> Any:
    copy = {state: dict(row) for state, row in table.items()}
    for state, event, step in cells:
        copy[state].pop(event, None)
        if step is not None:
            copy[state][event] = step
    return copy


def method(owner: type, name: str, breaks: Promise, setting: Setting = ANYBODY) -> Any:
    """The owner's method is the function that this decorates."""

    def change(function: Callable[..., Any]) -> None:
        def patched(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(owner, name, function)

        MUTANTS.append(Mutant(function.__name__.replace("_", " "), patched, breaks, setting))

    return change


def succeeds(**options: Any) -> Setting:
    return Setting(**{"budget": {}} | options, succeeds=True)


# ---- how the sink drives its table ----

_on, _abort, _commit = Machine.on, KVSink.abort, KVSink.commit
_free, _retarget, _submit = RecvTransfer._free, RecvTransfer.retarget, RunAnnouncer.submit
_landed, _put = RecvTransfer.landed, RunAnnouncer._put


@method(Machine, "on", P.NO_DEFECT, Setting(slow="verify"))
def believes_old_digests(self: Machine[Any, Any], event: Any, epoch: int | None = None) -> Any:
    return _on(self, event, None if event is SinkEvent.VERIFIED else epoch)


@method(Machine, "on", P.ONE_HOLDER)
def opens_the_same_epoch(self: Machine[Any, Any], event: Any, epoch: int | None = None) -> Any:
    step = self._table[self.state].get(event)
    if step is None or epoch not in (None, self.epoch):
        return ()
    self.state, actions = step
    return actions


@method(KVSink, "abort", P.STALE_IS_INERT)
def obeys_old_aborts(self: KVSink, transfer_id: bytes, epoch: int, reason: str) -> None:
    live = self._live.get(transfer_id)
    _abort(self, transfer_id, live.machine.epoch if live else epoch, reason)


@method(KVSink, "commit", P.HONEST_SUCCESS)
async def takes_old_commits(self: KVSink, transfer_id: bytes, epoch: int, *rest: Any) -> Any:
    live = self._live.get(transfer_id)
    return await _commit(self, transfer_id, live.machine.epoch if live else epoch, *rest)


@method(RecvTransfer, "_quiesce", P.GIVEN_WHILE_WRITTEN)
async def quiesces_before_ranks_have_accepted(self: RecvTransfer) -> None:
    await self._ranks.send_alive(self._shares, Quiesce(self.ticket.transfer_id))
    self.on(SinkEvent.QUIESCED)


@method(RecvTransfer, "_quiesce", P.GIVEN_WHILE_WRITTEN)
async def asks_no_sink_rank_to_stop(self: RecvTransfer) -> None:
    self.on(SinkEvent.QUIESCED)


@method(RecvTransfer, "_verify", P.RIGHT_CONTENT, DAMAGED)
async def compares_nothing(self: RecvTransfer, epoch: int) -> None:
    self.on(SinkEvent.VERIFIED, epoch=epoch)


@method(RecvTransfer, "landed", P.SUCCESS, succeeds(firsts=(0, 1), slow="group 1"))
def takes_one_group_s_blocks_for_all(self: RecvTransfer, share: int, *of: Any) -> None:
    _landed(self, 0, *of)
    _landed(self, 1, *of)


@method(RecvTransfer, "_quiesce", P.GIVEN_WHILE_WRITTEN, GROUPS)
async def asks_one_group_to_stop(self: RecvTransfer) -> None:
    await self._ranks.send_alive([0], Quiesce(self.ticket.transfer_id))
    self.on(SinkEvent.QUIESCED)


@method(RunAnnouncer, "_put", P.SUCCESS, succeeds(firsts=(0, 1)))
def announces_one_group(self: RunAnnouncer, group: int, run: Any) -> None:
    _put(self, 0, run)


@method(RecvTransfer, "_accept", P.SUCCESS, succeeds(empty=True))
async def forgets_who_landed_at_once(self: RecvTransfer, epoch: int) -> None:
    (blocks,) = self.blocks
    transfer = self.ticket.transfer_id, epoch, blocks.first, blocks.ids
    await self._ranks.send_all(dict.fromkeys(self._shares, Accept(SinkTransfer(*transfer))))
    self.on(SinkEvent.OPENED, epoch=epoch)


@method(RecvTransfer, "retarget", P.SUCCESS, succeeds(damaged=True, budget={A_ENDS: 1}))
async def a_source_given_up_outbids_the_router(self: RecvTransfer, *, preempts: bool) -> Any:
    return await _retarget(self, preempts=True)


@method(RecvTransfer, "retarget", P.ONE_ANSWER, DAMAGED)
async def forgets_the_earlier_asker(self: RecvTransfer, *, preempts: bool) -> Any:
    if not self.epoch.ticket.done():
        self.epoch.ticket = new_future()
        self.epoch.ticket.set_result(self.ticket)
    return await _retarget(self, preempts=preempts)


@method(RecvTransfer, "retarget", P.ONE_HOLDER, DAMAGED)
async def gives_one_ticket_to_two_askers(self: RecvTransfer, *, preempts: bool) -> Any:
    if not self.epoch.ticket.done():
        return await self.epoch.ticket
    return await _retarget(self, preempts=preempts)


@method(RecvTransfer, "_free", P.ONE_OUTCOME)
def frees_the_blocks_twice(self: RecvTransfer) -> None:
    self._on_freed()
    _free(self)


@method(Lease, "_check", P.TERMINATION, Setting(budget={CUT: 1}))
def has_no_lease(self: Lease) -> None:
    self._timer = None


# ---- how the source drives its table ----


@method(RunAnnouncer, "quiesce_ranks", P.FREED_WHILE_READ)
async def asks_no_source_rank_to_stop(self: RunAnnouncer) -> None: ...


@method(SendTransfer, "_quiesce", P.FREED_WHILE_READ)
async def quiesces_before_ranks_know(self: SendTransfer) -> None:
    self._renewing.cancel()
    if self._asking is not None:
        self._asking.cancel()
    await self._announcer.quiesce_ranks()
    self._on(SourceEvent.QUIESCED)


@method(RunAnnouncer, "submit", P.SUCCESS, succeeds(budget={BAD: 1}))
def says_old_digests_again(self: RunAnnouncer, ticket: Any) -> None:
    kept = list(self._digests)
    _submit(self, ticket)
    self._digests += kept


@method(RunAnnouncer, "digests", P.RIGHT_CONTENT, Setting(damaged=True, as_sent=True))
async def commits_before_digests_are_made(self: RunAnnouncer) -> Any:
    return tuple(self._digests)


@method(RunAnnouncer, "digests", P.RIGHT_CONTENT, replace(GROUPS, as_sent=True, budget={BAD: 1}))
async def waits_for_the_digests_of_one_group(self: RunAnnouncer) -> Any:
    await self._has_sent.wait()
    return next(iter(self._sent.values()))


@method(RunAnnouncer, "submit", P.SUCCESS, succeeds(as_sent=True, budget={BAD: 1}))
def takes_what_was_sent_before_for_new(self: RunAnnouncer, ticket: Any) -> None:
    kept = dict(self._sent) if hasattr(self, "_sent") else {}
    _submit(self, ticket)
    self._sent.update(kept)


@method(RunAnnouncer, "submit", P.SUCCESS, succeeds(budget={BAD: 1}))
def sends_nothing_again(self: RunAnnouncer, ticket: Any) -> None:
    self._runs.clear()
    _submit(self, ticket)


# ---- the tables ----

_WRITABLE = (_S.RESERVED, _S.COMMITTED, _S.LANDED, _S.VERIFYING)
_VERIFIES = (_S.VERIFYING, (_A.VERIFY,))
_ACTIVATES = (_S.READY, (_A.ACTIVATE, _A.REPLY_COMMIT))
_FREES = (_S.FREED, (_A.REJECT_COMMIT, _A.REPORT_FAILURE, _A.FREE))
_REOPENS = (_S.OPENING, (_A.REJECT_COMMIT, _A.OPEN))
_MOVES_ON = (_S.MOVING, (_A.QUIESCE,))
_GIVES_UP = (_T.DRAINING, (_A.REPORT_FAILURE, _A.QUIESCE))

# fmt: off
sink("frees before ranks are quiet", P.GIVEN_WHILE_WRITTEN,
     *((state, _E.CANCEL, _FREES) for state in _WRITABLE))
sink("activates before data is there", P.GIVEN_WHILE_WRITTEN, (_S.RESERVED, _E.COMMIT, _ACTIVATES))
sink("activates before digests are compared", P.RIGHT_CONTENT,
     (_S.COMMITTED, _E.RANKS_LANDED, _ACTIVATES), (_S.LANDED, _E.COMMIT, _ACTIVATES),
     setting=DAMAGED)
sink("activates what is wrong", P.RIGHT_CONTENT, (_S.VERIFYING, _E.MISMATCH, _ACTIVATES),
     setting=DAMAGED)
sink("retargets without quiesce", P.NO_STALE_WRITE,
     *((state, _E.RETARGET, _REOPENS) for state in _WRITABLE))
sink("forgets the commit at a retarget", P.ONE_ANSWER, (_S.COMMITTED, _E.RETARGET, _MOVES_ON),
     setting=Setting(slow="data", budget={}))
sink("takes a commit after the stop", P.RIGHT_CONTENT,
     (_S.STOPPING, _E.COMMIT, _VERIFIES), (_S.SUSPENDED, _E.COMMIT, _VERIFIES))
sink("ignores the cancel while suspended", P.CANCEL_ENDS_IT, (_S.SUSPENDED, _E.CANCEL, None))
sink("suspends without lease", P.TERMINATION, (_S.SUSPENDED, _E.LEASE_LAPSED, None))
sink("suspends when a rank refuses", P.GIVEN_WHILE_WRITTEN,
     (_S.OPENING, _E.FAILED, (_S.SUSPENDED, ())))
source("frees when it gives up", P.FREED_WHILE_READ,
       (_T.SENDING, _F.ABORT, (_T.FREED, (_A.SEND_ABORT, _A.REPORT_FAILURE, _A.FREE))))
source("frees when the commit is answered", P.FREED_WHILE_READ,
       (_T.COMMITTING, _F.COMMIT_ACKED, (_T.FREED, (_A.REPORT_SUCCESS, _A.FREE))))
source("frees twice", P.ONE_FREE, (_T.DRAINING, _F.QUIESCED, (_T.FREED, (_A.FREE, _A.FREE))))
source("sends again for ever", P.ONE_REPULL,
       (_T.RECOMMITTING, _F.MISMATCH, (_T.REPULLING, (_A.REPULL,))),
       setting=Setting(asks=0, budget={BAD: 2}))
source("gives up when a renewal is refused that is overtaken by wrong digests", P.SUCCESS,
       *((state, _F.RENEW_REFUSED, _GIVES_UP)
         for state in (_T.COMMITTING, _T.REPULLING, _T.RECOMMITTING)),
       setting=succeeds(asks=0, budget={BAD: 1, RENEW: 1}))
source("reports success before the answer", P.HONEST_SUCCESS,
       (_T.SENDING, _F.COMMIT, (_T.DRAINING, (_A.REPORT_SUCCESS, _A.QUIESCE))))
# fmt: on


LATE = {  # found late; each breaks a promise that others break at once
    "obeys old aborts",
    "suspends when a rank refuses",
    "takes old commits",
    "takes one group s blocks for all",
    "believes old digests",
    "a source given up outbids the router",
    "ignores the cancel while suspended",
}


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] * (each.name in LATE))
        for each in MUTANTS
    ],
)
def test_the_explorer_catches(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.change(monkeypatch)
    with pytest.raises(Violation) as caught:
        Explorer(mutant.setting).run(choices=3, most_runs=4000)
    print("", *caught.value.trace, sep="\n")
    assert caught.value.promise is mutant.breaks


def test_every_promise_can_be_broken() -> None:
    """A write that comes late would be NO_LATE_WRITE; what lets it come is GIVEN_WHILE_WRITTEN
    before, for ranks take nothing once they have landed or are quiet."""
    assert {mutant.breaks for mutant in MUTANTS} == {*Promise} - {Promise.NO_LATE_WRITE}
