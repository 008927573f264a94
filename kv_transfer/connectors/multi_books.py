"""What a rank with several connectors remembers of one transfer."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from kv_transfer.connector import BlockRun, Event, Failed, Progress, SinkTransfer, SourceTransfer
from kv_transfer.connectors.endpoints import Endpoints
from kv_transfer.gate import Gate


@dataclass(slots=True, eq=False)
class Incoming:
    """On its way in."""

    transfer: SinkTransfer
    nbytes: int
    hopes: set[str]  # children through which it may still come
    placed: Counter[str] = field(default_factory=Counter)  # bytes by child
    speaker: str | None = None  # who ended it; the others are not heard any more
    gate: Gate = field(default_factory=Gate)  # around what is done when it has landed

    def ends(self, name: str, event: Event) -> bool:
        """Whether the transfer is complete, or lost, with what the child says."""
        match event:
            case Progress(_, _, nbytes):
                self.placed[name] += nbytes
                shares = [share for share in self.placed.values() if share]
                return len(shares) > 1 and sum(shares) == self.nbytes
            case Failed():  # if nothing came through it, the source may take another one
                self.hopes.discard(name)
                return self.placed[name] > 0 or not self.hopes
            case _:
                return True


@dataclass(slots=True, eq=False)
class Outgoing:
    """On its way out."""

    transfer: SourceTransfer
    peers: dict[bytes, Endpoints]  # the sink ranks, by what the ticket has for them
    choices: list[str]  # children not tried yet, the best first
    serving: str | None = None  # the child that delivers; None: another is about to, or none
    runs: list[tuple[BlockRun, tuple[int, ...], bool]] = field(default_factory=list)  # announced
    moved: bool = False  # some of it was delivered: too late for another child
    switch: Future[None] | None = None  # to the next child

    def through(self, name: str) -> SourceTransfer:
        """As the child sees it."""
        pieces = (
            (piece, self.peers[endpoint].connectors[name])
            for piece, endpoint in self.transfer.pieces
        )
        return replace(self.transfer, pieces=tuple(pieces))
