"""The ranks that the control halves command: their state, and the effect of commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from handoff.promises import Promise, broken
from pdserve.kv_transfer.connector import BlockRun, RunDigest
from pdserve.kv_transfer.layout import Rect

NUM_BLOCKS = 2


class Place(NamedTuple):
    """A decode rank's share of one KV group."""

    number: int
    rank: int
    group: int
    first: int  # first block that the group transfers

    @property
    def rect(self) -> Rect:
        return Rect(self.rank, self.rank + 1, 0, 1)

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f", group {self.group}," if self.group else "")


class Write(NamedTuple):
    """A source's data for one rank."""

    source: str
    epoch: int
    good: bool = True

    def digest(self, place: Place) -> RunDigest:
        said = f"{self.source}{self.epoch}{'' if self.good else ' damaged'}"
        run = BlockRun(place.first, NUM_BLOCKS - place.first)
        return RunDigest(place.number, place.rect, run, said.encode())

    def __str__(self) -> str:
        return f"{'' if self.good else 'damaged '}data of epoch {self.epoch} from {self.source}"


@dataclass
class SinkRank:
    """A sink rank's share, which takes data of its accepted epoch once."""

    place: Place
    wanted: int  # blocks
    reads_again: bool = True
    accepted: int = 0  # epoch; 0: none
    content: Write | None = None
    hashed: Write | None = None  # the data that it hashed while landing
    landed: bool = False

    def accept(self, epoch: int) -> None:
        if epoch > self.accepted:
            self.accepted, self.landed = epoch, not self.wanted

    def takes(self, write: Write) -> bool:
        return write.epoch == self.accepted and not self.landed

    def take(self, write: Write, epoch: int, given: str) -> None:
        """Takes a write; `epoch`: the latest that any rank has accepted."""
        if write.epoch < epoch:
            broken(Promise.NO_STALE_WRITE, f"{write} into {self.place} in epoch {epoch}")
        if given:
            broken(Promise.NO_LATE_WRITE, f"{write} into {self.place}, blocks {given}")
        self.content, self.hashed, self.landed = write, write, True

    def wrong(self, digests: tuple[RunDigest, ...]) -> tuple[RunDigest, ...]:
        """Returns the source's digests that differ from the data here."""
        hashed = self.content if self.reads_again else self.hashed
        mine = hashed and hashed.digest(self.place)
        return tuple(each for each in digests if each != mine)


@dataclass
class SourceRank:
    """A source's KV of one KV group."""

    name: str
    sinks: tuple[Place, ...]
    epoch: int = 0
    reading: bool = False  # whether it may be reading the blocks

    def hashes(self) -> tuple[RunDigest, ...]:
        return tuple(Write(self.name, self.epoch).digest(place) for place in self.sinks)
