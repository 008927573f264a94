"""What a rank with several connectors remembers of transfers, peers and failures."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.connector import (
    BlockRun,
    Event,
    Failed,
    Progress,
    SinkTransfer,
    SourceTransfer,
)
from pdserve.kv_transfer.connectors.base.frame import bad_frame
from pdserve.kv_transfer.gate import Gate


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


# ---- where a sink rank takes data, through every connector it speaks ----


def host_identity() -> str:
    """Equal for processes that meet at an abstract Unix socket and may pass each other memory:
    same kernel, same network namespace, same user. (Containers may share a host name and
    nothing else, or the reverse.)"""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.geteuid()}"


class Endpoints(msgspec.Struct, frozen=True):
    """What a ticket carries for each sink rank, as msgpack."""

    host: str  # `host_identity`
    connectors: dict[str, bytes]  # name → the connector's own endpoint

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoints:
        """Raises TransferError (BAD_FRAME)."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise bad_frame(f"a decode rank's endpoint: {error}", Blame.DECODE) from error


# ---- what failed a moment ago is not the first to be tried again ----

COOL_DOWN_S = 30.0


class CoolDown:
    """Remembers keys for `COOL_DOWN_S` seconds each. Not thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until: dict[Hashable, float] = {}

    def add(self, keys: Collection[Hashable]) -> bool:
        """Their time begins (again). Whether any of them is new here."""
        now = self._now()
        self._until = {key: until for key, until in self._until.items() if until > now}
        news = any(key not in self._until for key in keys)
        self._until.update(dict.fromkeys(keys, now + COOL_DOWN_S))
        return news

    def __contains__(self, key: Hashable) -> bool:
        return self._until.get(key, 0.0) > self._now()
