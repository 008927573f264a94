"""The hand-off as two tables: events in, actions out. No I/O, no clock, no threads.

    who holds the blocks          until
    ----------------------------  ------------------------------------------------------------
    sink    this machine          ACTIVATE (the sequence owns them) or FREE, never both
    source  this machine          FREE; it comes after QUIESCE was answered, so that nothing
                                  reads or writes a block that somebody else may get

`KVSink` and `KVSource` drive these tables with real I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class SinkState(StrEnum):
    RESERVED = "reserved"  # blocks are held, ranks take data
    COMMITTED = "committed"  # the source has committed, data is still under way
    LANDED = "landed"  # all data is in, the commit is not
    READY = "ready"  # the end: the sequence owns the blocks
    DRAINING = "draining"  # it failed; ranks are being quiesced
    FREED = "freed"  # the end: the blocks are free


class SinkEvent(StrEnum):
    COMMIT = "commit"
    RANKS_LANDED = "ranks_landed"
    FAILED = "failed"
    ABORT = "abort"
    LEASE_LAPSED = "lease_lapsed"
    QUIESCED = "quiesced"


class SourceState(StrEnum):
    SENDING = "sending"  # prefill computes, runs go out
    COMMITTING = "committing"  # the commit is asked for and not answered
    DRAINING = "draining"  # the outcome is known; ranks are being quiesced
    FREED = "freed"  # the end


class SourceEvent(StrEnum):
    COMMIT = "commit"
    COMMIT_ACKED = "commit_acked"
    COMMIT_REFUSED = "commit_refused"
    FAILED = "failed"
    ABORT = "abort"
    LEASE_LAPSED = "lease_lapsed"
    QUIESCED = "quiesced"


class Action(StrEnum):
    ACTIVATE = "activate"  # the waiter gets the blocks
    REPLY_COMMIT = "reply_commit"
    REJECT_COMMIT = "reject_commit"
    SEND_COMMIT = "send_commit"
    SEND_ABORT = "send_abort"
    REPORT_SUCCESS = "report_success"
    REPORT_FAILURE = "report_failure"
    QUIESCE = "quiesce"
    FREE = "free"


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
Step = tuple[S, tuple[Action, ...]]

_A = Action
_SINK_FAILS = (SinkState.DRAINING, (_A.REJECT_COMMIT, _A.REPORT_FAILURE, _A.QUIESCE))
_SOURCE_FAILS = (SourceState.DRAINING, (_A.SEND_ABORT, _A.REPORT_FAILURE, _A.QUIESCE))

# A cell that is not here is a late or duplicate event: it changes nothing and is counted.
SINK: Mapping[SinkState, Mapping[SinkEvent, Step[SinkState]]] = {
    SinkState.RESERVED: {
        SinkEvent.COMMIT: (SinkState.COMMITTED, ()),
        SinkEvent.RANKS_LANDED: (SinkState.LANDED, ()),
        SinkEvent.FAILED: _SINK_FAILS,
        SinkEvent.ABORT: _SINK_FAILS,
        SinkEvent.LEASE_LAPSED: _SINK_FAILS,
    },
    SinkState.COMMITTED: {
        SinkEvent.RANKS_LANDED: (SinkState.READY, (_A.ACTIVATE, _A.REPLY_COMMIT)),
        SinkEvent.FAILED: _SINK_FAILS,
        SinkEvent.ABORT: _SINK_FAILS,
        SinkEvent.LEASE_LAPSED: _SINK_FAILS,
    },
    SinkState.LANDED: {
        SinkEvent.COMMIT: (SinkState.READY, (_A.ACTIVATE, _A.REPLY_COMMIT)),
        SinkEvent.FAILED: _SINK_FAILS,
        SinkEvent.ABORT: _SINK_FAILS,
        SinkEvent.LEASE_LAPSED: _SINK_FAILS,
    },
    SinkState.READY: {},
    SinkState.DRAINING: {SinkEvent.QUIESCED: (SinkState.FREED, (_A.FREE,))},
    SinkState.FREED: {},
}

SOURCE: Mapping[SourceState, Mapping[SourceEvent, Step[SourceState]]] = {
    SourceState.SENDING: {
        SourceEvent.COMMIT: (SourceState.COMMITTING, (_A.SEND_COMMIT,)),
        SourceEvent.FAILED: _SOURCE_FAILS,
        SourceEvent.ABORT: _SOURCE_FAILS,
        SourceEvent.LEASE_LAPSED: _SOURCE_FAILS,
    },
    SourceState.COMMITTING: {
        SourceEvent.COMMIT_ACKED: (SourceState.DRAINING, (_A.REPORT_SUCCESS, _A.QUIESCE)),
        # The sink has freed its blocks already: nothing to abort.
        SourceEvent.COMMIT_REFUSED: (SourceState.DRAINING, (_A.REPORT_FAILURE, _A.QUIESCE)),
        SourceEvent.FAILED: _SOURCE_FAILS,
        SourceEvent.ABORT: _SOURCE_FAILS,
        SourceEvent.LEASE_LAPSED: _SOURCE_FAILS,
    },
    SourceState.DRAINING: {SourceEvent.QUIESCED: (SourceState.FREED, (_A.FREE,))},
    SourceState.FREED: {},
}


class Machine(Generic[S, E]):
    """One hand-off's place in its table."""

    def __init__(
        self, table: Mapping[S, Mapping[E, Step[S]]], start: S, late: Counter[str]
    ) -> None:
        self.state = start
        self._table = table
        self._late = late

    def on(self, event: E) -> tuple[Action, ...]:
        """Moves on and says what to do, in order; a late event is counted as
        `state/event` and does nothing."""
        step = self._table[self.state].get(event)
        if step is None:
            self._late[f"{self.state}/{event}"] += 1
            return ()
        self.state, actions = step
        return actions
