"""The hand-off as two tables: events in, actions out. No I/O, no clock, no threads.

    who holds the blocks          until
    ----------------------------  ------------------------------------------------------------
    sink    this machine          ACTIVATE (the sequence owns them) or FREE, never both
    source  this machine          FREE; it comes after QUIESCE was answered, so no rank touches a
                                  block that another sequence may get

An epoch is one source's turn to write. The sink begins an epoch with OPEN and refuses everything
that names another epoch as stale, so a source that was replaced can never touch the blocks again.

    sink    OPENING ─▶ RESERVED ─▶ LANDED or COMMITTED ─▶ VERIFYING ─▶ READY
               ▲          └──────── fails ─────┴──────────────┘
               │                      ▼
               └──── retarget ── STOPPING ─▶ SUSPENDED        (blocks kept for another source)
    any     ─── cancelled, lease lapsed ─▶ DRAINING ─▶ FREED

`RecvTransfer` and `SendTransfer` drive these tables with real I/O; `tests/helpers/explorer.py`
leads them through many orders of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class SinkState(StrEnum):
    OPENING = "opening"  # ranks are asked to take the epoch's data
    RESERVED = "reserved"  # the ticket is out, ranks take data
    COMMITTED = "committed"  # the source has committed, data is still under way
    LANDED = "landed"  # all data is in, the commit is not
    VERIFYING = "verifying"  # both are in; ranks compare digests
    READY = "ready"  # the end: the sequence owns the blocks
    STOPPING = "stopping"  # the epoch failed; ranks are being quiesced
    SUSPENDED = "suspended"  # ranks are quiesced: the blocks wait for another source
    MOVING = "moving"  # as STOPPING, and another source waits for its ticket
    DRAINING = "draining"  # the transfer failed; ranks are being quiesced
    FREED = "freed"  # the end: the blocks are free


class SinkEvent(StrEnum):
    OPENED = "opened"  # every rank takes data
    COMMIT = "commit"
    RANKS_LANDED = "ranks_landed"
    VERIFIED = "verified"
    MISMATCH = "mismatch"  # a digest is wrong
    FAILED = "failed"  # a rank's connector gave up
    ABORT = "abort"  # the source gives up
    RETARGET = "retarget"  # a new epoch is requested, for another source or a retry
    LEASE_LAPSED = "lease_lapsed"
    CANCEL = "cancel"  # the decode session ended
    QUIESCED = "quiesced"


class SourceState(StrEnum):
    SENDING = "sending"  # prefill computes, runs go out
    COMMITTING = "committing"  # the commit is sent and not answered
    REPULLING = "repulling"  # the sink saw wrong digests; a new epoch is requested
    RECOMMITTING = "recommitting"  # everything was sent again: the last attempt
    DRAINING = "draining"  # the outcome is known; ranks are being quiesced
    FREED = "freed"  # the end


class SourceEvent(StrEnum):
    COMMIT = "commit"
    COMMIT_ACKED = "commit_acked"
    COMMIT_REFUSED = "commit_refused"
    MISMATCH = "mismatch"  # refused because a digest is wrong
    RETARGETED = "retargeted"  # the sink has opened a new epoch for this source
    RENEW_REFUSED = "renew_refused"  # the sink has given up the epoch
    FAILED = "failed"
    ABORT = "abort"
    LEASE_LAPSED = "lease_lapsed"
    QUIESCED = "quiesced"


class Action(StrEnum):
    OPEN = "open"  # begins the next epoch on all ranks
    ISSUE_TICKET = "issue_ticket"  # to the last caller that requested the epoch
    VERIFY = "verify"
    ACTIVATE = "activate"  # the decode session gets the blocks
    REPLY_COMMIT = "reply_commit"
    REJECT_COMMIT = "reject_commit"
    SEND_COMMIT = "send_commit"
    SEND_ABORT = "send_abort"
    REPULL = "repull"  # quiesce, then request a new epoch
    RESEND = "resend"  # every run once more
    REPORT_SUCCESS = "report_success"
    REPORT_FAILURE = "report_failure"
    QUIESCE = "quiesce"
    FREE = "free"


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)
Step = tuple[S, tuple[Action, ...]]
Table = Mapping[S, Mapping[E, Step[S]]]

_A, _S, _E = Action, SinkState, SinkEvent
_STOPS = (_S.STOPPING, (_A.REJECT_COMMIT, _A.QUIESCE))
_MOVES = (_S.MOVING, (_A.REJECT_COMMIT, _A.QUIESCE))
_ENDS = (_S.DRAINING, (_A.REJECT_COMMIT, _A.REPORT_FAILURE, _A.QUIESCE))
_ENDS_WITHOUT_QUIESCE = (_S.DRAINING, (_A.REPORT_FAILURE,))  # a quiesce is under way
_ENDS_AT_ONCE = (_S.FREED, (_A.REPORT_FAILURE, _A.FREE))
# The events that are handled alike in every state in which a source may write.
_WRITABLE: Mapping[SinkEvent, Step[SinkState]] = {
    _E.FAILED: _STOPS,
    _E.ABORT: _STOPS,
    _E.RETARGET: _MOVES,
    _E.LEASE_LAPSED: _ENDS,
    _E.CANCEL: _ENDS,
}

# An event without a cell is late or a duplicate: it changes nothing and is counted.
SINK: Table[SinkState, SinkEvent] = {
    _S.OPENING: {
        _E.OPENED: (_S.RESERVED, (_A.ISSUE_TICKET,)),
        _E.FAILED: _ENDS,  # one of our ranks refuses: another source would not help
        _E.RETARGET: _MOVES,
        _E.LEASE_LAPSED: _ENDS,
        _E.CANCEL: _ENDS,
    },
    _S.RESERVED: {
        _E.COMMIT: (_S.COMMITTED, ()),
        _E.RANKS_LANDED: (_S.LANDED, ()),
        **_WRITABLE,
    },
    _S.COMMITTED: {_E.RANKS_LANDED: (_S.VERIFYING, (_A.VERIFY,)), **_WRITABLE},
    _S.LANDED: {_E.COMMIT: (_S.VERIFYING, (_A.VERIFY,)), **_WRITABLE},
    _S.VERIFYING: {
        _E.VERIFIED: (_S.READY, (_A.ACTIVATE, _A.REPLY_COMMIT)),
        _E.MISMATCH: _STOPS,
        **_WRITABLE,
    },
    _S.READY: {},
    _S.STOPPING: {
        _E.QUIESCED: (_S.SUSPENDED, ()),
        _E.RETARGET: (_S.MOVING, ()),
        _E.LEASE_LAPSED: _ENDS_WITHOUT_QUIESCE,
        _E.CANCEL: _ENDS_WITHOUT_QUIESCE,
    },
    _S.SUSPENDED: {
        _E.RETARGET: (_S.OPENING, (_A.OPEN,)),
        _E.LEASE_LAPSED: _ENDS_AT_ONCE,
        _E.CANCEL: _ENDS_AT_ONCE,
    },
    _S.MOVING: {
        _E.QUIESCED: (_S.OPENING, (_A.OPEN,)),
        _E.RETARGET: (_S.MOVING, ()),  # the last caller gets the ticket
        _E.LEASE_LAPSED: _ENDS_WITHOUT_QUIESCE,
        _E.CANCEL: _ENDS_WITHOUT_QUIESCE,
    },
    _S.DRAINING: {_E.QUIESCED: (_S.FREED, (_A.FREE,))},
    _S.FREED: {},
}

_T, _F = SourceState, SourceEvent
_FAILS = (_T.DRAINING, (_A.SEND_ABORT, _A.REPORT_FAILURE, _A.QUIESCE))
_REFUSED = (_T.DRAINING, (_A.REPORT_FAILURE, _A.QUIESCE))  # the sink knows: no abort is due
_GIVES_UP: Mapping[SourceEvent, Step[SourceState]] = {
    _F.FAILED: _FAILS,
    _F.ABORT: _FAILS,
    _F.LEASE_LAPSED: _FAILS,
}

SOURCE: Table[SourceState, SourceEvent] = {
    _T.SENDING: {
        _F.COMMIT: (_T.COMMITTING, (_A.SEND_COMMIT,)),
        _F.RENEW_REFUSED: _REFUSED,  # not later: the commit's answer tells more, e.g. MISMATCH
        **_GIVES_UP,
    },
    _T.COMMITTING: {
        _F.COMMIT_ACKED: (_T.DRAINING, (_A.REPORT_SUCCESS, _A.QUIESCE)),
        _F.COMMIT_REFUSED: _REFUSED,
        _F.MISMATCH: (_T.REPULLING, (_A.REPULL,)),
        **_GIVES_UP,
    },
    _T.REPULLING: {
        _F.RETARGETED: (_T.RECOMMITTING, (_A.RESEND, _A.SEND_COMMIT)),
        _F.COMMIT_REFUSED: _REFUSED,  # the sink gives this source no new epoch
        **_GIVES_UP,
    },
    _T.RECOMMITTING: {
        _F.COMMIT_ACKED: (_T.DRAINING, (_A.REPORT_SUCCESS, _A.QUIESCE)),
        _F.COMMIT_REFUSED: _REFUSED,
        _F.MISMATCH: _REFUSED,
        **_GIVES_UP,
    },
    _T.DRAINING: {_F.QUIESCED: (_T.FREED, (_A.FREE,))},
    _T.FREED: {},
}


class Machine(Generic[S, E]):
    """Tracks one transfer's state in its table, and its epoch."""

    def __init__(self, table: Table[S, E], start: S, epoch: int, late: Counter[str]) -> None:
        self.state = start
        self.epoch = epoch
        self._table = table
        self._late = late

    def on(self, event: E, epoch: int | None = None) -> tuple[Action, ...]:
        """Changes the state and returns the actions, in order. An event that is late, or names
        another `epoch` than this one, is counted as `state/event` and changes nothing."""
        step = self._table[self.state].get(event)
        if step is None or epoch not in (None, self.epoch):
            self._late[f"{self.state}/{event}"] += 1
            return ()
        self.state, actions = step
        self.epoch += Action.OPEN in actions
        return actions


def sink_machine(late: Counter[str]) -> Machine[SinkState, SinkEvent]:
    """Makes the machine of a `RecvTransfer`, whose first epoch is being opened."""
    return Machine(SINK, SinkState.OPENING, 1, late)


def source_machine(late: Counter[str]) -> Machine[SourceState, SourceEvent]:
    """Makes the machine of a `SendTransfer`. Its ticket has the epoch: only sinks begin new
    ones."""
    return Machine(SOURCE, SourceState.SENDING, 0, late)
