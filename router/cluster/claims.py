"""Claims to make the answer of an Idempotency-Key, held at decode nodes (`decode_node/claims.py`).

    two routers, one key ─▶ the same COPIES nodes, by rendezvous hash, in the same order
        granted by all ─▶ this router makes the answer, and says where it is kept
        in line at one ─▶ it waits there until it learns where the answer is kept, and joins it

A claim lasts as long as its calls, so the claim of a router that dies falls to the next in line. A
node that does not answer is passed over. So one node may come, go, or be unknown to one of the
routers, and they still meet at another node; if they do not, each computes the same answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import Any

import grpc

from pdserve.common.core.errors import Blame, Conflict, KeyReused, Overloaded, PdserveError
from pdserve.common.core.request import PromptPath
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import from_rpc_error
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.registry import Registry

COPIES = 2  # nodes at which a claim is held
# Seconds that a node has to answer; one that takes longer, or falls silent, is passed over.
ANSWER_TIMEOUT = 10.0
TELL_TIMEOUT = 5.0  # seconds that a node has to hear where a job is kept
PAUSE = 0.1  # seconds until a node that is not registered here is looked for again


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """An Idempotency-Key as nodes know it: secret names, each of 32 bytes."""

    claim: bytes  # of the client and its key
    job: bytes  # of these and the request


class Claims:
    def __init__(self, registry: Registry, channels: Channels) -> None:
        self._registry = registry
        self._channels = channels
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def of(self, key: AnswerKey | None, client: str) -> AsyncGenerator[Claim | None, None]:
        """Holds the claim of a request with a key; None: no key. `client`: as `Job.client`."""
        if key is None:
            yield None
            return
        claim = Claim(self, key, client)
        try:
            yield claim
        finally:
            claim.leave()

    def nodes(self) -> list[Node]:
        """Returns the live nodes that may hold claims."""
        return [node for node in self._registry.nodes() if self._may_hold(node)]

    def _may_hold(self, node: Node) -> bool:
        return node.info.role != pb.ROLE_PREFILL and self._registry.is_alive(node)

    def node(self, node_id: str) -> Node | None:
        return next((node for node in self._registry.nodes() if node.id == node_id), None)

    def call(self, node: Node, first: pb.ClaimRequest) -> ClaimCall:
        return ClaimCall(self._channels.get(node.info.address), node, first)

    async def wait_for_change(self) -> None:
        await self._registry.wait_for_change()

    def let_go(self, call: ClaimCall) -> None:
        """Ends a call after its last message."""
        task = asyncio.create_task(call.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def rank(key: bytes, node: Node) -> bytes:
    """Returns a node's place in the order in which a key is claimed: the highest is the first."""
    return blake2b(node.id.encode(), key=key, digest_size=8).digest()


class Claim:
    """One request's claim. Call `elsewhere` repeatedly; it returns what to do next."""

    def __init__(self, claims: Claims, key: AnswerKey, client: str) -> None:
        self._claims = claims
        self._key = key.claim
        self._first = pb.ClaimRequest(key=key.claim, request=key.job, client=client)
        self._calls: list[ClaimCall] = []
        self._passed_over: set[Node] = set()

    def leave(self) -> None:
        for call in self._calls:
            self._claims.let_go(call)

    def kept_at(self, node: Node, path: PromptPath) -> None:
        """Says where this request's job is kept."""
        where = pb.KeptAt(node_id=node.id, local_prefill=path is not PromptPath.TRANSFERRED)
        for call in self._calls:
            call.tell_kept(where)

    async def settled(self, until: float) -> None:
        """Waits until the maker of the answer is known. Raises as `elsewhere`."""
        while not (self._news() or await self._advanced(until)):
            pass

    async def elsewhere(self, until: float) -> tuple[Node, PromptPath] | None:
        """Returns the node that keeps the answer's job, and the path of its prompt's KV, each time
        that a node reports it; None: this request must make the answer.

        Raises:
            Conflict: by `until` (monotonic) the other request has not begun.
            KeyReused, Overloaded: the claim was refused.
        """
        await self.settled(until)
        if (found := self._news()) is None:
            return None
        node, kept_at = found
        for call in self._calls:
            if call.news is not None and call.news.node_id == node.id:
                call.news = None
        return node, PromptPath.LOCAL if kept_at.local_prefill else PromptPath.TRANSFERRED

    def _news(self) -> tuple[Node, pb.KeptAt] | None:
        """Returns where the job is, if the reported node is known here."""
        for call in self._calls:
            if call.news is not None and (node := self._claims.node(call.news.node_id)) is not None:
                return node, call.news
        return None

    async def _advanced(self, until: float) -> bool:
        """Takes the next step towards the claim; returns whether the claim is complete."""
        self._drop_ended()
        waiting = [call for call in self._calls if not call.granted]
        if waiting:
            await self._wait(waiting[0], until)
            return False
        if len(self._calls) == COPIES:
            return True
        node = self._next_node()
        if node is None:
            return bool(self._calls or self._passed_over) or await self._no_node(until)
        call = self._claims.call(node, self._first)
        self._calls.append(call)
        if not await call.answered():
            self._passed_over.add(node)
        return False

    def _drop_ended(self) -> None:
        for call in [call for call in self._calls if call.ended]:
            self._calls.remove(call)
            self._passed_over.add(call.node)
            self._claims.let_go(call)
            call.raise_refusal()

    def _next_node(self) -> Node | None:
        """Returns the next node in order. It never returns a node before one where the request
        already waits, although such nodes may have joined since: otherwise two requests could wait
        for each other."""
        key = partial(rank, self._key)
        nodes = [node for node in self._claims.nodes() if node not in self._passed_over]
        if self._calls:
            last = min(key(call.node) for call in self._calls)
            nodes = [node for node in nodes if key(node) < last]
        return max(nodes, key=key, default=None)

    async def _wait(self, call: ClaimCall, until: float) -> None:
        if (left := until - monotonic()) <= 0:
            raise Conflict(
                "the request of this Idempotency-Key is being served: ask again, or wait for its "
                "answer",
                retry_after=1.0,
            )
        unknown = any(each.news is not None for each in self._calls)  # it may register here
        await call.wait(min(left, PAUSE) if unknown else left)

    async def _no_node(self, until: float) -> bool:
        """Waits for a node; returns whether none will come."""
        try:
            async with asyncio.timeout(until - monotonic()):
                await self._claims.wait_for_change()
        except TimeoutError:
            return True
        return False


class ClaimCall:
    """The claim's call to one node."""

    def __init__(self, channel: grpc.aio.Channel, node: Node, first: pb.ClaimRequest) -> None:
        self.node = node
        self.granted = False
        self.news: pb.KeptAt | None = None  # where the job is kept; None again once that was tried
        self.ended = False
        self._has_answered = False
        self._refusal: PdserveError | None = None
        self._changed = asyncio.Event()
        self._request = first
        self._stub = pb_grpc.DecodeStub(channel)
        self._reading = asyncio.create_task(self._read())
        self._telling: list[asyncio.Task[None]] = []
        node.on_lost.add(self._lost)

    def tell_kept(self, where: pb.KeptAt) -> None:
        self._telling.append(asyncio.create_task(self._tell_kept(where)))

    async def _tell_kept(self, where: pb.KeptAt) -> None:
        """Reports where the job is kept. A missed message does no harm: waiting requests wait for
        the claim."""
        request = pb.TellKeptRequest(
            key=self._request.key, request=self._request.request, kept_at=where
        )
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            await self._stub.TellKept(request, timeout=TELL_TIMEOUT)

    async def answered(self) -> bool:
        """Returns whether the node answers in time; otherwise ends the call."""
        await self.wait(ANSWER_TIMEOUT)
        if not self._has_answered:
            self._end()
        return not self.ended

    async def wait(self, timeout: float) -> None:
        """Waits for a change."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        self._changed.clear()

    def raise_refusal(self) -> None:
        """Raises the node's refusal, if there was one."""
        if self._refusal is not None:
            raise self._refusal

    async def close(self) -> None:
        """Ends the claim after its last report."""
        self.node.on_lost.discard(self._lost)
        if self._telling:
            await asyncio.wait(self._telling)
        self._reading.cancel()

    async def _read(self) -> None:
        call: Any = None
        try:
            call = self._stub.Claim(self._request)
            async for answer in call:
                self._has_answered = True
                self.granted = answer.granted
                self.news = answer.kept_at if answer.HasField("kept_at") else None
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self._refused(from_rpc_error(error, Blame(self.node.role)))
        except grpc.aio.UsageError:  # the channel is closed
            pass
        finally:
            if call is not None:
                call.cancel()
            self.ended = True
            self._changed.set()

    def _refused(self, error: PdserveError) -> None:
        if error.code == KeyReused.default_code:
            self._refusal = KeyReused(error.message)
        elif isinstance(error, Conflict | Overloaded):
            self._refusal = error

    def _lost(self, error: PdserveError) -> None:
        self._end()

    def _end(self) -> None:
        self.ended = True
        self._reading.cancel()
        self._changed.set()
