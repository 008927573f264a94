"""A gRPC client of several routers of one cluster, whose streams outlive the router that serves
them.

    with ResumingStub(["10.0.0.1:8001", "10.0.0.9:8001"], api_key) as stub:
        for response in stub.generate(pb.GenerateRequest(text="Once")):
            print(response.text, end="")

The responses are those of one stream that nothing happened to, as `resuming.ResumingClient` has
them over HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Self

import grpc

from pdserve.client.resuming import LONGEST_PAUSE, PATIENCE, PAUSE
from pdserve.common.core.errors import ConfigError
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.common.rpc.pb import inference_pb2_grpc
from pdserve.common.rpc.server import KEEPALIVE

# A router that is gone, full, or about to stop: another one may serve.
ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}


class ResumingStub:
    """For threads. Use as a context manager."""

    def __init__(
        self,
        addresses: Sequence[str],
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """`addresses`: HOST:PORT of the routers' --grpc-port. `credentials`: of TLS, if they serve
        it. A stream without a new response for `patience` seconds fails."""
        if isinstance(addresses, str) or not addresses:
            raise ConfigError("addresses: give a list of the routers' addresses, one at least")
        self._channels = [
            grpc.insecure_channel(each, KEEPALIVE)
            if credentials is None
            else grpc.secure_channel(each, credentials, KEEPALIVE)
            for each in addresses
        ]
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._patience = patience
        self._turn = 0

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
        asked = pb.GenerateRequest()
        asked.CopyFrom(request)
        asked.resumable = True
        since = time.monotonic()
        while True:
            turn = self._turn
            try:
                for responses in self._once(turn, asked):
                    since = time.monotonic()
                    yield from responses
                return
            except grpc.RpcError as error:
                elsewhere = error.code() in ELSEWHERE  # type: ignore[attr-defined]
                if not elsewhere or time.monotonic() - since > self._patience:
                    raise
                if self._turn == turn:  # else another stream has met this router's death
                    self._turn += 1
                time.sleep(min(PAUSE * (1 + self._turn - turn), LONGEST_PAUSE))

    def _once(
        self, turn: int, asked: pb.GenerateRequest
    ) -> Iterator[Sequence[pb.GenerateResponse]]:
        """Yields the responses that cannot come again, and notes their ids in `asked`."""
        channel = self._channels[turn % len(self._channels)]
        call = inference_pb2_grpc.InferenceStub(channel).Generate(asked, metadata=self._metadata)
        held: list[pb.GenerateResponse] = []
        try:
            for response in call:
                held.append(response)
                if response.event_id:
                    asked.resume.append(response.event_id)
                    yield held
                    held = []
            yield held
        finally:
            call.cancel()
