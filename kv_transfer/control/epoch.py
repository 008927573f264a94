"""One source's turn to fill a reservation (`Epoch`), what the waiter gets of it (`ArrivedKV`) and
what is remembered for calls that come late (`Outcome`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.kv_transfer.connector import Borrowed
from pdserve.kv_transfer.control.background import new_future
from pdserve.kv_transfer.control.loans import Stay
from pdserve.kv_transfer.control.protocol import SinkEvent
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest

MAX_MESSAGE = 500  # characters of a failure that are kept


@dataclass(frozen=True, slots=True)
class ArrivedKV:
    """All KV is in place."""

    first_token: pb.FirstToken  # what the source passed to the commit
    nbytes: int
    # Seconds from the epoch's ticket:
    data_s: float = 0.0  # until the last byte was in place
    commit_s: float = 0.0  # until the source had committed
    verify_s: float = 0.0  # from the later of both until the digests were compared


class Epoch:
    """One source's turn: what it has committed and what has landed so far."""

    def __init__(self) -> None:
        self.landed: dict[int, int] = {}  # rank → bytes
        self.times: dict[SinkEvent, float] = {}  # of what has happened
        self.borrowed: dict[int, Borrowed] = {}  # rank → what it reads in place
        self.stay: Stay | None = None  # where that is, from VERIFY on
        self.first_token = pb.FirstToken()  # as committed
        self.digests: Sequence[RunDigest] = ()
        self.ticket: asyncio.Future[Ticket] = new_future()  # for `issued`, `retarget`
        self.committed: asyncio.Future[int] = new_future()  # for `commit`: bytes landed

    @property
    def nbytes(self) -> int:
        return sum(self.landed.values())

    def arrival(self) -> ArrivedKV:
        """Once it is verified."""
        times = self.times
        landed, committed = times[SinkEvent.RANKS_LANDED], times[SinkEvent.COMMIT]
        return ArrivedKV(
            self.first_token,
            self.nbytes,
            data_s=landed - times[SinkEvent.OPENED],
            commit_s=committed - times[SinkEvent.OPENED],
            verify_s=times[SinkEvent.VERIFIED] - max(landed, committed),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is kept of a transfer that is over, for calls that come late. It holds on to nothing:
    not the session, nor its tokens, nor an error's frames."""

    epoch: int
    nbytes: int
    failure: Callable[[], PdserveError] | None  # makes the error anew

    @classmethod
    def of(cls, epoch: int, nbytes: int, cause: PdserveError | None) -> Outcome:
        return cls(epoch, nbytes, None if cause is None else _copies(cause))


def _copies(error: PdserveError) -> Callable[[], PdserveError]:
    return partial(
        type(error),
        error.message[:MAX_MESSAGE],
        code=error.code,
        blame=error.blame,
        retryable=error.retryable,
    )


def stale_epoch(message: str) -> TransferError:
    return TransferError(message, code="STALE_EPOCH", blame=Blame.PREFILL, retryable=True)
