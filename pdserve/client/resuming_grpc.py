"""gRPC clients of several routers of one cluster, whose streams outlive the router that serves
them.

    with ResumingStub(["10.0.0.1:8001", "10.0.0.9:8001"], api_key) as stub:
        for response in stub.generate(pb.GenerateRequest(text="Once")):
            print(response.text, end="")

The responses are those of one uninterrupted stream, like the chunks of the HTTP clients in
`resuming`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Self

import grpc

from pdserve.client.resuming import LONGEST_PAUSE, PATIENCE, PAUSE
from pdserve.client.watch import CONNECT, PROBE, QUIET
from pdserve.common.core.errors import ConfigError
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from pdserve.common.rpc.server import KEEPALIVE

# A router that vanishes or stands still is noticed after six seconds.
_SOON = {
    "grpc.keepalive_time_ms": int(1000 * QUIET),
    "grpc.keepalive_timeout_ms": int(1000 * PROBE),
    "grpc.http2.ping_timeout_ms": int(1000 * PROBE),
    "grpc.min_reconnect_backoff_ms": int(1000 * CONNECT),  # bounds the time of a connection
}
OPTIONS = [*{**dict(KEEPALIVE), **_SOON}.items()]
# The router is gone, full, or about to stop (gRPC cancels calls that arrive while a server stops):
# another one may serve the request.
ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}


class Progress:
    """Tracks the received part of one stream and how long tries have failed; without I/O."""

    def __init__(self, request: pb.GenerateRequest, patience: float) -> None:
        self.asked = pb.GenerateRequest()
        self.asked.CopyFrom(request)
        self.asked.resumable = True
        self._patience = patience
        self._since: float | None = None  # the first failure after the last response with an id
        self.begin()

    def begin(self) -> None:
        """Drops responses that came without an id."""
        self._held: list[pb.GenerateResponse] = []

    def take(self, response: pb.GenerateResponse) -> list[pb.GenerateResponse]:
        """Takes a response; returns the responses that are final."""
        self._held.append(response)
        if not response.event_id:
            return []
        self.asked.resume.append(response.event_id)
        self._since = None
        return self.rest()

    def rest(self) -> list[pb.GenerateResponse]:
        """Returns the held responses."""
        held, self._held = self._held, []
        return held

    def failed(self, error: grpc.RpcError, tries: int) -> float:
        """Returns the seconds to wait before the next try. `tries`: how many routers have failed
        since this one was asked.

        Raises:
            grpc.RpcError: `error`, because another try would not help, or too much time has passed.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        elsewhere = error.code() in ELSEWHERE  # type: ignore[attr-defined]
        if not elsewhere or now - self._since > self._patience:
            raise error
        return min(PAUSE * (1 + tries), LONGEST_PAUSE)


class _Routers:
    """A channel to each router, and the index of the current one."""

    _kind: ClassVar[Any]  # `grpc` or `grpc.aio`

    def __init__(
        self,
        addresses: Sequence[str],
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """`addresses`: HOST:PORT of the routers' --grpc-port. `credentials`: of TLS, if they serve
        it. A stream fails when no try has brought a new response for `patience` seconds."""
        if isinstance(addresses, str) or not addresses:
            raise ConfigError("addresses: give a list of the routers' addresses, one at least")
        self._channels = [self._channel(each, credentials) for each in addresses]
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._patience = patience
        self._turn = 0

    def _channel(self, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
        if credentials is None:
            return self._kind.insecure_channel(address, OPTIONS)
        return self._kind.secure_channel(address, credentials, OPTIONS)

    def _call(self, turn: int, progress: Progress) -> Any:
        channel = self._channels[turn % len(self._channels)]
        progress.begin()
        stub = inference_pb2_grpc.InferenceStub(channel)
        return stub.Generate(progress.asked, metadata=self._metadata)


class ResumingStub(_Routers):
    """A client for threads. Use it as a context manager."""

    _kind: ClassVar[Any] = grpc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()

    def generate(self, request: pb.GenerateRequest) -> Iterator[pb.GenerateResponse]:
        """Yields the responses of `Inference.Generate`.

        Raises:
            grpc.RpcError: a router refuses the request, says that it has failed, or none has
                answered for as long as `patience`.
        """
        progress = Progress(request, self._patience)
        while True:
            turn = self._turn
            try:
                yield from self._once(turn, progress)
                return
            except grpc.RpcError as error:
                if self._turn == turn:  # else another stream has already switched routers
                    self._turn += 1
                time.sleep(progress.failed(error, self._turn - turn))

    def _once(self, turn: int, progress: Progress) -> Iterator[pb.GenerateResponse]:
        call = self._call(turn, progress)
        try:
            for response in call:
                yield from progress.take(response)
            yield from progress.rest()
        finally:
            call.cancel()


class AsyncResumingStub(_Routers):
    """A client for an event loop. Use it as an async context manager."""

    _kind: ClassVar[Any] = grpc.aio

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, request: pb.GenerateRequest
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the responses, and raises, as `ResumingStub.generate` does."""
        progress = Progress(request, self._patience)
        while True:
            turn = self._turn
            try:
                async with aclosing(self._once(turn, progress)) as responses:
                    async for response in responses:
                        yield response
                return
            except grpc.RpcError as error:
                if self._turn == turn:
                    self._turn += 1
                await asyncio.sleep(progress.failed(error, self._turn - turn))

    async def _once(
        self, turn: int, progress: Progress
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = self._call(turn, progress)
        try:
            async for response in call:
                for each in progress.take(response):
                    yield each
            for each in progress.rest():
                yield each
        finally:
            call.cancel()
