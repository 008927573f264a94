"""`PipeConnector`: a whole connector over any `KVPipe`. The source pushes, frame by frame
(`kv_transfer/frame.py`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pdserve.kv_transfer.connector import Capabilities, RankContext
from pdserve.kv_transfer.connectors.base.channel import Mover, PipeMover
from pdserve.kv_transfer.connectors.base.handshake import send_frame
from pdserve.kv_transfer.connectors.base.p2p import P2PConnector
from pdserve.kv_transfer.frame import Frame, FrameKind
from pdserve.kv_transfer.pipe import KVPipe, PipeListener, PipeTransport


class PipeConnector(P2PConnector):
    """Makes a connector of `transport(config)`, the only method that a subclass needs. A subclass
    with payloads outside the pipe overrides `mover`."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        push=True, devices=frozenset({"cpu", "cuda"}), authenticates=True
    )

    def __init__(self, context: RankContext, config: Mapping[str, Any]) -> None:
        super().__init__(context, config)
        self._transport = self.transport(config)
        self.sender.streams = self._transport.streams

    @abstractmethod
    def transport(self, config: Mapping[str, Any]) -> PipeTransport:
        """Raises ConfigError on unknown keys."""

    def mover(self, pipe: KVPipe) -> Mover:
        """Makes the mover of payloads for a connection that was just welcomed; called at both
        ends."""
        return PipeMover(self.context.view, pipe)

    def listen(self, host: str) -> PipeListener:
        return self._transport.listen(host)

    def connect(self, endpoint: bytes) -> KVPipe:
        return self._transport.dial(endpoint)

    def introduce(self, pipe: KVPipe) -> None:
        send_frame(pipe, Frame(FrameKind.HELLO), self.context.fingerprint.encode())

    def welcome(self, pipe: KVPipe, hello: bytes) -> Mover:
        self.admit(pipe, hello.decode(errors="replace"))
        send_frame(pipe, Frame(FrameKind.WELCOME))
        return self.mover(pipe)
