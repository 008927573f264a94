"""Calls to a node for one request; every failure is a typed error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.obs.logging import request_id_var
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import REQUEST_ID_KEY, from_rpc_error
from pdserve.common.rpc.trace import trace_metadata
from pdserve.router.cluster.node import Node

logger = logging.getLogger(__name__)

RETARGET_TIMEOUT = 5.0  # seconds a decode node gets to quiesce its ranks
FINISH_TIMEOUT = 5.0  # seconds a decode node gets to note that a choice has ended


class NodeClient:
    """The calls of one request to one node."""

    def __init__(self, channels: Channels, node: Node, request_id: str) -> None:
        self._channels = channels
        self._node = node
        self._request_id = request_id
        # The client's id, where it gave one, so that one word finds a request in every log.
        own = (REQUEST_ID_KEY, request_id_var.get() or request_id)
        self._metadata = (own, *trace_metadata())

    def prefill(self, request: pb.PrefillRequest) -> PrefillCall:
        return PrefillCall(self._channel, self._node, request, self._metadata)

    def decode(self, request: pb.DecodeRequest) -> DecodeCall:
        return DecodeCall(self._channel, self._node, request, self._metadata)

    async def retarget(self, transfer_id: bytes) -> pb.Ticket:
        """Returns a ticket of the next epoch, for another prefill node.

        Raises:
            PdserveError: ALREADY_LANDED when there is no need.
        """
        stub = pb_grpc.KVTransferStub(self._channel)
        request = pb.RetargetRequest(transfer_id=transfer_id)
        try:
            response = await stub.Retarget(request, timeout=RETARGET_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, Blame(self._node.role))
            raise self._node.excused(failure) from None
        if response is None:
            raise protocol_error(self._node.role, "the answer to Retarget does not parse")
        ticket: pb.Ticket = response.ticket
        return ticket

    async def finish_choice(self, choice: int) -> None:
        """Tells a decode node that a choice has ended. Without this message the node only does
        unnecessary work."""
        stub = pb_grpc.DecodeStub(self._channel)
        request = pb.FinishChoiceRequest(request_id=self._request_id, choice=choice)
        try:
            await stub.FinishChoice(request, timeout=FINISH_TIMEOUT, metadata=self._metadata)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:  # refused; a closed channel
            logger.debug("%s: choice %d goes on: %s", self._request_id, choice, error)

    @property
    def _channel(self) -> grpc.aio.Channel:
        return self._channels.get(self._node.info.address)


class NodeCall:
    """Use as a context manager: leaving it cancels the call, and the node frees the call's
    resources. It also fails when the registry reports the node as lost."""

    def __init__(self, channel: grpc.aio.Channel, node: Node) -> None:
        self._node = node
        self.connected = is_connected(channel)  # or was, or the node has answered

    def __enter__(self) -> Self:
        self._node.on_lost.add(self.fail)
        return self

    def __exit__(self, *_: object) -> None:
        self._node.on_lost.discard(self.fail)
        self._cancel()

    def fail(self, error: Exception) -> None:
        """Ends the call: its waiters get this error. Only the first error counts."""
        raise NotImplementedError

    def _cancel(self) -> None:
        raise NotImplementedError

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        role = self._node.role
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise call_error(error, self._node, self.connected) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is our task that was cancelled, not this call alone
            message = f"{role} node: the call was cancelled"
            lost = NodeError(message, code="PEER_LOST", blame=Blame(role))
            raise self._node.excused(lost) from None
        except Exception as error:  # a reply that gRPC itself does not understand
            logger.exception("%s node %s", role, self._node.id)
            raise protocol_error(role, f"a reply makes no sense: {error!r}") from error


class PrefillCall(NodeCall):
    """A job on a prefill node, answered by a stream."""

    def __init__(
        self, channel: grpc.aio.Channel, node: Node, request: pb.PrefillRequest, metadata: Any
    ) -> None:
        """Starts the call."""
        super().__init__(channel, node)
        self._lost: Exception | None = None
        self._call = pb_grpc.PrefillStub(channel).Run(request, metadata=metadata)

    def fail(self, error: Exception) -> None:
        self._lost = self._lost or error
        self._cancel()

    def _cancel(self) -> None:
        self._call.cancel()

    async def expect(self, field: str) -> Any:
        """Reads the next event, which must be of this kind, unless it is a later version's.

        Raises:
            PdserveError: the node refused, failed or vanished; `blame` says whose fault it is.
        """
        event = await self._read()
        while event is not None and event.WhichOneof("event") is None:
            event = await self._read()
        if event is None or not event.HasField(field):
            raise protocol_error(self._node.role, f"the stream has no {field!r}")
        return getattr(event, field)

    async def _read(self) -> pb.PrefillEvent | None:
        """Returns the next event; None at the end of the stream."""
        try:
            with self._typed_errors():
                event = await self._call.read()
        except PdserveError:
            if self._lost is not None:
                raise self._lost from None
            raise
        if event is None:  # gRPC's value for bytes that do not parse
            raise protocol_error(self._node.role, "a reply does not parse")
        self.connected = True
        return None if event is EOF else event


class DecodeCall(NodeCall):
    """A job on a decode node: `Decode.Run` lasts as long as the job, and all its events come on the
    node's stream. `ended` waits for the outcome from either."""

    def __init__(
        self, channel: grpc.aio.Channel, node: Node, request: pb.DecodeRequest, metadata: Any
    ) -> None:
        """Starts the call."""
        super().__init__(channel, node)
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.over = self._outcome.done
        self._failing: asyncio.Task[None] | None = None
        self._call: Any = None
        try:
            with self._typed_errors():
                self._call = pb_grpc.DecodeStub(channel).Run(request, metadata=metadata)
                self._call.add_done_callback(self._run_ended)
        except PdserveError as error:  # the channel is closed
            self.fail(error)

    def finish(self) -> None:
        """Notes that every choice has finished."""
        if not self._outcome.done():
            self._outcome.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # seen, even if the request has ended otherwise

    async def ended(self) -> None:
        """Returns when every choice has finished.

        Raises:
            PdserveError: the node refused, failed or vanished; `blame` says whose fault it is.
        """
        await self._outcome

    @asynccontextmanager
    async def meanwhile(self) -> AsyncIterator[None]:
        """Cancels its body when the job has an outcome."""
        inside, scope = True, asyncio.timeout(None)

        def give_up(_: object) -> None:
            if inside:
                scope.reschedule(0)

        try:
            async with scope:
                self._outcome.add_done_callback(give_up)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            inside = False

    def _cancel(self) -> None:
        self._outcome.cancel()  # if there is none yet
        if self._call is not None:
            self._call.cancel()
        if self._failing is not None:
            self._failing.cancel()

    def _run_ended(self, _: object) -> None:
        """`Run` ended before the job's `Ended` event, so it most likely failed."""
        if not self._outcome.done():
            self._failing = asyncio.create_task(self._learn())

    async def _learn(self) -> None:
        """Waits for the outcome of `Run`. Success decides nothing: the job's end comes on the
        stream."""
        try:
            with self._typed_errors():
                response = await self._call
            if response is None:  # gRPC's value for bytes that do not parse
                raise protocol_error(self._node.role, "a reply does not parse")
        except PdserveError as error:
            self.fail(error)


def is_connected(channel: grpc.aio.Channel) -> bool:
    """Returns whether the channel is connected; if not, it starts to connect."""
    return channel.get_state(True) is grpc.ChannelConnectivity.READY


def call_error(error: grpc.aio.AioRpcError, node: Node, connected: bool) -> PdserveError:
    """Returns the typed error of a failed call; `connected`: the node had been reached."""
    known = from_rpc_error(error, Blame(node.role))
    if known.code == "PEER_LOST" and not connected:
        known = NodeError(known.message, code="UNREACHABLE", blame=Blame(node.role))
    return node.excused(known)


def protocol_error(role: str, what: str) -> NodeError:
    """Returns the error for an event that a node of this role never sends."""
    return NodeError(f"{role} node: {what}", code="PROTOCOL_ERROR", blame=Blame(role))
