"""The policy of one role of nodes, and the request as placement sees it. A policy that fails fails
no request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from types import MappingProxyType
from typing import NamedTuple

from pdserve.common.core.printable import printable
from pdserve.common.core.throttle import LogThrottle
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.router.cluster.kinds import Candidates
from pdserve.router.cluster.node import ROLE_NAMES, Node
from pdserve.router.cluster.policy import (
    SESSION_BLOCK,
    Blocks,
    NodeState,
    Policy,
    PolicyRequest,
)

logger = logging.getLogger(__name__)

SLOW = 0.1  # seconds of one call of a policy; built-in ones take microseconds

Match = Callable[[Callable[[int], Blocks]], Mapping[Node, int]]  # as `NodeCaches.match`


class Chosen(NamedTuple):
    """A node that a request got, and why, for people."""

    role: str
    node: str  # its id
    why: str  # the policy's reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The properties of a request that placement needs."""

    request_id: str
    num_tokens: int  # tokens to prefill
    longest: int  # tokens of prompt and answer together, at most
    adapter: str  # digest of its LoRA adapter; empty: it has none
    version: str | None  # fingerprint of the nodes that made its tokens so far; None: it has none
    avoid: Collection[str]  # ids of nodes that have failed it
    local_prefill: bool  # its KV should not travel any more
    last_chance: Callable[[str], bool]  # as `Retries.last_chance`
    may_share: Callable[[], bool] = lambda: False  # as `Retries.may_share`
    session: str = ""  # the client's session; "": unknown
    waiting: Callable[[str], AbstractContextManager[float]]  # as `Deadline.waiting`
    blocks: Callable[[int], Blocks]  # those of its prompt, for a block size
    # `RolePolicy` writes these: the nodes that have its blocks, once looked up; and views by role.
    matched: list[Mapping[Node, int]] = field(default_factory=list)
    views: dict[int, PolicyRequest] = field(default_factory=dict)
    chosen: deque[Chosen] = field(default_factory=deque)  # all nodes so far; it adds one


class RolePolicy:
    """The policy for the nodes of one role. If the policy fails, load decides."""

    def __init__(
        self,
        role: int,
        policy: Policy,
        match: Match | None = None,
        metrics: RouterMetrics | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`match`: finds the nodes with a prompt's blocks, if the policy uses it."""
        self._now = now
        self.role = role
        self._name = ROLE_NAMES[role]
        self._policy = policy
        self._match = match if policy.uses_prefixes else None
        self._metrics = metrics
        self._log, self._slow = LogThrottle(logger), LogThrottle(logger)

    def choose(self, request: PlacementRequest, nodes: Candidates) -> Node | None:
        """Returns the policy's choice, or the least loaded node if that fails."""
        try:
            with self._timed():
                node = self._policy.choose(self._view(request), nodes)
            if node is None or node in nodes:
                return node  # type: ignore[return-value]
            why = f"it chose {printable(str(getattr(node, 'id', node)), 80)}, which does not fit"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a Rust panic and sys.exit are none of Exception
            why = _raised(error)
        self._failed(why)
        return next(nodes.by_load(), None)

    def placed(self, request: PlacementRequest, node: Node) -> None:
        """Notes that the node gets the request, and why."""
        view, why = self._view(request), ""
        try:
            with self._timed():
                why = self._policy.why(view, node)
                self._policy.placed(view, node)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._failed(_raised(error))
        request.chosen.append(Chosen(self._name, node.id, why))
        if self._match is not None and self._metrics is not None:
            self._metrics.prefix_index_queries.labels(self._name).inc(request.num_tokens)
            self._metrics.prefix_index_hits.labels(self._name).inc(view.cached.get(node, 0))

    def missing(self, request: PlacementRequest, node: Node) -> int:
        """Returns how many of the request's tokens the node must compute, as far as is known."""
        return self._view(request).missing(node)

    def most_cached(self, request: PlacementRequest) -> int:
        """Returns how many of the request's tokens some node has, as far as is known."""
        return max(self._view(request).cached.values(), default=0)

    def _view(self, request: PlacementRequest) -> PolicyRequest:
        """Returns the request as the policy sees it, the same one for a `PlacementRequest`."""
        view = request.views.get(self.role)
        if view is None:
            match = (lambda: self._cached(request)) if self._match is not None else dict
            view = PolicyRequest(
                self._name,
                request.num_tokens,
                self._now(),
                match,
                request.session,
                partial(request.blocks, SESSION_BLOCK),  # without `request`: it has the view
            )
            request.views[self.role] = view
        return view

    def _cached(self, request: PlacementRequest) -> Mapping[NodeState, int]:
        assert self._match is not None
        if not request.matched:
            request.matched.append(self._match(request.blocks))
        most = request.num_tokens - 1  # the last token is computed in any case
        cached: dict[NodeState, int] = {
            node: min(most, num_blocks * node.info.block_size)
            for node, num_blocks in request.matched[0].items()
            if node.info.role == self.role
        }
        return MappingProxyType(cached)  # a policy must not change it

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Logs a warning if the policy takes long: it runs on the event loop."""
        began = perf_counter()
        try:
            yield
        finally:
            if (took := perf_counter() - began) > SLOW:
                self._slow.warning(
                    "the policy for %s nodes took %.0f ms, and every request waited for it",
                    self._name, took * 1e3,
                )  # fmt: skip

    def _failed(self, why: str) -> None:
        self._log.warning("the policy for %s nodes failed, so load decides: %s", self._name, why)
        if self._metrics is not None:
            self._metrics.policy_failures.labels(self._name).inc()


def _raised(error: BaseException) -> str:
    try:
        return f"it raised {printable(repr(error), 200)}"
    except Exception:  # of its own __repr__
        return f"it raised {type(error).__name__}"
