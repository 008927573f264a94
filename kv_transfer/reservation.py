"""One transfer as its sink keeps it: the blocks it holds, whose turn it is, who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.core.errors import PdserveError
from kv_transfer.digest import RunDigest
from kv_transfer.lease import Lease
from kv_transfer.protocol import Machine, SinkEvent, SinkState
from kv_transfer.ticket import Ticket


def new_future() -> asyncio.Future[Any]:
    """A future that nobody need be waiting for when it fails."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


@dataclass(frozen=True, slots=True)
class Arrival:
    """All KV is in place."""

    first_token: Any  # what the source passed to the commit
    nbytes: int


class Epoch:
    """One source's turn: what it has committed and what has landed so far."""

    def __init__(self) -> None:
        self.landed: dict[int, int] = {}  # rank → bytes
        self.payload: Any = None
        self.digests: Sequence[RunDigest] = ()
        self.ticket = new_future()  # what `reserve` or `retarget` waits for: Ticket
        self.committed = new_future()  # what `commit` waits for: bytes landed


@dataclass(slots=True, eq=False)
class Reservation:
    """One transfer the sink holds blocks for."""

    ticket: Ticket  # of the current epoch
    block_ids: tuple[int, ...]
    machine: Machine[SinkState, SinkEvent]
    on_freed: Callable[[], None]
    lease: Lease | None = None
    arrival: asyncio.Future[Any] = field(default_factory=new_future)
    epoch: Epoch = field(default_factory=Epoch)
    opening: asyncio.Task[None] | None = None
    cause: PdserveError | None = None  # of the present failure: the first one
