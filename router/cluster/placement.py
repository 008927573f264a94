"""Placement: selects the nodes that a request runs on, and waits until there are some.

The decode node is selected first, among those that pair with some prefill node. `prefill` selects
the prefill node when the decode node's ticket is there, whether it is the first one or takes over.
Either counts as loaded from then on. A node of both roles competes with the decode nodes; it
computes the prompts of the requests that are placed on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TypeVar

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Gone, PdserveError, Unavailable
from pdserve.common.core.request import PromptPath
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.registry import ROLE_NAMES, Node

T = TypeVar("T")
Policy = Callable[[Sequence[Node]], Node]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The properties of a request that placement needs."""

    request_id: str
    num_tokens: int  # tokens to prefill
    adapter: str  # digest of its LoRA adapter; empty: it has none
    version: str | None  # fingerprint of the nodes that made its tokens so far; None: it has none
    avoid: Collection[str]  # ids of nodes that have failed it
    local_prefill: bool  # its KV should not travel any more
    last_chance: Callable[[str], bool]  # as `Retries.last_chance`
    waiting: Callable[[], AbstractContextManager[float]]  # as `Deadline.waiting`


class RoundRobin:
    """Takes the nodes in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._turn = count()

    def __call__(self, nodes: Sequence[Node]) -> Node:
        ordered = sorted(nodes, key=lambda node: node.id)
        return ordered[next(self._turn) % len(ordered)]


def least_load(nodes: Sequence[Node]) -> Node:
    """The node with the fewest tokens to prefill, then the fewest requests, per replica; among
    equals the one that reports the fewest waiting tokens per replica, then the most free blocks on
    one. What other routers have placed there is known by the node's reports."""
    return min(
        nodes,
        key=lambda node: (
            node.num_prefill_tokens / node.replicas,
            node.num_requests / node.replicas,
            node.load.waiting_tokens / node.replicas,
            -node.load.most_free_blocks,
            node.id,
        ),
    )


def make_policy(name: str) -> Policy:
    return RoundRobin() if name == "round-robin" else least_load


class NodeSelector:
    """Selects among the usable nodes by a policy for each role."""

    def __init__(self, config: RoutingConfig, view: ClusterView) -> None:
        self._config = config
        self._view = view
        self._prefill_policy = make_policy(config.prefill_policy)
        self._decode_policy = make_policy(config.decode_policy)
        self._both_policy = make_policy(config.decode_policy)

    async def decode(self, request: PlacementRequest) -> tuple[Node, PromptPath]:
        """A decode node or one of both roles, and how it gets the prompt's KV. Waits for one as
        long as the request's deadline allows.

        Raises:
            Unavailable: no node came.
            Gone: none will, as no node has the version of the request's tokens any more.
        """
        return await self._wait_for(lambda: self._find_decode(request), request)

    async def prefill(self, request: PlacementRequest, decode: Node) -> Node | None:
        """A prefill node for blocks that `decode` has reserved; waits as `decode` does. None:
        another attempt is better, because only other decode nodes have a prefill node left, or the
        KV should not travel.

        Raises:
            Unavailable: no node came.
        """

        def find() -> tuple[Node | None] | None:
            if request.local_prefill:
                return (None,)
            prefills = _adapted(self._view.usable(pb.ROLE_PREFILL), request)
            if fitting := [node for node in prefills if self._view.can_hand_over(node, decode)]:
                if not (fitting := _isolated(fitting, request, "prefill")):
                    return None
                return (self._prefill_policy(_without(fitting, request.avoid) or fitting),)
            return (None,) if self._find_decode(request) is not None else None

        (found,) = await self._wait_for(find, request)
        return found

    def _find_decode(self, request: PlacementRequest) -> tuple[Node, PromptPath] | None:
        """A request that has tokens stays with its version, and does not wait for a prefill node: a
        decode node can compute it, too."""
        view, avoid = self._view, request.avoid
        decodes, boths = self._able(pb.ROLE_DECODE, request), self._able(pb.ROLE_BOTH, request)
        short = request.num_tokens < self._config.local_prefill_threshold
        if short or request.local_prefill:
            path = PromptPath.LOCAL if short else PromptPath.STAND_IN
            return self._pick(decodes, boths, avoid, path)
        prefills = _adapted(view.usable(pb.ROLE_PREFILL), request)
        for some in (_without(prefills, avoid), prefills):
            paired = [d for d in decodes if any(view.can_hand_over(p, d) for p in some)]
            if _without([*paired, *boths], avoid):
                return self._pick(paired, boths, avoid)
        if paired or boths:
            return self._pick(paired, boths, avoid)
        alone = [node for node in decodes if request.version or view.must_prefill(node)]
        return self._pick(alone, [], avoid, PromptPath.STAND_IN)

    def _able(self, role: int, request: PlacementRequest) -> list[Node]:
        usable = _adapted(self._view.usable(role), request)
        nodes = _isolated(usable, request, ROLE_NAMES[role])
        return [node for node in nodes if request.version in (None, node.info.fingerprint)]

    def _pick(
        self,
        decodes: Sequence[Node],
        boths: Sequence[Node],
        avoid: Collection[str],
        path: PromptPath = PromptPath.TRANSFERRED,
    ) -> tuple[Node, PromptPath] | None:
        """Takes the policy's choice of each kind, and of these two the node with fewer requests,
        then with more free blocks. Tokens to prefill do not compare: a decode node's
        are on its prefill nodes."""
        fresh = _without(decodes, avoid), _without(boths, avoid)
        kinds = fresh if any(fresh) else (decodes, boths)
        policies = self._decode_policy, self._both_policy
        chosen = [policy(kind) for policy, kind in zip(policies, kinds, strict=True) if kind]
        if not chosen:
            return None
        node = min(
            chosen,
            key=lambda node: (node.num_requests / node.replicas, -node.load.most_free_blocks),
        )
        return node, PromptPath.LOCAL if node.info.role == pb.ROLE_BOTH else path

    async def _wait_for(self, find: Callable[[], T | None], request: PlacementRequest) -> T:
        if (found := find()) is not None:
            return found
        with request.waiting() as until:
            while (found := find()) is None:
                # Look again from time to time: a breaker that may be tried again does not notify.
                patience = min(0.5, until - monotonic())
                if patience <= 0:
                    raise self._none(request)
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        await self._view.registry.wait_for_change()
        return found

    def _none(self, request: PlacementRequest) -> PdserveError:
        """Returns the error of a request for which no node came."""
        ready, reason = self._view.ready()
        versions = {node.info.fingerprint for node in self._view.registry.nodes()}
        if ready and request.version and request.version not in versions:
            return Gone(
                "the nodes of the model version that began this answer are gone, and another "
                "version would not go on with it: ask anew"
            )
        if ready and request.version:
            reason = "no usable node has the version that began this request"
        elif ready and request.adapter:
            reason = "no usable nodes have the adapter"
        elif ready:
            reason = "the remaining nodes are reserved for a request that has failed on others"
        return Unavailable(reason, code="NO_NODE", retry_after=2.0)


def _without(nodes: Sequence[Node], avoid: Collection[str]) -> list[Node]:
    return [node for node in nodes if node.id not in avoid]


def _adapted(nodes: Sequence[Node], request: PlacementRequest) -> list[Node]:
    """The nodes that have the request's adapter, if it has one."""
    return [node for node in nodes if not request.adapter or request.adapter in node.adapters]


def _isolated(nodes: Sequence[Node], request: PlacementRequest, role: str) -> list[Node]:
    """For a request that one more death of a node would end: the nodes without another such
    request. A request that kills nodes must not end those that ran beside it each time."""
    free = ("", request.request_id)
    last_chance = request.last_chance(role)
    return [node for node in nodes if not last_chance or node.last_chance in free]
