"""One decode node, and as many prefill nodes as it takes to hand the KV over to it.

    Decode.Run ──▶ reserved ─┬─▶ Prefill.Run ──▶ first token ──▶ handed off
                             │        └─ fails ─▶ Retarget: a ticket of the next epoch ─▶ another
                             └─▶ landed ──▶ tokens

The client sees the first token once, whichever node tells it first, and it stands: a prefill
node that takes over commits that token and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from typing import Any

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from common.core.errors import Blame, NodeError, PdserveError
from common.core.request import GenerateJob, TokenEvent
from common.obs.logging import request_id_var
from common.rpc import convert
from common.rpc.pb import cluster_pb2 as pb
from common.rpc.pb import cluster_pb2_grpc as pb_grpc
from common.rpc.server import Channels
from common.rpc.status import REQUEST_ID_KEY, from_rpc_error
from router.registry import Node, Registry

RETARGET_TIMEOUT = 5.0  # seconds a decode node gets to quiesce its ranks
NextPrefill = Callable[[PdserveError | None, Node], Awaitable[Node]]
"""Which prefill node is to fill blocks that are reserved: this one, unless it has failed with an
error or has left meanwhile; raises to give this decode node up."""


class Dispatch:
    """Closing `events` at any time cancels all calls, and the nodes free what they hold."""

    def __init__(
        self,
        job: GenerateJob,
        decode: Node,
        prefill: Node | None,
        next_prefill: NextPrefill,
        registry: Registry,
        channels: Channels,
        mark: Callable[[str], None],
    ) -> None:
        self._job = convert.job_to_pb(job)
        self._decode = decode
        self._prefill = prefill
        self._next_prefill = next_prefill
        self._registry = registry
        self._channels = channels
        self._mark = mark
        # The client's id, where it gave one, so that one word finds a request in every log.
        self._metadata = ((REQUEST_ID_KEY, request_id_var.get() or job.request_id),)
        self._first: pb.TokenEvent | None = None
        self._events: asyncio.Queue[TokenEvent | PdserveError | None] = asyncio.Queue()
        self.begun = prefill is None  # the decode node has blocks for the job, as far as we know
        self.cached_tokens = 0
        self.transfer_bytes = 0
        self.transfer_seconds = 0.0

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of all choices, each once and in order.

        Raises:
            PdserveError: the decode node refused, failed or vanished, or `next_prefill` gave
                up; `blame` says whose fault it is.
        """
        decode = self._start_decode()
        work: list[asyncio.Task[None]] = []
        try:
            if self._prefill is not None:
                ticket = (await decode.expect("reserved")).reserved
                self.begun = True
                self._mark("reserved")
                work.append(self._start(self._hand_off(self._prefill, ticket)))
            work.append(self._start(self._read(decode)))
            while (event := await self._events.get()) is not None:
                if isinstance(event, PdserveError):
                    raise event
                yield event
        finally:
            decode.close()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    # ---- the decode node --------------------------------------------------------------------

    def _start_decode(self) -> _Call:
        stub = pb_grpc.DecodeStub(self._channels.get(self._decode.info.address))
        request = pb.DecodeRequest(job=self._job, local_prefill=self._prefill is None)
        return _Call(stub.Run(request, metadata=self._metadata), self._decode, Blame.DECODE)

    async def _read(self, decode: _Call) -> None:
        async for event in decode:
            if event.HasField("landed"):
                self._mark("transferred")
                self.transfer_bytes = event.landed.bytes
                self._tell_first(event.landed.first_token)
            elif event.HasField("tokens"):
                self._events.put_nowait(convert.event_from_pb(event.tokens))
        self._events.put_nowait(None)

    # ---- the prefill nodes ------------------------------------------------------------------

    async def _hand_off(self, prefill: Node, ticket: pb.Ticket | None) -> None:
        """Until the decode node has the KV: from this prefill node, or else from another."""
        prefill = await self._next_prefill(None, prefill)
        while ticket is not None:
            try:
                with self._registry.using(prefill):
                    await self._run_prefill(prefill, ticket)
                    return
            except PdserveError as error:
                prefill = await self._next_prefill(error, prefill)
                ticket = await self._retarget(ticket)

    async def _run_prefill(self, prefill: Node, ticket: pb.Ticket) -> None:
        stub = pb_grpc.PrefillStub(self._channels.get(prefill.info.address))
        request = pb.PrefillRequest(job=self._job, ticket=ticket, first_token=self._first)
        call = _Call(stub.Run(request, metadata=self._metadata), prefill, Blame.PREFILL)
        try:
            first = (await call.expect("first_token")).first_token
            self.cached_tokens = first.cached_tokens
            self._tell_first(first.token)
            if first.token.finish_reason and len(self._job.choices) == 1:
                return
            handed_off = (await call.expect("handed_off")).handed_off
            self.transfer_seconds = handed_off.transfer_s
        finally:
            call.close()

    async def _retarget(self, ticket: pb.Ticket) -> pb.Ticket | None:
        """A ticket for another prefill node; None when all KV has landed after all."""
        stub = pb_grpc.KVTransferStub(self._channels.get(self._decode.info.address))
        request = pb.RetargetRequest(transfer_id=ticket.transfer_id)
        try:
            response = await stub.Retarget(request, timeout=RETARGET_TIMEOUT)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error, Blame.DECODE)
            if error.code == "ALREADY_LANDED":
                return None
            raise error from None
        return response.ticket

    def _tell_first(self, token: pb.TokenEvent) -> None:
        if self._first is None:
            self._first = token
            self._events.put_nowait(convert.event_from_pb(token))

    # ---- inside -----------------------------------------------------------------------------

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Runs `work` in the background; its failure ends `events`."""

        async def run() -> None:
            try:
                await work
            except PdserveError as error:
                self._events.put_nowait(error)

        return asyncio.create_task(run())


class _Call:
    """A streaming call to a node, whose failures are typed errors. It also fails when the
    registry says that the node is lost."""

    def __init__(self, call: Any, node: Node, peer: Blame) -> None:
        self._call = call
        self._node = node
        self._peer = peer
        self._error: PdserveError | None = None
        node.on_lost.add(self._fail)

    async def expect(self, field: str) -> Any:
        """The next event, which must be of this kind."""
        with self._typed_errors():
            event = await self._call.read()
        if event is EOF or not event.HasField(field):
            raise NodeError(
                f"{self._peer} node: the stream has no {field!r}",
                code="PROTOCOL_ERROR",
                blame=self._peer,
            )
        return event

    async def __aiter__(self) -> AsyncIterator[Any]:
        with self._typed_errors():
            while (event := await self._call.read()) is not EOF:
                yield event

    def close(self) -> None:
        """Cancels what is still going on; the node frees what it holds for the call."""
        self._node.on_lost.discard(self._fail)
        self._call.cancel()

    def _fail(self, error: PdserveError) -> None:
        self._error = error
        self._call.cancel()

    @contextmanager
    def _typed_errors(self) -> Any:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._error or from_rpc_error(error, self._peer) from None
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise
