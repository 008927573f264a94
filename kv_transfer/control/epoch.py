"""The records of a `RecvTransfer`: one source's turn to fill its blocks (`Epoch`), the result for
the decode session (`RecvResult`) and the outcome kept for late calls (`FinishedTransfer`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdserve.common.core.errors import Blame, PdserveError, TransferError
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.kv_transfer.control.background import new_future
from pdserve.kv_transfer.control.protocol import SinkEvent
from pdserve.kv_transfer.control.ticket import Ticket
from pdserve.kv_transfer.digest import RunDigest

MAX_MESSAGE = 500  # characters of a failure that are kept


@dataclass(frozen=True, slots=True)
class RecvResult:
    """Tells the decode session that all KV is in its blocks."""

    first_token: pb.TokenEvent  # as the source committed it
    nbytes: int
    # Seconds from the epoch's ticket:
    data_s: float = 0.0  # until the last byte was in place
    commit_s: float = 0.0  # until the source had committed
    verify_s: float = 0.0  # from the later of both until the digests were compared


class Epoch:
    """Records one source's turn: its commit and the bytes that have landed so far."""

    def __init__(self) -> None:
        self.landed: dict[int, int] = {}  # rank → bytes
        self.times: dict[SinkEvent, float] = {}  # when each event came
        self.first_token = pb.TokenEvent()  # as committed
        self.digests: Sequence[RunDigest] = ()
        self.ticket: asyncio.Future[Ticket] = new_future()  # for `issued`, `retarget`
        self.committed: asyncio.Future[int] = new_future()  # for `commit`: bytes landed

    @property
    def nbytes(self) -> int:
        return sum(self.landed.values())

    def result(self) -> RecvResult:
        """Makes the result of an epoch that is verified."""
        times = self.times
        landed, committed = times[SinkEvent.RANKS_LANDED], times[SinkEvent.COMMIT]
        return RecvResult(
            self.first_token,
            self.nbytes,
            data_s=landed - times[SinkEvent.OPENED],
            commit_s=committed - times[SinkEvent.OPENED],
            verify_s=times[SinkEvent.VERIFIED] - max(landed, committed),
        )


@dataclass(frozen=True, slots=True)
class FinishedTransfer:
    """Keeps the outcome of a transfer that is over, for late calls. It references neither the
    session and its tokens nor an error's stack frames."""

    epoch: int
    nbytes: int
    failure: Callable[[], PdserveError] | None  # makes a new copy of the error

    @classmethod
    def of(cls, epoch: int, nbytes: int, cause: PdserveError | None) -> FinishedTransfer:
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
