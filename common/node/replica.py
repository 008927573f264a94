"""A replica: one copy of the model in a node, with ranks, KV blocks, queue and loop of its own.

Replicas of a node share its endpoint and nothing else. A job is given to one of them when it is
opened, and stays there: a sequence's KV is in the blocks of one replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from pdserve.common.config.node import SchedulerConfig
from pdserve.common.core.errors import Blame, InvalidRequest, NodeError, PdserveError
from pdserve.common.core.request import TokenEvent
from pdserve.common.core.sampling import SampledToken
from pdserve.common.engine.core import EngineCore
from pdserve.common.engine.messages import ExpertLoad, RankReady
from pdserve.common.engine.sequence import Finish
from pdserve.common.engine.sequence import Sequence as EngineSequence
from pdserve.common.node.ranks import Ranks
from pdserve.common.node.watchdog import Watchdog
from pdserve.common.obs.metrics import NodeMetrics
from pdserve.kv_transfer.commands import Call
from pdserve.kv_transfer.control.sink import KVSink
from pdserve.kv_transfer.control.source import KVSource

logger = logging.getLogger(__name__)


class Session(Protocol):
    """One job on a replica; a role's own."""

    def admitted(self, sequence: EngineSequence) -> None: ...
    def computed(self, sequence: EngineSequence) -> None: ...
    def sampled(self, sequence: EngineSequence, event: TokenEvent) -> None: ...
    def fail(self, error: PdserveError) -> None:
        """Its job ends with this error."""

    async def close(self) -> None: ...


S = TypeVar("S", bound=Session)
T = TypeVar("T", bound=KVSource | KVSink)


class Replica(Generic[S, T]):
    """Owns its ranks, and knows the sessions that it was given. It is its engine's listener: what
    the engine says of a sequence goes to the session that adopted it."""

    def __init__(
        self,
        index: int,
        name: str,
        blame: Blame,
        ranks: Ranks,
        config: SchedulerConfig,
        max_model_len: int,
        make_transfers: Callable[[Sequence[RankReady], Call], T],
        metrics: NodeMetrics,
    ) -> None:
        """`name` begins messages about it; empty: the node has no other replica. `blame` is the
        node's."""
        self.index = index
        self.name = name
        self.blame = blame
        self.ranks = ranks
        self.scheduler = ranks.scheduler
        self.engine = EngineCore(ranks.executor, ranks.scheduler, self, max_model_len)
        self.transfers = make_transfers(ranks.ready, self.engine.call)
        self.watchdog = Watchdog(config.engine_stall_timeout)
        self.sessions: set[S] = set()
        self._metrics = metrics
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

    def sampled(self, sequence: EngineSequence, token: SampledToken, finish: Finish | None) -> None:
        event = TokenEvent(
            choice=sequence.choice,
            tokens=(token,),
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
        self._metrics.observe_experts(load.assignments, load.balancedness)
