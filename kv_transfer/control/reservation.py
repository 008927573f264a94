"""One transfer as its sink keeps it: the blocks it holds, whose turn it is, who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdserve.common.core.errors import PdserveError
from pdserve.kv_transfer.control.lease import Lease
from pdserve.kv_transfer.control.protocol import Machine, SinkEvent, SinkState
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest

MAX_MESSAGE = 500  # characters of a failure that are kept


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a transfer that is over, for calls that come late. It holds on to nothing:
    not the session, nor its tokens, nor an error's frames."""

    epoch: int
    nbytes: int
    failure: Callable[[], PdserveError] | None  # makes the error anew

    @classmethod
    def of(cls, entry: Reservation) -> Outcome:
        failure = None if entry.cause is None else _copies(entry.cause)
        return cls(entry.machine.epoch, entry.nbytes, failure)


def _copies(error: PdserveError) -> Callable[[], PdserveError]:
    return partial(
        type(error),
        error.message[:MAX_MESSAGE],
        code=error.code,
        blame=error.blame,
        retryable=error.retryable,
    )


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
    progress: int = 0  # grows as the lease is renewed

    @property
    def nbytes(self) -> int:
        """Landed in this epoch."""
        return sum(self.epoch.landed.values())

    def renew(self) -> None:
        self.progress += 1
        if self.lease is not None:
            self.lease.renew()
