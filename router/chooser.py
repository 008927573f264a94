"""Which nodes a request runs on: now, or as soon as there are some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import product
from time import monotonic
from typing import TypeVar

from common.config.schema import RoutingConfig
from common.core.errors import Unavailable
from common.rpc.pb import cluster_pb2 as pb
from router.placement import Placement, can_pair, make_policy, place, why_not
from router.registry import Node, Registry
from router.run import Run

T = TypeVar("T")


class Chooser:
    """Policy and patience over the registry."""

    def __init__(self, config: RoutingConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self._policies = make_policy(config.prefill_policy), make_policy(config.decode_policy)

    # ---- what there is ----------------------------------------------------------------------

    def usable(self) -> tuple[list[Node], list[Node]]:
        """Prefill and decode nodes on which a request may be placed now."""
        return self._registry.usable(pb.ROLE_PREFILL), self._registry.usable(pb.ROLE_DECODE)

    def pairs(self) -> list[tuple[Node, Node]]:
        """Of these, those that fit together."""
        return [pair for pair in product(*self.usable()) if can_pair(*pair)]

    def ready(self) -> tuple[bool, str]:
        """Whether there is a pair; the reason when not."""
        if self.pairs():
            return True, "ok"
        prefills, decodes = self.usable()
        if not prefills or not decodes:
            return False, self._why_missing(prefills, decodes)
        reasons = [why_not(prefill, decode) for prefill, decode in product(prefills, decodes)]
        return False, f"no prefill node pairs with a decode node ({'; '.join(reasons[:4])})"

    def _why_missing(self, prefills: Sequence[Node], decodes: Sequence[Node]) -> str:
        roles = (("prefill", pb.ROLE_PREFILL, prefills), ("decode", pb.ROLE_DECODE, decodes))
        missing = [(name, role) for name, role, nodes in roles if not nodes]
        what = " and ".join(f"no usable {name} node" for name, _ in missing)
        why = [text for _, role in missing for text in self._registry.unusable_reasons(role)]
        return f"{what} ({'; '.join(why[:4])})" if why else what

    # ---- choosing ---------------------------------------------------------------------------

    async def place(self, run: Run) -> Placement:
        """A pair of nodes; waits for one as long as the queue's time-out allows.

        Raises:
            Unavailable: none came.
        """
        return await self._wait_for(lambda: self._find_placement(run))

    async def prefill_for(self, run: Run, decode: Node) -> Node | None:
        """A prefill node for blocks that `decode` holds already; waits as `place` does. None:
        it is better to begin anew, for only other decode nodes have a prefill node left.

        Raises:
            Unavailable: none came.
        """

        def find() -> tuple[Node | None] | None:
            fitting = [node for node in self.usable()[0] if can_pair(node, decode)]
            nodes = _without(fitting, run.recovery.avoid) or fitting
            if nodes:
                return (self._policies[0](nodes),)
            return (None,) if self._find_placement(run) is not None else None

        (found,) = await self._wait_for(find)
        return found

    def _find_placement(self, run: Run) -> Placement | None:
        """A pair of nodes that may take the request now. One that has begun stays with its
        version, and does not wait for a prefill node: a decode node can compute it, too."""
        local = run.recovery.local_prefill
        local = local or len(run.job.token_ids) < self._config.local_prefill_threshold
        begun = run.version is not None
        prefills, decodes = self.usable()
        decodes = [node for node in decodes if run.version in (None, node.info.fingerprint)]
        avoids: tuple[Collection[str], ...] = (run.recovery.avoid, ())
        for local_prefill, avoid in product((local, local or begun), avoids):
            pair = _without(prefills, avoid), _without(decodes, avoid)
            placement = place(*pair, *self._policies, local_prefill)
            if placement is not None:
                return placement
        return None

    async def _wait_for(self, find: Callable[[], T | None]) -> T:
        deadline = monotonic() + self._config.queue_timeout
        while (found := find()) is None:
            # Wake up now and then: a breaker that may be tried again announces nothing.
            patience = min(0.5, deadline - monotonic())
            if patience <= 0:
                ready, reason = self.ready()
                reason = "no usable node is of the version that began this" if ready else reason
                raise Unavailable(reason, code="NO_NODE", retry_after=2.0)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._registry.wait_for_change()
        return found


def _without(nodes: Sequence[Node], avoid: Collection[str]) -> list[Node]:
    return [node for node in nodes if node.info.node_id not in avoid]
