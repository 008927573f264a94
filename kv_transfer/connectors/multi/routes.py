"""The routes of a `MultiConnector`: the children that may carry a transfer, the endpoints of its
peers, and the recent failures."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from pdserve.common.core import host
from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    KVConnector,
    Landed,
    Progress,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.frame import bad_frame
from pdserve.kv_transfer.gate import Gate

AVOID_S = 30.0  # for which a child that failed is the last choice


@dataclass(slots=True, eq=False)
class SinkRoute:
    """Tracks the children through which an accepted transfer may come."""

    transfer: SinkTransfer
    nbytes: int
    open: set[str]  # children that have not failed
    received: Counter[str] = field(default_factory=Counter)  # bytes by child
    ended_by: str | None = None  # the child that ended it; events of others are dropped
    gate: Gate = field(default_factory=Gate)  # around the report that it has landed

    def filter(self, name: str, event: Event) -> Event | None:
        """Returns the event for the core; None if there is none."""
        if self.ended_by is not None:
            return event if name == self.ended_by else None
        if self._ends(name, event):
            self.ended_by = name
            if isinstance(event, Progress):
                return self._landed(name, event, self.nbytes)
            if isinstance(event, Landed):
                return self._landed(name, event, event.nbytes)
        elif isinstance(event, Failed):
            return None
        return event

    def _landed(self, name: str, event: Progress | Landed, nbytes: int) -> Landed:
        """Returns the event with the names of the children that moved bytes."""
        moved = {each for each, share in self.received.items() if share}
        if nbytes and not moved:  # the child reports no progress
            moved = {name}
        return Landed(event.transfer_id, event.epoch, nbytes, tuple(sorted(moved)))

    def _ends(self, name: str, event: Event) -> bool:
        """Returns whether the transfer is complete, or has failed, with this event of the child."""
        match event:
            case Progress(_, _, nbytes):
                self.received[name] += nbytes
                shares = [share for share in self.received.values() if share]
                return len(shares) > 1 and sum(shares) == self.nbytes
            case Failed():  # the source may take another child if nothing came through this one
                self.open.discard(name)
                return self.received[name] > 0 or not self.open
            case _:
                return True


class AnnouncedRun(NamedTuple):
    """Keeps what the core said of a run, for a child that takes over."""

    run: BlockRun
    block_ids: tuple[int, ...]
    last: bool
    hashed: bool

    def announce(self, child: KVConnector, transfer_id: bytes) -> None:
        ready = child.ready_hashed if self.hashed else child.ready
        ready(transfer_id, self.run, self.block_ids, self.last)


@dataclass(slots=True, eq=False)
class SourceRoute:
    """Tracks the child that delivers a submitted transfer, and those that may take over."""

    transfer: SourceTransfer
    peers: dict[bytes, Endpoints]  # the sink ranks, by their endpoints in the ticket
    untried: list[str]  # children, the best first
    active: str | None = None  # the child that delivers; None during and after a failover
    runs: list[AnnouncedRun] = field(default_factory=list)
    moved: bool = False  # some bytes were delivered: no other child may take over
    failover: Future[None] | None = None  # to the next child

    def as_seen_by(self, name: str) -> SourceTransfer:
        pieces = (
            (piece, self.peers[endpoint].connectors[name])
            for piece, endpoint in self.transfer.pieces
        )
        return replace(self.transfer, pieces=tuple(pieces))


def host_identity() -> str:
    """Returns a name that is equal for processes of one host and user, which can meet at an
    abstract Unix socket and share memory."""
    return f"{host.host_identity()}/{os.geteuid()}"


class Endpoints(msgspec.Struct, frozen=True):
    """Carries a sink rank's endpoints in a ticket, as msgpack."""

    host: str  # `host_identity`
    connectors: dict[str, bytes]  # name → the connector's own endpoint

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Endpoints:
        """Raises TransferError (BAD_FRAME)."""
        try:
            return _endpoints.decode(data)
        except msgspec.DecodeError as error:
            raise bad_frame(f"a decode rank's endpoint: {error}", Blame.DECODE) from error


_endpoints = msgspec.msgpack.Decoder(Endpoints)


class RecentFailures:
    """Remembers keys for `AVOID_S` seconds each. Not thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until: dict[Hashable, float] = {}

    def add(self, keys: Collection[Hashable]) -> bool:
        """Adds keys, or starts their time again; returns whether any is new."""
        now = self._now()
        self._until = {key: until for key, until in self._until.items() if until > now}
        news = any(key not in self._until for key in keys)
        self._until.update(dict.fromkeys(keys, now + AVOID_S))
        return news

    def __contains__(self, key: Hashable) -> bool:
        return self._until.get(key, 0.0) > self._now()
