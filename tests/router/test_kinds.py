"""Placement by kinds and orders chooses as the plain rules do, which look at every pair."""

import random
from collections.abc import Iterable
from contextlib import suppress
from itertools import product

import pytest

from clock import Clock
from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Blame, NodeError, Overloaded, Unavailable
from pdserve.common.core.request import PromptPath
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.router.cluster.cluster_view import STAND_IN_AFTER, ClusterView
from pdserve.router.cluster.in_flight import InFlightLoad
from pdserve.router.cluster.kinds import Candidates, rank
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.placement import NodeSelector, load_policies
from pdserve.router.cluster.prefix_index import PromptBlocks
from pdserve.router.cluster.registry import Registry
from pdserve.router.cluster.role_policy import PlacementRequest

P, D, B = pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_BOTH
IDS = [f"{role}{number}" for role in "pdb" for number in range(5)]
CODES = ("PEER_LOST", "UNREACHABLE", "OUT_OF_MEMORY", "SEQUENCE_FAILED")


class PlainRules:
    """The decisions of placement, pair by pair."""

    def __init__(self, registry: Registry, policy: str) -> None:
        self.registry, self.now = registry, registry.now
        self._last = {P: "", D: "", B: ""} if policy == "round-robin" else None

    def usable(self, role: int) -> list[Node]:
        able = (n for n in self.registry.nodes() if self.registry.is_alive(n) and n.load.healthy)
        return [node for node in able if node.info.role == role and node.breaker.allows()]

    @staticmethod
    def fit(prefill: Node, decode: Node) -> bool:
        shared = set(prefill.info.kv_connectors) & set(decode.info.kv_connectors)
        return bool(shared) and prefill.info.fingerprint == decode.info.fingerprint

    @staticmethod
    def hold(node: Node, num_tokens: int) -> bool:
        return not node.info.max_model_len or node.info.max_model_len >= num_tokens

    def pairs(self, prefill: Node, decode: Node) -> bool:
        return self.fit(prefill, decode) and self.registry.links.allows(prefill.id, decode.id)

    def must_prefill(self, decode: Node, num_tokens: int = 0) -> bool:
        able = [node for node in self.usable(P) if self.hold(node, num_tokens)]
        if any(self.pairs(prefill, decode) for prefill in able):
            return False
        prefills = [node for node in self.registry.nodes() if node.info.role == P]
        fitting = [node for node in prefills if self.fit(node, decode)]
        if any(self.registry.is_alive(node) for node in fitting):
            return True
        heard = [node.last_heard for node in fitting]
        heard += filter(None, [self.registry.gone_prefills.get(decode.info.fingerprint)])
        return bool(heard) and self.now() - max(heard) >= STAND_IN_AFTER

    def ready(self) -> bool:
        decodes = self.usable(D)
        if self.usable(B) or any(self.pairs(*pair) for pair in product(self.usable(P), decodes)):
            return True
        return any(map(self.must_prefill, decodes))

    def choose(self, role: int, nodes: Iterable[Node]) -> list[Node]:
        """The policy's choice, if there is one."""
        if self._last is None:
            return sorted(nodes, key=rank)[:1]
        return sorted(nodes, key=lambda node: (node.id <= self._last[role], node.id))[:1]

    def placed(self, node: Node) -> None:
        if self._last is not None:
            self._last[node.info.role] = node.id

    def able(self, role: int, request: PlacementRequest) -> list[Node]:
        nodes = [n for n in self.usable(role) if not request.adapter or "a" in n.adapters]
        least = request.num_tokens + 1 if role == P else request.longest
        nodes = [n for n in nodes if self.hold(n, least)]
        if request.last_chance(""):
            free = [
                n for n in nodes if {each.request_id for each in n.suspects} <= {request.request_id}
            ]
            nodes = free or (nodes if request.may_share() else [])
        return [n for n in nodes if role == P or request.version in (None, n.info.fingerprint)]

    def decode(self, request: PlacementRequest) -> tuple[Node, PromptPath] | None:
        decodes, boths = self.able(D, request), self.able(B, request)
        if request.local_prefill:
            return self.pick(decodes, boths, request, PromptPath.STAND_IN)
        least = request.num_tokens + 1
        prefills = [n for n in self.usable(P) if not request.adapter or "a" in n.adapters]
        prefills = [n for n in prefills if self.hold(n, least)]
        for some in ([n for n in prefills if n.id not in request.avoid], prefills):
            paired = [d for d in decodes if any(self.pairs(p, d) for p in some)]
            if {node.id for node in paired + boths} - set(request.avoid):
                return self.pick(paired, boths, request, PromptPath.TRANSFERRED)
        if paired or boths:
            return self.pick(paired, boths, request, PromptPath.TRANSFERRED)
        alone = [d for d in decodes if request.version or self.must_prefill(d, least)]
        return self.pick(alone, [], request, PromptPath.STAND_IN)

    def pick(self, decodes, boths, request, path) -> tuple[Node, PromptPath] | None:
        new = [[n for n in nodes if n.id not in request.avoid] for nodes in (decodes, boths)]
        some = new if any(new) else (decodes, boths)
        chosen = self.choose(D, some[0]) + self.choose(B, some[1])
        if not chosen:
            return None
        node = min(chosen, key=lambda n: (n.num_requests / n.replicas, -n.load.most_free_blocks))
        return node, PromptPath.LOCAL if node.info.role == B else path

    def prefill(self, request: PlacementRequest, decode: Node) -> tuple[Node | None] | None:
        usable = [node for node in self.usable(P) if self.pairs(node, decode)]
        usable = [node for node in usable if self.hold(node, request.num_tokens + 1)]
        if request.local_prefill:
            return (None,)
        if not any(not request.adapter or "a" in node.adapters for node in usable):
            return (None,) if self.decode(request) is not None else None
        nodes = [node for node in self.able(P, request) if node in usable]
        new = [node for node in nodes if node.id not in request.avoid]
        return tuple(self.choose(P, new or nodes)) or None


class History:
    """The events that may happen to a cluster, in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = Clock(100.0)
        config = RoutingConfig(heartbeat_timeout=5, breaker_failures=2, breaker_cooldown=3)
        self.registry = Registry(config, self.clock)
        self.running: list[InFlightLoad] = []

    def step(self) -> None:
        happens = self.random.choices(
            [self.registers, self.beats, self.leaves, self.begins, self.ends, self.progresses,
             self.passes, self.fails_to_answer, self.answers, self.breaks_link, self.link_recovers],
            [6, 12, 1, 8, 6, 2, 3, 1, 2, 2, 1],
        )[0]  # fmt: skip
        happens()

    def load(self) -> pb.NodeLoad:
        number = self.random.randrange
        return pb.NodeLoad(
            healthy=number(8) > 0, reason="it is ill", others=number(3), others_tokens=number(3),
            waiting_tokens=number(3), most_free_blocks=number(3),
        )  # fmt: skip

    def registers(self) -> None:
        node_id = self.random.choice(IDS)
        info = pb.NodeInfo(
            node_id=node_id, role={"p": P, "d": D, "b": B}[node_id[0]], address=f"{node_id}:1",
            fingerprint=self.random.choice("fffg"), data_parallel_size=self.random.randint(1, 2),
            kv_connectors=self.random.choice([*4 * [["tcp"]], ["tcp", "shm"], ["shm"]]),
            instance=self.random.choice("112"), adapters=self.random.choice([[], ["a"]]),
            max_model_len=self.random.choice([0, 100, 100, 20, 5]),
        )  # fmt: skip
        with suppress(Overloaded, Unavailable):
            self.registry.register(info, self.load())

    def node(self) -> Node | None:
        nodes = self.registry.connected()
        return self.random.choice(nodes) if nodes else None

    def beats(self) -> None:
        for node in self.registry.nodes():
            if self.random.random() < 0.6:
                self.registry.heartbeat(node.id, self.load(), node.info.instance)

    def leaves(self) -> None:
        if (node := self.node()) is not None:
            self.registry.deregister(node.id, node.info.instance)

    def begins(self) -> None:
        if (node := self.node()) is not None:
            last_chance = self.random.choice(["", "", "", "r"])
            use = InFlightLoad(self.registry, node, self.random.randrange(3), last_chance)
            self.running.append(use.__enter__())

    def ends(self) -> None:
        if self.running:
            use = self.running.pop(self.random.randrange(len(self.running)))
            error = None
            if self.random.random() < 0.5:
                blame = Blame(use._node.role)
                error = NodeError("it failed", code=self.random.choice(CODES), blame=blame)
            use.__exit__(type(error), error, None)

    def progresses(self) -> None:
        if self.running:
            self.random.choice(self.running).progressed()

    def passes(self) -> None:
        self.clock.time += self.random.choice([0.5, 2.0, 6.0])
        if self.random.random() < 0.7:
            self.registry.sweep()

    def fails_to_answer(self) -> None:
        if (node := self.node()) is not None:
            self.registry.unanswered(node, "no route", self.random.random() < 0.5)

    def answers(self) -> None:
        if (node := self.node()) is not None:
            self.registry.answered(node)

    def link(self) -> tuple[str, str]:
        return f"p{self.random.randrange(5)}", f"d{self.random.randrange(5)}"

    def breaks_link(self) -> None:
        for _ in range(self.random.randrange(5)):
            self.registry.links.failed(*self.link(), "no route")

    def link_recovers(self) -> None:
        self.registry.links.succeeded(*self.link())

    def request(self) -> PlacementRequest:
        last, share = self.random.random() < 0.2, self.random.random() < 0.5
        return PlacementRequest(
            request_id=self.random.choice(["r", "s"]), num_tokens=9,
            longest=self.random.choice([10, 10, 30]),
            adapter=self.random.choice(["", "", "a"]), last_chance=lambda _: last,
            may_share=lambda: share,
            version=self.random.choice([None, None, "f", "g"]),
            avoid=self.random.sample(IDS, self.random.choice([0, 0, 1, 6])),
            local_prefill=self.random.random() < 0.1, waiting=lambda what: None,
            blocks=lambda size: PromptBlocks((), size),
        )  # fmt: skip


def in_order(registry: Registry, role: int) -> bool:
    """Whether every node that is up is listed once, where its load belongs."""
    up = [node for node in registry.nodes() if node.info.role == role and node.is_up]
    listed = Candidates(registry.kinds.of_role(role), lambda _: True)
    by_load, by_id = sorted(up, key=rank), sorted(up, key=lambda node: node.id)
    return list(listed.by_load()) == by_load and list(listed.by_id("")) == by_id


@pytest.mark.parametrize("policy", ["least-load", "round-robin"])
def test_any_history_ends_in_the_choices_of_the_plain_rules(policy: str) -> None:
    outcomes = set()
    for seed in range(25):
        history = History(seed)
        view, plain = ClusterView(history.registry), PlainRules(history.registry, policy)
        config = RoutingConfig(decode_policy=policy, prefill_policy=policy)
        selector = NodeSelector(config, view, load_policies(config))

        def placed(request: PlacementRequest, node: Node | None, plain=plain, selector=selector):
            if node is not None:
                plain.placed(node)
                selector._policies[node.info.role].placed(request, node)

        for number in range(60):
            history.step()
            request, where = history.request(), f"seed {seed}, step {number}"
            for role in (P, D, B):
                assert in_order(history.registry, role), where
            assert view.ready()[0] == plain.ready(), where
            meant = plain.decode(request)
            assert selector._find_decode(request) == meant, where
            outcomes.add(None if meant is None else meant[1])
            placed(request, None if meant is None else meant[0])
            for decode in history.registry.connected():
                if decode.info.role == D:
                    meant = plain.prefill(request, decode)
                    assert selector._find_prefill(request, decode) == meant, where
                    placed(request, None if meant is None else meant[0])
    assert outcomes == {None, *PromptPath}, "every rule was met"


def test_nodes_that_are_gone_leave_nothing_behind() -> None:
    history = History(7)
    for _ in range(300):
        history.step()
    while history.running:
        history.ends()
    for node in history.registry.nodes():
        history.registry.deregister(node.id, node.info.instance)
    kinds = history.registry.kinds
    assert not kinds._kinds and not kinds._by_fingerprint and not kinds._of
