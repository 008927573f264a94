"""Calls to a node for one request, whose every failure is a typed error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, Self, TypeVar

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.obs.logging import request_id_var
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.status import REQUEST_ID_KEY, from_rpc_error
from pdserve.common.rpc.trace import trace_metadata
from pdserve.router.cluster.health import TICK
from pdserve.router.cluster.registry import Node

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT", pb.PrefillEvent, pb.DecodeEvent)

RETARGET_TIMEOUT = 5.0  # seconds a decode node gets to quiesce its ranks
FINISH_TIMEOUT = 5.0  # seconds a decode node gets to note that a choice has ended


class NodeClient:
    """What one request asks of one node."""

    def __init__(self, channels: Channels, node: Node, request_id: str) -> None:
        self._channels = channels
        self._node = node
        self._request_id = request_id
        # The client's id, where it gave one, so that one word finds a request in every log.
        own = (REQUEST_ID_KEY, request_id_var.get() or request_id)
        self._metadata = (own, *trace_metadata())

    def prefill(self, request: pb.PrefillRequest) -> NodeStream[pb.PrefillEvent]:
        return NodeStream(pb_grpc.PrefillStub, self._channel, self._node, request, self._metadata)

    def decode(self, request: pb.DecodeRequest) -> DecodeStream:
        return DecodeStream(pb_grpc.DecodeStub, self._channel, self._node, request, self._metadata)

    async def retarget(self, transfer_id: bytes) -> pb.Ticket:
        """A ticket of the next epoch, for another prefill node.

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
        """Tells a decode node that no more of a choice is wanted. One that does not get this, or
        is older than the call, does no harm."""
        stub = pb_grpc.DecodeStub(self._channel)
        request = pb.FinishChoiceRequest(request_id=self._request_id, choice=choice)
        try:
            await stub.FinishChoice(request, timeout=FINISH_TIMEOUT, metadata=self._metadata)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:  # refused; a closed channel
            logger.debug("%s: choice %d goes on: %s", self._request_id, choice, error)

    @property
    def _channel(self) -> grpc.aio.Channel:
        return self._channels.get(self._node.info.address)


class NodeStream(Generic[EventT]):
    """Use as a context manager: leaving it cancels what is still going on, and the node frees
    what it holds for the call. It also fails when the registry says that the node is lost."""

    def __init__(
        self, stub: Any, channel: grpc.aio.Channel, node: Node, request: Any, metadata: Any
    ) -> None:
        """Starts the call; `stub` is the generated class of a service with a method `Run`."""
        self._connected = channel.get_state(True) is grpc.ChannelConnectivity.READY
        self._node = node
        self._lost: Exception | None = None
        self._failed = asyncio.Event()
        self._call = stub(channel).Run(request, metadata=metadata)

    def __enter__(self) -> Self:
        self._node.on_lost.add(self.fail)
        return self

    def __exit__(self, *_: object) -> None:
        self._node.on_lost.discard(self.fail)
        self._call.cancel()

    def heard(self) -> None:
        """The node has this call: it speaks of it elsewhere."""
        self._connected = True

    @property
    def failed(self) -> bool:
        return self._failed.is_set()

    def fail(self, error: Exception) -> None:
        """It is of no use any more: whoever reads it gets this error. The first one counts."""
        self._lost = self._lost or error
        self._failed.set()
        self._call.cancel()

    async def read(self) -> EventT | None:
        """The next event; None at the end of the stream.

        Raises:
            PdserveError: the node refused, failed or vanished; `blame` says whose fault it is.
        """
        with self._typed_errors():
            event = await self._call.read()
        if event is None:  # gRPC's word for bytes that do not parse
            raise self._protocol_error("a reply does not parse")
        self._connected = True
        return None if event is EOF else event

    async def rest(self, seconds: float) -> None:
        """The stream has ended; what is still to come on others may take so long, while this
        process runs.

        Raises:
            PdserveError: it did not come.
        """
        clock = self._node.clock
        until = clock() + seconds
        while not self._failed.is_set() and (left := until - clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, TICK)):
                    await self._failed.wait()
        raise self._lost or self._protocol_error("its stream ended before every choice did")

    async def expect(self, field: str) -> Any:
        """What the next event says, which must be of this kind, unless it is a later version's."""
        event = await self.read()
        while event is not None and event.WhichOneof("event") is None:
            event = await self.read()
        if event is None or not event.HasField(field):
            raise self._protocol_error(f"the stream has no {field!r}")
        return getattr(event, field)

    # ---- inside ------------------------------------------------------------------------------

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._lost or self._typed(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # it is our task that was cancelled, not this call alone
            lost = NodeError(
                f"{self._node.role} node: the call was cancelled",
                code="PEER_LOST",
                blame=Blame(self._node.role),
            )
            raise self._lost or self._node.excused(lost) from None
        except Exception as error:  # a reply that gRPC itself does not understand
            logger.exception("%s node %s", self._node.role, self._node.id)
            raise self._protocol_error(f"a reply makes no sense: {error!r}") from error

    def _typed(self, rpc_error: grpc.aio.AioRpcError) -> PdserveError:
        error = from_rpc_error(rpc_error, Blame(self._node.role))
        if error.code == "PEER_LOST" and not self._connected:
            error = NodeError(error.message, code="UNREACHABLE", blame=Blame(self._node.role))
        return self._node.excused(error)

    def _protocol_error(self, what: str) -> NodeError:
        return protocol_error(self._node.role, what)


class DecodeStream(NodeStream[pb.DecodeEvent]):
    """Reserved and landed come once each, in this order and before all tokens; from a node that
    computes the prompt instead of them prefilled, or nothing from one of an older version."""

    def __init__(
        self, stub: Any, channel: Any, node: Node, request: pb.DecodeRequest, metadata: Any
    ):
        super().__init__(stub, channel, node, request, metadata)
        self._phases = ["reserved", "landed", "tokens"]
        if request.local_prefill:
            self._phases = ["prefilled", "tokens"]

    async def read(self) -> pb.DecodeEvent | None:
        event = await super().read()
        kind = None if event is None else event.WhichOneof("event")  # None: a later version's
        if kind is not None:
            if kind == "tokens" and self._phases[0] == "prefilled":
                self._phases.pop(0)
            if kind != self._phases[0]:
                raise self._protocol_error(f"{kind!r} is out of order")
            if kind != "tokens":
                self._phases.pop(0)
        return event


def protocol_error(role: str, what: str) -> NodeError:
    """For what a node of this role never says."""
    return NodeError(f"{role} node: {what}", code="PROTOCOL_ERROR", blame=Blame(role))
