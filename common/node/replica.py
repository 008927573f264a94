"""A replica: one copy of the model in a node, with its own ranks, KV blocks, queue and loop.

Replicas of a node share only its endpoint. A job goes to one of them when it is opened and stays
there, because a sequence's KV is in the blocks of one replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Generic, Protocol, TypeVar

from pdserve.common.core.errors import Blame, InvalidRequest, NodeError, PdserveError
from pdserve.common.core.request import TokenEvent
from pdserve.common.core.sampling import SampledToken
from pdserve.common.engine.core import EngineCore, EngineProgress
from pdserve.common.engine.messages import ExpertLoad, RankReady
from pdserve.common.engine.sequence import Finish
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.node.ranks import Ranks
from pdserve.common.node.utilisation import Utilisation
from pdserve.common.obs.metrics import NodeMetrics

logger = logging.getLogger(__name__)


class Session(Protocol):
    """Serves one job on a replica; each role has its own class."""

    def admitted(self, sequence: EngineSequence) -> None: ...
    def computed(self, sequence: EngineSequence) -> None: ...
    def sampled(self, sequence: EngineSequence, event: TokenEvent) -> None: ...
    def fail(self, error: PdserveError) -> None:
        """Ends its job with this error."""

    async def close(self) -> None: ...


class Transfers(Protocol):
    """Does a role's half of the KV hand-off for one replica: `KVSource` or `KVSink`."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts events by name, for the metrics."""

    def on_event(self, rank: int, message: bytes) -> None:
        """Takes a report of a rank's extension."""

    async def close(self) -> None:
        """Ends all transfers; returns when no rank touches a block for them any more."""


Call = Callable[[int, bytes], Awaitable[bytes]]  # `EngineCore.call`: rank, command → its answer
S = TypeVar("S", bound=Session)
T = TypeVar("T", bound=Transfers)


class Replica(Generic[S, T]):
    """Owns its ranks and knows its sessions. As the engine's listener it passes the engine's events
    about a sequence to the session that adopted it."""

    def __init__(
        self,
        index: int,
        name: str,
        blame: Blame,
        ranks: Ranks,
        utilisation: Utilisation,
        max_model_len: int,
        stall_timeout: float,
        make_transfers: Callable[[Sequence[RankReady], Call], T],
        metrics: NodeMetrics,
    ) -> None:
        """Prefixes messages with `name`, which is empty for an only replica. `blame` is the node's.
        After `stall_timeout` seconds without progress it is unhealthy."""
        self.index = index
        self.name = name
        self.blame = blame
        self.ranks = ranks
        self.utilisation = utilisation
        self.scheduler = ranks.scheduler
        self.engine = EngineCore(ranks.executor, ranks.scheduler, self, max_model_len)
        self.transfers = make_transfers(ranks.ready, self.engine.call)
        self.watchdog = Watchdog(stall_timeout)
        self.sessions: set[S] = set()
        self.metrics = metrics  # the node's
        self._by_sequence: dict[int, S] = {}
        ranks.executor.on_event(self.transfers.on_event)

    @property
    def unhealthy_reason(self) -> str:
        """The reason why the replica cannot produce tokens; empty if it can."""
        return self.name + self.watchdog.reason if self.watchdog.reason else ""

    def is_healthy(self) -> bool:
        return not self.watchdog.reason

    async def ping(self, rank: int, period: float) -> None:
        """Asks a rank every `period` seconds whether it answers, until it has died."""
        with suppress(NodeError):  # its death is reported to the node
            while True:
                await self.engine.ping(rank)
                await asyncio.sleep(period)

    def check_health(self) -> bool:
        """Runs the watchdog; returns whether the replica has stalled since the last check."""
        stalled = self.watchdog.stalled
        self.watchdog.check(self.engine.progress())
        return self.watchdog.stalled and not stalled

    # ---- sessions ---------------------------------------------------------------------------

    def adopt(self, sequence: EngineSequence, session: S) -> None:
        """Sends the engine's events about the sequence to the session from now on."""
        self._by_sequence[sequence.seq_id] = session

    def forget(self, session: S) -> None:
        """Removes a session that is closed."""
        self.sessions.discard(session)
        self._by_sequence = {i: s for i, s in self._by_sequence.items() if s is not session}

    def fail_sessions(self, error: PdserveError) -> None:
        for session in self.sessions:
            session.fail(error)

    # ---- the engine's listener --------------------------------------------------------------

    def admitted(self, sequence: EngineSequence) -> None:
        self._by_sequence[sequence.seq_id].admitted(sequence)

    def computed(self, sequence: EngineSequence) -> None:
        self._by_sequence[sequence.seq_id].computed(sequence)

    def sampled(
        self,
        sequence: EngineSequence,
        tokens: tuple[SampledToken, ...],
        finish: Finish | None,
    ) -> None:
        event = TokenEvent(
            choice=sequence.choice,
            tokens=tokens,
            finish_reason=finish.reason if finish else None,
            stop_token_id=finish.stop_token_id if finish else None,
        )
        self._by_sequence[sequence.seq_id].sampled(sequence, event)

    def failed(self, sequence: EngineSequence, reason: str, code: str) -> None:
        message = f"request {sequence.request_id}, choice {sequence.choice}: {reason}"
        logger.warning("%s%s; only this sequence fails", self.name, message)
        error: PdserveError = NodeError(message, code=code, blame=self.blame)
        if code == InvalidRequest.default_code:
            error = InvalidRequest(message)
        self._by_sequence[sequence.seq_id].fail(error)

    def routed(self, load: ExpertLoad) -> None:
        self.metrics.observe_experts(load.assignments, load.balancedness)


class Watchdog:
    """Detects from the engine's counters whether an engine with work makes progress.

    It is unhealthy when there is work and nothing has changed for `timeout` seconds: a step does
    not return, a rank does not answer a call (of the KV transfer), or the first sequence in the
    queue finds no blocks. A long queue alone is no fault: while steps are computed, tokens are
    produced.

    `check` must be called several times within `timeout` seconds, because it measures the time. A
    stall for `GIVE_UP` times `timeout` is for good (`hopeless`). The time between two checks counts
    up to a quarter of `timeout`, because the whole host may have stood still.
    """

    GIVE_UP = 3

    def __init__(self, timeout: float, now: Callable[[], float] = monotonic) -> None:
        self._timeout = timeout
        self._progress = _Stopwatch(now)
        self._call = _Stopwatch(now)
        self.stalled = False
        """Whether a rank stalls, so that the engine makes no progress."""
        self.reason = ""
        """The reason why the engine cannot produce tokens; empty if it can."""
        self._now = now
        self._checked = now()
        self._stalled_for = 0.0  # seconds, beyond `timeout`

    @property
    def hopeless(self) -> bool:
        """Whether a rank stalls for so long that the node must end."""
        return self._stalled_for >= (self.GIVE_UP - 1) * self._timeout

    def check(self, progress: EngineProgress) -> None:
        """Sets `stalled` and `reason` for the present state of the engine."""
        unchanged = self._progress.seconds(None if progress.idle else progress.counters)
        unanswered = self._call.seconds(progress.call)
        self.stalled, self.reason = False, ""
        if unchanged >= self._timeout and progress.computing:
            self.stalled = True
            self.reason = f"step {progress.step} has been running for {unchanged:.1f} s"
        elif unanswered >= self._timeout and progress.call is not None:
            self.stalled = True
            self.reason = f"rank {progress.call[1]} has not answered a call for {unanswered:.1f} s"
        elif unchanged >= self._timeout:
            self.reason = (
                f"KV memory exhausted: nothing was admitted, computed or freed for "
                f"{unchanged:.1f} s; the first of {progress.waiting} waiting sequences needs "
                f"{progress.needed_blocks} blocks, {progress.free_blocks} of "
                f"{progress.total_blocks} are free"
            )
        since, self._checked = self._checked, self._now()
        passed = min(self._checked - since, self._timeout / 4)
        self._stalled_for = self._stalled_for + passed if self.stalled else 0.0


class _Stopwatch:
    """Measures how long a state has been the same, at the times of the checks."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._state: object = None
        self._since = now()

    def seconds(self, state: object) -> float:
        """Returns the seconds since the state changed; the state None always counts as changed."""
        if state is None or state != self._state:
            self._state, self._since = state, self._now()
        return self._now() - self._since
