"""A replica: one copy of the model in a node, with ranks, KV blocks, queue and loop of its own.

Replicas of a node share its endpoint and nothing else. A job is given to one of them when it is
opened, and stays there: a sequence's KV is in the blocks of one replica.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from pdserve.common.obs.metrics import NodeMetrics

logger = logging.getLogger(__name__)


class Session(Protocol):
    """One job on a replica; a role's own."""

    def admitted(self, sequence: EngineSequence) -> None: ...
    def computed(self, sequence: EngineSequence) -> None: ...
    def sampled(self, sequence: EngineSequence, event: TokenEvent) -> None: ...
    def fail(self, error: PdserveError) -> None:
        """Its job ends with this error."""

    async def close(self) -> None: ...


class Transfers(Protocol):
    """A role's half of the KV hand-off, for one replica: `kv_transfer` has both halves."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Events by name, for the metrics."""

    def on_event(self, rank: int, message: bytes) -> None:
        """Takes what a rank's extension reports."""

    async def close(self) -> None:
        """Ends all transfers; returns when no rank touches a block for them any more."""


Call = Callable[[int, bytes], Awaitable[bytes]]  # `EngineCore.call`: rank, command → its answer
S = TypeVar("S", bound=Session)
T = TypeVar("T", bound=Transfers)


class Replica(Generic[S, T]):
    """Owns its ranks, and knows the sessions that it was given. It is its engine's listener: what
    the engine says of a sequence goes to the session that adopted it."""

    def __init__(
        self,
        index: int,
        name: str,
        blame: Blame,
        ranks: Ranks,
        max_model_len: int,
        stall_timeout: float,
        make_transfers: Callable[[Sequence[RankReady], Call], T],
        metrics: NodeMetrics,
    ) -> None:
        """`name` begins messages about it; empty: the node has no other replica. `blame` is the
        node's. `stall_timeout`: seconds without progress after which it is unhealthy."""
        self.index = index
        self.name = name
        self.blame = blame
        self.ranks = ranks
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
        """Why it could not produce a token; empty: it could."""
        return self.name + self.watchdog.reason if self.watchdog.reason else ""

    def is_healthy(self) -> bool:
        return not self.watchdog.reason

    def check_health(self) -> bool:
        """Has the watchdog judge; whether the replica has come to a standstill since."""
        stalled = self.watchdog.stalled
        self.watchdog.check(self.engine.progress())
        return self.watchdog.stalled and not stalled

    # ---- sessions ---------------------------------------------------------------------------

    def adopt(self, sequence: EngineSequence, session: S) -> None:
        """From now on the engine's events about the sequence go to the session."""
        self._by_sequence[sequence.seq_id] = session

    def forget(self, session: S) -> None:
        """The session is closed."""
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
        logger.warning("%s%s; it ends here, the others go on", self.name, message)
        error: PdserveError = NodeError(message, code=code, blame=self.blame)
        if code == InvalidRequest.default_code:
            error = InvalidRequest(message)
        self._by_sequence[sequence.seq_id].fail(error)

    def routed(self, load: ExpertLoad) -> None:
        self.metrics.observe_experts(load.assignments, load.balancedness)


class Watchdog:
    """Whether an engine that has work gets any of it done. Numbers in, a verdict out.

    There is work, and for `timeout` seconds nothing has changed: a step does not return, a rank
    does not answer a call (of the KV transfer), or the first in the queue finds no blocks. A long
    queue alone is no fault: while steps are computed, tokens are produced.

    `check` must be called several times within `timeout` seconds: that is how time is taken.
    """

    def __init__(self, timeout: float, now: Callable[[], float] = monotonic) -> None:
        self._timeout = timeout
        self._progress = _Stopwatch(now)
        self._call = _Stopwatch(now)
        self.stalled = False
        """A rank stands still: nothing in this engine goes on."""
        self.reason = ""
        """Why no token could be produced; empty: one could."""

    def check(self, progress: EngineProgress) -> None:
        """Judges the engine as it is now."""
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


class _Stopwatch:
    """How long something has been the same, as far as one has checked."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._state: object = None
        self._since = now()

    def seconds(self, state: object) -> float:
        """None is nothing, and nothing is always new."""
        if state is None or state != self._state:
            self._state, self._since = state, self._now()
        return self._now() - self._since
