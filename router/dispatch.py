"""One request on its two nodes: reserve, prefill, then decode; one stream of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
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
from router.placement import Placement


class Dispatch:
    """Closing `events` at any time cancels both calls, and the nodes free what they hold."""

    def __init__(
        self,
        job: GenerateJob,
        placement: Placement,
        channels: Channels,
        mark: Callable[[str], None],
    ) -> None:
        self._job = convert.job_to_pb(job)
        self._placement = placement
        self._channels = channels
        self._mark = mark
        # The client's id, where it gave one, so that one word finds a request in every log.
        self._metadata = ((REQUEST_ID_KEY, request_id_var.get() or job.request_id),)
        self.cached_tokens = 0
        self.transfer_bytes = 0
        self.transfer_seconds = 0.0

    async def events(self) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of all choices, the first of choice 0 straight from the prefill node.

        Raises:
            PdserveError: a node refused, failed or vanished; `blame` says which.
        """
        decode = self._start_decode()
        prefill: _Call | None = None
        try:
            if self._placement.prefill is not None:
                ticket = (await decode.expect("reserved")).reserved
                self._mark("reserved")
                prefill = self._start_prefill(self._placement.prefill.info.address, ticket)
                first = (await prefill.expect("first_token")).first_token
                self.cached_tokens = first.cached_tokens
                yield convert.event_from_pb(first.token)
                prefill.then(self._handed_off, on_error=decode.fail)
            async for event in decode:
                if event.HasField("landed"):
                    self._mark("transferred")
                    self.transfer_bytes = event.landed.bytes
                elif event.HasField("tokens"):
                    yield convert.event_from_pb(event.tokens)
        finally:
            for call in (prefill, decode):
                if call is not None:
                    call.close()

    def _start_decode(self) -> _Call:
        stub = pb_grpc.DecodeStub(self._channels.get(self._placement.decode.info.address))
        request = pb.DecodeRequest(job=self._job, local_prefill=self._placement.prefill is None)
        return _Call(stub.Run(request, metadata=self._metadata), Blame.DECODE)

    def _start_prefill(self, address: str, ticket: pb.Ticket) -> _Call:
        stub = pb_grpc.PrefillStub(self._channels.get(address))
        request = pb.PrefillRequest(job=self._job, ticket=ticket)
        return _Call(stub.Run(request, metadata=self._metadata), Blame.PREFILL)

    def _handed_off(self, event: pb.PrefillEvent) -> None:
        self.transfer_seconds = event.handed_off.transfer_s


class _Call:
    """A streaming call to a node whose failures are typed errors. The first cause wins: a
    failure told by `fail` is raised instead of the call's own end."""

    def __init__(self, call: Any, peer: Blame) -> None:
        self._call = call
        self._peer = peer
        self._error: PdserveError | None = None
        self._follower: asyncio.Task[None] | None = None

    async def expect(self, field: str) -> Any:
        """The next event, which must be of this kind."""
        with self._typed_errors():
            event = await self._call.read()
        if event is EOF or not event.HasField(field):
            raise self._error or NodeError(
                f"{self._peer} node: the stream has no {field!r}",
                code="PROTOCOL_ERROR",
                blame=self._peer,
            )
        return event

    async def __aiter__(self) -> AsyncIterator[Any]:
        with self._typed_errors():
            while (event := await self._call.read()) is not EOF:
                yield event

    def then(self, handle: Callable[[Any], None], on_error: Callable[[PdserveError], None]) -> None:
        """Reads what is left in the background."""

        async def follow() -> None:
            try:
                async for event in self:
                    handle(event)
            except PdserveError as error:
                on_error(error)

        self._follower = asyncio.create_task(follow())

    def fail(self, error: PdserveError) -> None:
        """Ends the call: its reader gets this error."""
        self._error = self._error or error
        self._call.cancel()

    def close(self) -> None:
        """Cancels what is still going on; the node frees what it holds for the call."""
        if self._follower is not None:
            self._follower.cancel()
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
