"""How the two ranks of a pair find each other's addresses: over the connection they have.

torch.distributed wants a store that all ranks share. Ours tells the peer in MEET frames what
one end sets, so that it needs no port of its own, ends with the connection and serves nobody
else.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec
import torch.distributed as dist

from common.core.errors import Blame
from kv_transfer.connectors.pipe_connector import recv_greeting, send_frame
from kv_transfer.frame import Frame, Kind, bad_frame
from kv_transfer.pipe import KVPipe

DONE = ""  # the key that ends the meeting


class PairStore(dist.Store):
    """Belongs to one thread while the group forms; then it is local. `peer` is the other side's
    role. Raises OSError when the peer is gone, TransferError when it says something else; both
    pass through torch as they are."""

    def __init__(self, pipe: KVPipe, peer: Blame) -> None:
        super().__init__()
        self._pipe: KVPipe | None = pipe
        self._peer = peer
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        if self._pipe is not None:
            said = msgspec.msgpack.encode((key, self._known[key]))
            send_frame(self._pipe, Frame(Kind.MEET), said)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            self._hear()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def finish(self) -> None:
        """Both ends have what they need: the connection is free for other frames."""
        assert self._pipe is not None  # it was not called before
        send_frame(self._pipe, Frame(Kind.MEET), msgspec.msgpack.encode((DONE, b"")))
        self.wait([DONE])
        self._pipe = None

    def _hear(self) -> None:
        if self._pipe is None:
            raise ConnectionError("the pair has met")
        frame, payload = recv_greeting(self._pipe, self._peer)
        if frame.kind is not Kind.MEET:
            raise bad_frame(f"{frame.kind.name} where MEET was due", self._peer)
        try:
            key, value = msgspec.msgpack.decode(payload, type=tuple[str, bytes])
        except msgspec.DecodeError as error:
            raise bad_frame(f"meeting: {error}", self._peer) from error
        self._known[key] = value
