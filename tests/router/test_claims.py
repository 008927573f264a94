"""One Idempotency-Key at several routers: who makes the answer, and what the others hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from time import monotonic
from typing import Any

import grpc
import pytest

from pdserve.common.config.router import RoutingConfig
from pdserve.common.core.errors import Conflict, InvalidRequest, KeyReused, Overloaded
from pdserve.common.core.request import PromptPath
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.status import serving
from pdserve.decode_node import claims as module
from pdserve.decode_node.claims import Claims as NodeClaims
from pdserve.decode_node.claims import serve_claim
from pdserve.router.cluster import claims as router_module
from pdserve.router.cluster.claims import AnswerKey, Claim, Claims, rank
from pdserve.router.cluster.registry import Registry
from waiting import eventually

PATIENCE = 60.0  # seconds


class Node:
    """The claims of a decode node, behind gRPC."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.claims = NodeClaims(lease=PATIENCE)
        self.server = grpc.aio.server()
        methods = {
            "Claim": grpc.unary_stream_rpc_method_handler(
                self._claim, pb.ClaimRequest.FromString, _bytes
            ),
            "TellKept": grpc.unary_unary_rpc_method_handler(
                self._tell_kept, pb.TellKeptRequest.FromString, _bytes
            ),
        }
        handler = grpc.method_handlers_generic_handler("pdserve.v1.Decode", methods)
        self.server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def _claim(self, request: pb.ClaimRequest, context: Any) -> Any:
        async with serving(context), aclosing(serve_claim(self.claims, request)) as answers:
            async for answer in answers:
                yield answer

    async def _tell_kept(self, request: pb.TellKeptRequest, context: Any) -> pb.TellKeptResponse:
        self.claims.tell_kept(request)
        return pb.TellKeptResponse()


def _bytes(message: Any) -> bytes:
    return message.SerializeToString()  # type: ignore[no-any-return]


class Router:
    """A router's view of these nodes."""

    def __init__(self, *nodes: Node) -> None:
        self.registry = Registry(RoutingConfig())
        self.channels = Channels()
        self.claims = Claims(self.registry, self.channels)
        for node in nodes:
            self.register(node)

    def register(self, node: Node) -> None:
        info = pb.NodeInfo(node_id=node.name, role=pb.ROLE_DECODE, address=node.address)
        self.registry.register(info, pb.NodeLoad(healthy=True))


Start = Callable[..., Any]


@pytest.fixture
async def nodes() -> AsyncIterator[list[Node]]:
    made = [Node(f"decode-{number}") for number in range(3)]
    for node in made:
        await node.server.start()
    yield made
    await asyncio.gather(*(node.server.stop(0) for node in made))


@pytest.fixture
async def routers(nodes: list[Node]) -> AsyncIterator[list[Router]]:
    made = [Router(*nodes), Router(*nodes)]
    yield made
    for router in made:
        await router.channels.close()


def key(number: int = 0, body: int = 0) -> AnswerKey:
    return AnswerKey(b"%032d" % number, b"%032d" % (100 * number + body))


async def elsewhere(claim: Claim | None, patience: float = PATIENCE) -> Any:
    assert claim is not None
    return await claim.elsewhere(monotonic() + patience)


async def test_of_many_at_once_one_makes_the_answer(
    nodes: list[Node], routers: list[Router]
) -> None:
    """The others wait until they hear where it is kept, and nothing is left behind."""
    for number in range(20):
        made: list[str] = []

        async def ask(router: Router, number: int, made: list[str]) -> str:
            async with router.claims.of(key(number), "c") as claim:
                found = await elsewhere(claim)
                if found is not None:
                    node, path = found
                    return f"{node.id} {path}"
                assert claim is not None
                made.append("once")
                await asyncio.sleep(0)
                node = router.claims.node(nodes[number % 3].name)
                claim.kept_at(node, PromptPath.TRANSFERRED)
                return f"{node.id} {PromptPath.TRANSFERRED}"

        answers = await asyncio.gather(*(ask(each, number, made) for each in routers * 2))
        assert made == ["once"] and len(set(answers)) == 1
    assert sum(len(node.claims) for node in nodes) == 20 * router_module.COPIES


async def test_the_claim_of_a_router_that_dies_falls_to_the_next(routers: list[Router]) -> None:
    """With where its job is kept; a claim given up by one that said nothing leaves nothing."""
    first, second = routers
    async with AsyncExitStack() as stack:
        claim = await stack.enter_async_context(first.claims.of(key(), "c"))
        assert await elsewhere(claim) is None
        async with second.claims.of(key(), "c") as other:
            waiting = asyncio.create_task(elsewhere(other))
            await asyncio.sleep(0)
            await first.channels.close()
            assert await waiting is None
            node = next(iter(second.registry.nodes()))
            other.kept_at(node, PromptPath.LOCAL)
        async with second.claims.of(key(), "c") as again:
            said = [await elsewhere(again)]
            while (found := await elsewhere(again)) is not None:  # until it has the claim
                said.append(found)
            assert set(said) == {(node, PromptPath.LOCAL)} and len(said) <= 2 * router_module.COPIES


async def test_a_claim_outlives_one_of_its_nodes(nodes: list[Node], routers: list[Router]) -> None:
    """Whether it dies, or is known to one router alone."""
    first, second = routers
    ranked = in_order(first, nodes)
    async with first.claims.of(key(), "c") as claim:
        assert await elsewhere(claim) is None
        await ranked[0].server.stop(0)
        third = Router(*ranked[1:])
        for router in (second, third):
            async with router.claims.of(key(), "c") as other:
                with pytest.raises(Conflict, match="being served"):
                    await elsewhere(other, 0.2)
        await third.channels.close()


def in_order(router: Router, nodes: list[Node]) -> list[Node]:
    """The nodes in the order in which `key()` is claimed."""
    ranks = {node.id: rank(key().claim, node) for node in router.registry.nodes()}
    return sorted(nodes, key=lambda node: ranks[node.name], reverse=True)


async def test_two_requests_never_wait_for_each_other(
    nodes: list[Node], routers: list[Router]
) -> None:
    """Though the first node comes to one of them when it stands at the second already."""
    one, two, three = in_order(routers[0], nodes)
    late = Router(two)
    async with late.claims.of(key(), "c") as claim, routers[0].claims.of(key(), "c") as other:
        assert await elsewhere(claim) is None
        waiting = asyncio.create_task(elsewhere(other))
        await eventually(lambda: other is not None and len(other._calls) == 2)
        late.register(one)
        late.register(three)
        assert await elsewhere(claim) is None
        assert claim is not None
        claim.kept_at(late.claims.node(two.name), PromptPath.TRANSFERRED)
        assert (await waiting)[0].id == two.name
    await late.channels.close()


async def test_a_node_that_does_not_answer_is_passed_over(
    nodes: list[Node], routers: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has no claims, too: then each makes the answer."""
    monkeypatch.setattr(router_module, "ANSWER_TIMEOUT", 0.1)
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    nodes[0].address = f"127.0.0.1:{port}"
    lonely = Router(nodes[0])
    async with lonely.claims.of(key(), "c") as claim:
        assert await elsewhere(claim) is None
    async with AsyncExitStack() as stack:
        both = [Router(*nodes), Router(*nodes)]
        claims = [await stack.enter_async_context(r.claims.of(key(), "c")) for r in both]
        assert await elsewhere(claims[0]) is None
        with pytest.raises(Conflict):
            await elsewhere(claims[1], 0.2)
    for router in (lonely, *both):
        await router.channels.close()
    silent.close()


async def test_where_the_job_is_may_be_told_before_its_node_is_known(
    nodes: list[Node], routers: list[Router]
) -> None:
    first, new = routers[0], Router(*nodes[:2])
    async with first.claims.of(key(), "c") as claim, new.claims.of(key(), "c") as other:
        assert await elsewhere(claim) is None
        assert claim is not None
        claim.kept_at(first.claims.node(nodes[2].name), PromptPath.TRANSFERRED)
        waiting = asyncio.create_task(elsewhere(other))
        await eventually(lambda: other is not None and any(each.news for each in other._calls))
        assert not waiting.done()
        new.register(nodes[2])
        node, _ = await waiting
        assert node.id == nodes[2].name
    await new.channels.close()


async def test_another_request_under_the_same_key_is_refused(routers: list[Router]) -> None:
    async with AsyncExitStack() as stack:
        claim = await stack.enter_async_context(routers[0].claims.of(key(), "c"))
        assert await elsewhere(claim) is None
        for router in routers:
            async with router.claims.of(key(body=1), "c") as other:
                with pytest.raises(KeyReused, match="another request"):
                    await elsewhere(other)
    async with routers[1].claims.of(key(body=1), "c") as other:
        assert await elsewhere(other) is None, "nothing was made of the first one"
    known = [node for router in routers for node in router.registry.nodes()]
    await eventually(lambda: not any(node.on_lost for node in known))


# ---- a node's bounds ----


def first_message(number: int = 0, client: str = "c") -> pb.ClaimRequest:
    return pb.ClaimRequest(key=key(number).claim, request=key(number).job, client=client)


def kept_message(number: int, node_id: str = "d") -> pb.TellKeptRequest:
    where = pb.KeptAt(node_id=node_id)
    return pb.TellKeptRequest(key=key(number).claim, request=key(number).job, kept_at=where)


async def test_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims without a holder give way, a client's own first."""
    monkeypatch.setattr(module, "MAX_CLAIMS", 3)
    monkeypatch.setattr(module, "MAX_OF_CLIENT", 2)
    monkeypatch.setattr(module, "MAX_IN_LINE", 2)
    claims = NodeClaims(lease=PATIENCE)

    def leave_behind(number: int, client: str) -> None:
        with claims.enter(first_message(number, client)):
            claims.tell_kept(kept_message(number))

    for number in range(4):
        leave_behind(number, "a")
    assert claims._claims.keys() == {key(2).claim, key(3).claim}
    with claims.enter(first_message(4, "b")), claims.enter(first_message(4, "b")) as second:
        assert not second.granted
        with pytest.raises(Conflict, match="wait for"), claims.enter(first_message(4, "b")):
            pass
        with claims.enter(first_message(5, "b")):
            assert claims._claims.keys() == {key(3).claim, key(4).claim, key(5).claim}
            with pytest.raises(Overloaded), claims.enter(first_message(6, "b")):
                pass
    assert claims._claims.keys() == {key(3).claim}


@pytest.mark.parametrize(
    "message",
    [
        pb.ClaimRequest(),
        pb.ClaimRequest(key=b"x", request=b"x" * 32),
        pb.ClaimRequest(key=b"x" * 33, request=b"x" * 33),
        pb.ClaimRequest(key=b"x" * 32, request=b"x" * 32, client="c" * 1000),
    ],
)
async def test_a_claim_that_makes_no_sense(message: pb.ClaimRequest) -> None:
    claims = NodeClaims(lease=PATIENCE)
    with pytest.raises(InvalidRequest), claims.enter(message):
        pass
    for name in ("", "d" * 1000):
        with claims.enter(first_message()), pytest.raises(InvalidRequest):
            claims.tell_kept(kept_message(0, name))
    claims.tell_kept(kept_message(0))  # of no claim
    with claims.enter(first_message()):
        claims.tell_kept(pb.TellKeptRequest(key=key().claim, kept_at=pb.KeptAt(node_id="d")))
    assert not len(claims), "what was said was of another request"
