"""Placement: selects the nodes for a request, and waits until there are some.

The decode node is selected first, among those that pair with some prefill node. `prefill` selects
the prefill node when the decode node's ticket is there, for the first attempt and after failures. A
selected node counts as loaded from then on. A node of both roles competes with the decode nodes; it
computes the prompts of its own requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TypeVar

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Gone, PdserveError, Unavailable
from pdserve.common.core.request import PromptPath
from pdserve.common.obs.metrics import RouterMetrics
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import ClusterView
from pdserve.router.cluster.kinds import Candidates
from pdserve.router.cluster.node import ROLE_NAMES, Node
from pdserve.router.cluster.policies import load_policy
from pdserve.router.cluster.policy import Policy
from pdserve.router.cluster.role_policy import Match, PlacementRequest, RolePolicy
from pdserve.router.cluster.window import holds

T = TypeVar("T")


def load_policies(config: RoutingConfig) -> dict[int, Policy]:
    """Makes the policies of all roles. Raises ConfigError: one does not exist, or cannot be
    made."""
    prefill, decode = config.prefill_policy, config.decode_policy
    return {
        pb.ROLE_PREFILL: load_policy(prefill, "--prefill-policy"),
        pb.ROLE_DECODE: load_policy(decode, "--decode-policy"),
        pb.ROLE_BOTH: load_policy(decode, "--decode-policy"),
    }


class NodeSelector:
    """Selects among the usable nodes by a policy for each role."""

    def __init__(
        self,
        config: RoutingConfig,
        view: ClusterView,
        policies: Mapping[int, Policy],
        match: Match | None = None,
        metrics: RouterMetrics | None = None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`policies`: by role. `match` serves policies that use the caches. `now`: the clock of
        deadlines."""
        self._now = now
        self._config = config
        self._view = view
        self._policies = {
            role: RolePolicy(role, policy, match, metrics, now) for role, policy in policies.items()
        }

    async def decode(self, request: PlacementRequest) -> tuple[Node, PromptPath]:
        """Returns a decode node or one of both roles, and how it gets the prompt's KV. Waits as
        long as the request's deadline allows.

        Raises:
            Unavailable: no node came.
            Gone: none will, as no node has the version of the request's tokens any more.
        """
        find = partial(self._find_decode, request)
        node, path = await self._wait_for("a decode node", find, request)
        self._policies[node.info.role].placed(request, node)
        return node, path

    async def prefill(self, request: PlacementRequest, decode: Node) -> Node | None:
        """Returns a prefill node for blocks that `decode` has reserved; waits as `decode`. None:
        another attempt is better, because only other decode nodes have a prefill node left, or the
        KV should not travel.

        Raises:
            Unavailable: no node came.
        """
        find = partial(self._find_prefill, request, decode)
        (found,) = await self._wait_for("a prefill node", find, request)
        if found is not None:
            self._policies[pb.ROLE_PREFILL].placed(request, found)
        return found

    def missing(self, request: PlacementRequest, node: Node) -> int:
        """Returns how many of the request's tokens the node must compute, as far as is known."""
        return self._policies[node.info.role].missing(request, node)

    def least_missing(self, request: PlacementRequest) -> int:
        """Returns how many of the request's tokens some node must compute, as far as is known."""
        policies = (self._policies[role] for role in (pb.ROLE_PREFILL, pb.ROLE_BOTH))
        return max(1, request.num_tokens - max(each.most_cached(request) for each in policies))

    def _find_prefill(self, request: PlacementRequest, decode: Node) -> tuple[Node | None] | None:
        """Returns what `prefill` returns, alone in a tuple; None: wait."""
        if request.local_prefill:
            return (None,)
        prefills = self._computing(request)
        if fitting := self._view.sources(decode, prefills):
            alone = _isolated(fitting, request, "prefill")
            policy = self._policies[pb.ROLE_PREFILL]
            new = policy.choose(request, _without(alone, request.avoid))
            node = new or policy.choose(request, alone)
            return None if node is None else (node,)
        return (None,) if self._find_decode(request) is not None else None

    def _find_decode(self, request: PlacementRequest) -> tuple[Node, PromptPath] | None:
        """Returns a decode node and the path of the prompt's KV; None: no node fits now. A request
        with tokens keeps its version, and does not wait for a prefill node: a decode node can
        compute its prompt too."""
        view, avoid = self._view, request.avoid
        decodes, boths = self._able(pb.ROLE_DECODE, request), self._able(pb.ROLE_BOTH, request)
        short = request.num_tokens < self._config.local_prefill_threshold
        if short or request.local_prefill:
            path = PromptPath.LOCAL if short else PromptPath.STAND_IN
            return self._pick(request, decodes, boths, path)
        prefills = self._computing(request)
        for some in (_without(prefills, avoid), prefills):
            paired = view.supplied(decodes, some)
            if _without(paired, avoid) or _without(boths, avoid):
                return self._pick(request, paired, boths)
        if (found := self._pick(request, paired, boths)) is not None:
            return found
        able = self._holding(view.candidates(pb.ROLE_PREFILL), request.num_tokens + 1)
        alone = decodes if request.version else view.standing_in(decodes, able)
        return self._pick(request, alone, boths, PromptPath.STAND_IN)

    def _computing(self, request: PlacementRequest) -> Candidates:
        """Returns the prefill nodes that can compute the prompt and one token."""
        nodes = _adapted(self._view.candidates(pb.ROLE_PREFILL), request)
        return self._holding(nodes, request.num_tokens + 1)

    def _holding(self, nodes: Candidates, num_tokens: int) -> Candidates:
        """Returns the nodes that hold so many tokens: usually all."""
        if num_tokens <= self._view.registry.least_window:
            return nodes
        return nodes.where(lambda node: holds(node, num_tokens))

    def _able(self, role: int, request: PlacementRequest) -> Candidates:
        usable = _adapted(self._view.candidates(role), request)
        usable = self._holding(usable, request.longest)
        nodes = _isolated(usable, request, ROLE_NAMES[role])
        if (version := request.version) is None:
            return nodes
        return nodes.of_kinds(kind for kind in nodes.kinds if kind.fingerprint == version)

    def _pick(
        self,
        request: PlacementRequest,
        decodes: Candidates,
        boths: Candidates,
        path: PromptPath = PromptPath.TRANSFERRED,
    ) -> tuple[Node, PromptPath] | None:
        """Takes the policy's choice of each role, and of these two the node with fewer requests,
        then with more free blocks. Tokens to prefill do not compare: a decode node's
        are on its prefill nodes."""
        avoid = request.avoid
        new = self._choose(request, _without(decodes, avoid), _without(boths, avoid))
        chosen = new or self._choose(request, decodes, boths)
        if not chosen:
            return None
        node = min(
            chosen,
            key=lambda node: (node.num_requests / node.replicas, -node.load.most_free_blocks),
        )
        if node.info.role == pb.ROLE_BOTH or self._has_most(request, node):
            return node, PromptPath.LOCAL
        return node, path

    def _has_most(self, request: PlacementRequest, decode: Node) -> bool:
        """Returns whether the decode node should compute the uncached tokens itself, as in the next
        turn of a chat: it has computed the answer that comes back with the prompt."""
        return self.missing(request, decode) < self._config.local_prefill_threshold

    def _choose(
        self, request: PlacementRequest, decodes: Candidates, boths: Candidates
    ) -> list[Node]:
        chosen = (
            self._policies[pb.ROLE_DECODE].choose(request, decodes),
            self._policies[pb.ROLE_BOTH].choose(request, boths),
        )
        return [node for node in chosen if node is not None]

    async def _wait_for(
        self, what: str, find: Callable[[], T | None], request: PlacementRequest
    ) -> T:
        if (found := find()) is not None:
            return found
        with request.waiting(what) as until:
            while (found := find()) is None:
                # Look again from time to time: a breaker that may be tried again does not notify.
                patience = min(0.5, until - self._now())
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
        elif ready and not any(holds(node, request.longest) for node in self._view.answering()):
            reason = f"no registered node holds {request.longest} tokens any more"
        elif ready:
            reason = "the remaining nodes are reserved for a request that has failed on others"
        return Unavailable(reason, code="NO_NODE", retry_after=2.0)


def _without(nodes: Candidates, avoid: Collection[str]) -> Candidates:
    return nodes.where(lambda node: node.id not in avoid) if avoid else nodes


def _adapted(nodes: Candidates, request: PlacementRequest) -> Candidates:
    """Returns the nodes that have the request's adapter, if it has one."""
    adapter = request.adapter
    return nodes.where(lambda node: adapter in node.adapters) if adapter else nodes


def _isolated(nodes: Candidates, request: PlacementRequest, role: str) -> Candidates:
    """For a request that one more death of a node would end: returns the nodes without another such
    request. Otherwise a request that kills nodes could end the request that ran beside it each
    time. After some time without such a node, any will do: that death would end neither."""
    if not request.last_chance(role):
        return nodes
    own = request.request_id
    free = nodes.where(lambda node: all(each.request_id == own for each in node.suspects))
    return nodes if nodes and not free and request.may_share() else free
