"""What parties have in common: rules, messages, moves, and what must never happen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

from pdserve.kv_transfer.control.protocol import (
    SINK,
    SOURCE,
    SinkEvent,
    SinkState,
    SourceEvent,
    SourceState,
    Table,
)

# What a budget limits.
BAD, CRASH, DUPLICATE = "bad", "crash", "duplicate"  # data, parties, messages
D_ENDS, A_FAILS, B_FAILS = "D ends", "A fails", "B fails"


class Invariant(StrEnum):
    ONE_OUTCOME = "the waiter gets the blocks or they are freed, once"
    ONE_FREE = "a source frees its blocks once"
    FREED_WHILE_READ = "a source's blocks are not freed while a rank may read them"
    GIVEN_WHILE_WRITTEN = "the sink's blocks are not given away while a rank may write into them"
    NO_LATE_WRITE = "a rank takes no write once the blocks are given away"
    NO_STALE_WRITE = "a rank takes no write of an old epoch"
    RIGHT_CONTENT = "what is activated is one commit's token and its source's undamaged data"
    ONE_HOLDER = "an epoch's ticket is in one source's hands"
    ONE_ANSWER = "each call to the sink is answered once"
    STALE_IS_INERT = "what names an old epoch changes nothing"
    CANCEL_ENDS_IT = "a cancelled hand-off is over"
    ONE_REPULL = "a source sends again once"
    HONEST_SUCCESS = "a source reports success only of what was activated"
    TERMINATION = "if nothing but time passes, everybody comes to an end"
    SUCCESS = "while somebody is left who can do the work, it gets done"


class Violation(Exception):
    """`trace`: the steps that lead there, by the explorer."""

    def __init__(self, invariant: Invariant, detail: str) -> None:
        super().__init__(f"{invariant.name}: {invariant} ({detail})")
        self.invariant = invariant
        self.during = ""
        self.trace: tuple[str, ...] = ()


def broken(invariant: Invariant, detail: object) -> NoReturn:
    raise Violation(invariant, str(detail))


@contextmanager
def during(step: str) -> Iterator[None]:
    """Says in which step a violation happened."""
    try:
        yield
    except Violation as violation:
        violation.during = f"{step} ▸ {violation.during}"
        raise


@dataclass(frozen=True)
class Rules:
    """The tables and the rules their drivers follow. The defaults are the truth; anything else
    is a mutant, or (`ranks`, `empty`, `asks`) another size of the world."""

    sink: Table[SinkState, SinkEvent] = field(default_factory=lambda: SINK)
    source: Table[SourceState, SourceEvent] = field(default_factory=lambda: SOURCE)
    ranks: int = 2  # of the decode node
    empty: bool = False  # the decode node has every block: ranks land as they accept
    asks: int = 1  # times the router asks for another epoch
    unchecked: frozenset[SinkEvent] = frozenset()  # events whose epoch the sink ignores
    epoch_grows: bool = True
    rank_checks_epoch: bool = True
    landed_is_final: bool = True  # a rank that has everything takes no duplicate
    quiesce_waits: bool = True  # for the accept under way
    last_asker_alone: bool = True  # gets the ticket
    router_outbids: bool = True  # a source that asks for another try
    digests_compared: bool = True
    recalls_landing: bool = True  # of ranks that landed before the epoch was open
    renewals: bool = False  # sources renew while they compute: each may be refused, late
    sink_lease: bool = True
    source_lease: bool = True
    # Cells of either table that were passed through: (state, event).
    taken: set[tuple[StrEnum, StrEnum]] = field(default_factory=set, compare=False)


class Message(NamedTuple):
    """`number` is the rank (write) or the call that is made or answered (retarget, ticket)."""

    to: str
    # to D: commit, abort, retarget, renew, write; from it: acked, mismatch, refused, ticket, ended
    kind: str
    sender: str
    epoch: int = 0
    number: int = 0
    good: bool = True

    def __str__(self) -> str:
        epoch = f" of epoch {self.epoch}" if self.epoch else ""
        rank = f" into rank {self.number}" if self.kind == "write" else ""
        return f"{'' if self.good else 'damaged '}{self.kind}{epoch} from {self.sender}{rank}"


class Note(NamedTuple):
    """What the explorer must know across parties: who `holds` a ticket, `activated` what, or
    `succeeded` with it."""

    fact: str
    source: str
    epoch: int


class Move(NamedTuple):
    label: str
    part: Any  # after it
    sends: tuple[Message, ...] = ()
    notes: tuple[Note, ...] = ()
    cost: str = ""


class Party(ABC):
    """One of those that take part. Parts (a party's states) are values: they are never changed."""

    name: str

    @abstractmethod
    def start(self) -> Any:
        """The part it begins with."""

    @abstractmethod
    def moves(self, part: Any) -> Iterator[Move]:
        """What it may do by itself."""

    @abstractmethod
    def receive(self, part: Any, message: Message) -> Move:
        """What it makes of a message that matters."""

    @abstractmethod
    def matters(self, part: Any, message: Message) -> bool:
        """Whether the message can ever change anything; else it is taken off the network."""

    def timely(self, part: Any) -> Move | None:
        """The next of the moves that time alone brings about: an answer, or else a lapse."""
        return None

    @abstractmethod
    def check_end(self, part: Any) -> None:
        """Raises Violation when a party for which time brings nothing more is not done."""
