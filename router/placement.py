"""Which nodes a request runs on: now, or as soon as there are some.

The decode node is chosen first, among those that pair with some prefill node. The prefill node
is chosen when the decode node's ticket is there, in `prefill`, whether it is the first one or
takes over. Either counts as loaded from the moment it is chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import count, product
from time import monotonic
from typing import TypeVar

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Unavailable
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.deadline import Deadline
from pdserve.router.registry import Node, Registry
from pdserve.router.run import Run

T = TypeVar("T")
Policy = Callable[[Sequence[Node]], Node]


class RoundRobin:
    """Every node in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._turn = count()

    def __call__(self, nodes: Sequence[Node]) -> Node:
        ordered = sorted(nodes, key=lambda node: node.info.node_id)
        return ordered[next(self._turn) % len(ordered)]


def least_load(nodes: Sequence[Node]) -> Node:
    """The node with the fewest tokens to prefill, then the fewest requests, of this router for
    each of its replicas; among equals the one that reports the fewest waiting tokens for each,
    then the most free blocks on one."""
    return min(
        nodes,
        key=lambda node: (
            node.prefill_tokens / node.replicas,
            node.in_flight / node.replicas,
            node.load.waiting_tokens / node.replicas,
            -node.load.most_free_blocks,
            node.info.node_id,
        ),
    )


def make_policy(name: str) -> Policy:
    return RoundRobin() if name == "round-robin" else least_load


def can_pair(prefill: Node, decode: Node) -> bool:
    """Whether KV of one is KV of the other, and a connector both speak can carry it."""
    same_kv = prefill.info.fingerprint == decode.info.fingerprint
    return same_kv and not set(prefill.info.kv_connectors).isdisjoint(decode.info.kv_connectors)


def why_not(prefill: Node, decode: Node) -> str:
    """In which respects two nodes differ that do not pair."""
    ours, theirs = prefill.info.fingerprint_parts, decode.info.fingerprint_parts
    differences = [
        f"{part} {ours.get(part)} ≠ {theirs.get(part)}"
        for part in sorted({*ours, *theirs})
        if ours.get(part) != theirs.get(part)
    ]
    speak, hear = prefill.info.kv_connectors, decode.info.kv_connectors
    if set(speak).isdisjoint(hear):
        differences.append(f"no common KV connector ({', '.join(speak)} ≠ {', '.join(hear)})")
    return f"{prefill.info.node_id} and {decode.info.node_id}: {', '.join(differences)}"


class Placement:
    """Policy and patience over the registry."""

    def __init__(self, config: RoutingConfig, registry: Registry) -> None:
        self._config = config
        self._registry = registry
        self._prefill_policy = make_policy(config.prefill_policy)
        self._decode_policy = make_policy(config.decode_policy)

    # ---- what there is ----------------------------------------------------------------------

    def pairs(self) -> list[tuple[Node, Node]]:
        """Those that a request may be placed on now."""
        usable = self._registry.usable(pb.ROLE_PREFILL), self._registry.usable(pb.ROLE_DECODE)
        return [pair for pair in product(*usable) if self._works(*pair)]

    def ready(self) -> tuple[bool, str]:
        """Whether a new request could be placed now; the reason when not, or what is amiss."""
        if self.pairs():
            return True, "ok"
        prefills = self._registry.usable(pb.ROLE_PREFILL)
        decodes = self._registry.usable(pb.ROLE_DECODE)
        if prefills and decodes:
            pairs = product(prefills, decodes)
            reasons = [self._why_apart(prefill, decode) for prefill, decode in pairs]
            reason = f"no prefill node pairs with a decode node ({'; '.join(reasons[:4])})"
        else:
            reason = self._why_missing(prefills, decodes)
        if any(self._left_alone(decode) for decode in decodes):
            return True, f"decode nodes prefill: {reason}"
        return False, reason

    def _works(self, prefill: Node, decode: Node) -> bool:
        ids = prefill.info.node_id, decode.info.node_id
        return can_pair(prefill, decode) and not self._registry.pairs.broken(*ids)

    def _left_alone(self, decode: Node) -> bool:
        """Whether no prefill node can serve this decode node now, but one that could, lives: its
        way here is cut, or it is sick. Then it would be a pity to wait."""
        prefills = self._registry.usable(pb.ROLE_PREFILL)
        if any(self._works(prefill, decode) for prefill in prefills):
            return False
        return any(can_pair(prefill, decode) for prefill in self._registry.alive(pb.ROLE_PREFILL))

    def _why_apart(self, prefill: Node, decode: Node) -> str:
        if can_pair(prefill, decode):
            return f"{prefill.info.node_id} does not reach {decode.info.node_id}"
        return why_not(prefill, decode)

    def _why_missing(self, prefills: Sequence[Node], decodes: Sequence[Node]) -> str:
        roles = (("prefill", pb.ROLE_PREFILL, prefills), ("decode", pb.ROLE_DECODE, decodes))
        missing = [(name, role) for name, role, nodes in roles if not nodes]
        what = " and ".join(f"no usable {name} node" for name, _ in missing)
        why = [text for _, role in missing for text in self._registry.unusable_reasons(role)]
        return f"{what} ({'; '.join(why[:4])})" if why else what

    # ---- choosing ---------------------------------------------------------------------------

    async def decode(self, run: Run) -> tuple[Node, bool]:
        """A decode node, and whether it is to compute the prompt, too. Waits for one as long as
        the request's deadline allows.

        Raises:
            Unavailable: none came.
        """
        return await self._wait_for(lambda: self._find_decode(run), run.deadline)

    async def prefill(self, run: Run, decode: Node) -> Node | None:
        """A prefill node for blocks that `decode` holds already; waits as `decode` does. None:
        it is better to begin anew, for only other decode nodes have a prefill node left, or the
        KV should not travel.

        Raises:
            Unavailable: none came.
        """

        def find() -> tuple[Node | None] | None:
            if run.recovery.local_prefill:
                return (None,)
            prefills = self._registry.usable(pb.ROLE_PREFILL)
            if fitting := [node for node in prefills if self._works(node, decode)]:
                if not (fitting := _apart(fitting, run, "prefill")):
                    return None
                return (self._prefill_policy(_without(fitting, run.recovery.avoid) or fitting),)
            return (None,) if self._find_decode(run) is not None else None

        (found,) = await self._wait_for(find, run.deadline)
        return found

    def _find_decode(self, run: Run) -> tuple[Node, bool] | None:
        """A request that has begun stays with its version, and does not wait for a prefill node:
        a decode node can compute it, too."""
        decodes = [
            node
            for node in _apart(self._registry.usable(pb.ROLE_DECODE), run, "decode")
            if run.version in (None, node.info.fingerprint)
        ]
        if run.recovery.local_prefill or run.num_tokens < self._config.local_prefill_threshold:
            return self._pick(decodes, run, local=True)
        prefills = self._registry.usable(pb.ROLE_PREFILL)
        for fresh in (_without(prefills, run.recovery.avoid), prefills):
            paired = [node for node in decodes if any(self._works(each, node) for each in fresh)]
            if unspent := _without(paired, run.recovery.avoid):
                return self._pick(unspent, run)
        if paired:
            return self._pick(paired, run)
        alone = [node for node in decodes if run.begun or self._left_alone(node)]
        return self._pick(alone, run, local=True)

    def _pick(
        self, decodes: Sequence[Node], run: Run, local: bool = False
    ) -> tuple[Node, bool] | None:
        if not decodes:
            return None
        return self._decode_policy(_without(decodes, run.recovery.avoid) or decodes), local

    async def _wait_for(self, find: Callable[[], T | None], deadline: Deadline) -> T:
        if (found := find()) is not None:
            return found
        with deadline.waiting() as until:
            while (found := find()) is None:
                # Wake up now and then: a breaker that may be tried again announces nothing.
                patience = min(0.5, until - monotonic())
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


def _apart(nodes: Sequence[Node], run: Run, role: str) -> list[Node]:
    """Those without another request of which one more death would be the end, if this is one: a
    request that kills nodes must not be the end of those that were beside it each time."""
    suspect = run.recovery.suspect(role)
    return [node for node in nodes if suspect is None or node.suspect in (None, suspect)]
