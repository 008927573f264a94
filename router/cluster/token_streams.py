"""One stream of tokens from each decode node, for all requests on it: a message a step.

    Decode.Run ── reserved, landed, the end ─────────▶ Attempt
    Decode.Tokens ─▶ TokenStream ─ by job number ────▶ Attempt.take_tokens, at once

The stream is opened with the first request that needs it, and again after it has ended. When it
ends, or is not what it must be, all requests on it have failed on that node.
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
from pdserve.common.rpc.status import from_rpc_error
from pdserve.common.rpc.tokens import JobTokens, decode_tokens
from pdserve.router.cluster.node_client import protocol_error
from pdserve.router.cluster.registry import Node

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """Whose job it is. Neither method raises or waits."""

    def take_tokens(self, tokens: JobTokens) -> None: ...

    def tokens_lost(self, error: PdserveError) -> None:
        """No more tokens come."""


class TokenStreams:
    """Those of all decode nodes that speak this."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._streams: dict[Node, TokenStream] = {}

    @contextmanager
    def job(self, node: Node, request: pb.DecodeRequest, receiver: Receiver) -> Iterator[bool]:
        """The tokens of a job that the node is about to get go to the receiver meanwhile; yields
        whether they do: those of a node of an older version come from `Decode.Run`."""
        if not node.info.token_streams:
            yield False
            return
        stream = self._streams.get(node)
        if stream is None or stream.ended:
            stream = self._streams[node] = TokenStream(self._channels, node)
            stream.reading.add_done_callback(lambda _: self._ended(node, stream))
        with stream.job(receiver) as number:
            request.token_stream, request.job_number = stream.name, number
            yield True

    def _ended(self, node: Node, stream: TokenStream) -> None:
        if self._streams.get(node) is stream:
            del self._streams[node]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.reading.cancel()


class TokenStream:
    """One node's, from its opening to its end."""

    def __init__(self, channels: Channels, node: Node) -> None:
        self.name = secrets.token_hex(16)
        self._node = node
        self._blame = Blame(node.role)
        self._jobs: dict[int, Receiver] = {}
        self._numbers = itertools.count(1)
        stub = pb_grpc.DecodeStub(channels.get(node.info.address))
        self._call = stub.Tokens(pb.TokensRequest(token_stream=self.name))
        self.ended = False
        # It is no part of the request that comes first.
        self.reading = asyncio.create_task(self._read(), context=Context())

    @contextmanager
    def job(self, receiver: Receiver) -> Iterator[int]:
        number = next(self._numbers)
        self._jobs[number] = receiver
        try:
            yield number
        finally:
            self._jobs.pop(number, None)

    async def _read(self) -> None:
        """Until the stream ends, for whatever reason, of which every job is told."""
        error: PdserveError = NodeError("stopped", code="PEER_LOST", blame=self._blame)
        try:
            error = await self._deliver_all()
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure, self._blame)
        except PdserveError as failure:
            error = failure
        except asyncio.CancelledError:  # the call's, when its channel is closed, or this task's
            pass
        except Exception as failure:  # a message that gRPC itself does not understand
            logger.exception("decode node %s", self._node.id)
            error = protocol_error(self._blame, f"a message makes no sense: {failure!r}")
        finally:
            self.ended = True
            self._call.cancel()
            jobs, self._jobs = self._jobs, {}
            error = self._node.excused(error)
            for receiver in jobs.values():
                receiver.tokens_lost(error)

    async def _deliver_all(self) -> PdserveError:
        """What the end of the stream is to those who wait for more."""
        for number in itertools.count():
            message = await self._call.read()
            if message is EOF:
                break
            if message is None:  # gRPC's word for bytes that do not parse
                raise protocol_error(self._blame, "a message of tokens does not parse")
            if message.number != number:
                raise protocol_error(self._blame, f"message {message.number} came as {number}")
            self._deliver(message.tokens)
        return NodeError("its stream of tokens has ended", code="PEER_LOST", blame=self._blame)

    def _deliver(self, message: bytes) -> None:
        try:
            tokens = decode_tokens(message)
        except msgspec.DecodeError as error:
            raise protocol_error(self._blame, f"tokens do not parse: {error}") from None
        for each in tokens:
            # There may be some yet of a job that has ended.
            if (receiver := self._jobs.get(each.job)) is not None:
                receiver.take_tokens(each)
