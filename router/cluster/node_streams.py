"""One stream from each decode node, for all requests on it: one message per step.

    Decode.Events ─▶ NodeStream ─ by job number ─▶ Attempt.take, at once, in order

The stream is opened before the first request that needs it, and again after it has ended. When it
ends, or is invalid, all requests on it have failed on that node.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Protocol

import grpc
import msgspec
from grpc.aio import EOF  # type: ignore[attr-defined]

from pdserve.common.core.errors import Blame, NodeError, PdserveError
from pdserve.common.rpc.channels import Channels
from pdserve.common.rpc.pb import cluster_pb2 as pb
from pdserve.common.rpc.pb import cluster_pb2_grpc as pb_grpc
from pdserve.common.rpc.tokens import StepEvent, decode_events
from pdserve.router.cluster.node import Node
from pdserve.router.cluster.node_client import call_error, is_connected, protocol_error

logger = logging.getLogger(__name__)


class JobOwner(Protocol):
    """The owner of a job. Neither method raises or waits."""

    def take(self, event: StepEvent) -> None: ...

    def fail(self, error: PdserveError) -> None:
        """Notes that no more events will come."""


class NodeStreams:
    """The streams of all decode nodes."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._streams: dict[Node, NodeStream] = {}

    @contextmanager
    def job(
        self, node: Node, request: pb.DecodeRequest, receiver: JobOwner
    ) -> Iterator[NodeStream]:
        """Delivers the events of a job to the receiver; enter it before the job is sent."""
        stream = self._streams.get(node)
        if stream is None or stream.ended:
            stream = self._streams[node] = NodeStream(self._channels, node)
            stream.reading.add_done_callback(lambda _: self._ended(node, stream))
        with stream.job(receiver) as number:
            request.stream, request.job_number = stream.name, number
            yield stream

    def _ended(self, node: Node, stream: NodeStream) -> None:
        if self._streams.get(node) is stream:
            del self._streams[node]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.reading.cancel()


class NodeStream:
    """One node's event stream, from its opening to its end."""

    def __init__(self, channels: Channels, node: Node) -> None:
        self.name = secrets.token_hex(16)
        self._node = node
        self._jobs: dict[int, JobOwner] = {}
        self._numbers = itertools.count(1)
        channel = channels.get(node.info.address)
        self.connected = is_connected(channel)  # or has been connected
        self._call = pb_grpc.DecodeStub(channel).Events(pb.EventsRequest(stream=self.name))
        self.ended = False
        # An empty context: the task does not belong to the first request.
        self.reading = asyncio.create_task(self._read(), context=Context())

    @contextmanager
    def job(self, receiver: JobOwner) -> Iterator[int]:
        number = next(self._numbers)
        self._jobs[number] = receiver
        try:
            yield number
        finally:
            self._jobs.pop(number, None)

    async def _read(self) -> None:
        """Reads until the stream ends, and reports the reason to every job on it."""
        error: PdserveError = self._lost("stopped")
        try:
            await self._deliver_all()
            error = self._lost("its stream has ended")
        except grpc.aio.AioRpcError as failure:
            error = call_error(failure, self._node, self.connected)
        except PdserveError as failure:
            error = failure
        except asyncio.CancelledError:  # the call's, when its channel is closed, or this task's
            pass
        except Exception as failure:  # a message that gRPC itself does not understand
            logger.exception("decode node %s", self._node.id)
            error = self._nonsense(f"a message makes no sense: {failure!r}")
        finally:
            self.ended = True
            self._call.cancel()
            jobs, self._jobs = self._jobs, {}
            error = self._node.excused(error)
            for receiver in jobs.values():
                receiver.fail(error)

    async def _deliver_all(self) -> None:
        for number in itertools.count():
            message = await self._call.read()
            if message is EOF:
                return
            if message is None:  # gRPC's value for bytes that do not parse
                raise self._nonsense("a message of the stream does not parse")
            if message.number != number:
                raise self._nonsense(f"message {message.number} came as {number}")
            self.connected = True
            self._deliver(message.events)

    def _deliver(self, message: bytes) -> None:
        try:
            events = decode_events(message)
        except msgspec.DecodeError as error:
            raise self._nonsense(f"events do not parse: {error}") from None
        for event in events:
            # There may be some yet of a job that has ended.
            if (receiver := self._jobs.get(event.job)) is not None:
                receiver.take(event)

    def _lost(self, why: str) -> NodeError:
        return NodeError(why, code="PEER_LOST", blame=Blame(self._node.role))

    def _nonsense(self, what: str) -> NodeError:
        return protocol_error(self._node.role, what)
