"""A communicator of two ranks, the source and the sink, over torch.distributed: gloo between CPUs,
NCCL between GPUs. It does not use torch's default group, so every pair has its own.

Every wait is bounded. A part that takes longer than `stall_s`, a peer that is gone and an
`interrupt` all raise ConnectionError, after which the group is unusable.
"""

from __future__ import annotations

import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from pdserve.common.core.errors import Blame
from pdserve.kv_transfer.connectors.base.handshake import GREETING_S, recv_greeting, send_frame
from pdserve.kv_transfer.frame import Frame, FrameKind, bad_frame
from pdserve.kv_transfer.pipe import KVPipe

DONE = ""  # the key that ends the exchange
BREAK_TAG = 1  # of a receive to which the peer never sends
# Pauses between two looks at a part on its way; 64 MiB may take a fraction of a millisecond. Each
# is a share of the time so far: so late, relative to its own time, a part is noticed at most.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_SHARE = 10e-6, 1e-3, 1 / 8

_values = msgspec.msgpack.Decoder(tuple[str, bytes])


class Side(IntEnum):
    """Numbers the ranks of a pair."""

    SOURCE = 0
    SINK = 1


class PairGroup(ABC):
    """Belongs to one thread; `interrupt` may come from any. `group` is a torch.distributed
    backend."""

    def __init__(self, group: Any, side: Side, stall_s: float) -> None:
        self._group = group
        self._peer = 1 - side
        self._stall = timedelta(seconds=stall_s)
        self._moving: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor) -> None:
        """Returns when the contiguous tensor may change again."""
        self._move(self._group.send, tensor)

    def recv(self, tensor: torch.Tensor) -> None:
        """Returns when the contiguous tensor is filled. Its size must be that of the send."""
        self._move(self._group.recv, tensor)

    def _move(
        self, start: Callable[[list[torch.Tensor], int, int], dist.Work], data: torch.Tensor
    ) -> None:
        self._moving = data  # if the wait fails, the group uses its memory until it is closed
        with connection_errors():
            self._wait(start([data], self._peer, 0))
        self._moving = None

    @abstractmethod
    def _wait(self, work: dist.Work) -> None: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Makes a blocked call fail; called from any thread, after the socket was shut."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group; the peer's calls fail."""


class GlooPair(PairGroup):
    """Moves CPU tensors. It binds to the local address of `sock`, the pair's connection."""

    def __init__(self, store: dist.Store, side: Side, sock: socket.socket, stall_s: float) -> None:
        # torch has no public name for gloo's options, which say what address to bind to
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        host = sock.getsockname()[0]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=GREETING_S)
        options._threads = 1
        super().__init__(dist.ProcessGroupGloo(store, side, 2, options), side, stall_s)

    def _wait(self, work: dist.Work) -> None:
        work.wait(self._stall)

    def interrupt(self) -> None:
        # gloo's abort and shutdown do not end a wait (torch 2.13), but a receive that times out
        # breaks the pair for all other waits
        if (group := self._group) is None:
            return
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            group.recv([nothing], self._peer, BREAK_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self.interrupt()
        self._group = None


class NcclPair(PairGroup):
    """Moves CUDA tensors. NCCL does not notice that a peer is gone, so it polls `sock`."""

    def __init__(
        self,
        store: dist.Store,
        side: Side,
        sock: socket.socket,
        stall_s: float,
        device: torch.device,
    ) -> None:
        # Otherwise torch's watchdog or monitor ends the process when a peer is lost. The variables
        # are read when a group is made, so the model's own group, which is older, is unaffected.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=stall_s)
        super().__init__(dist.ProcessGroupNCCL(store, side, 2, options), side, stall_s)
        self._hangup = select.poll()
        self._hangup.register(sock, select.POLLRDHUP)
        try:
            self._introduce(torch.zeros(1, dtype=torch.uint8, device=device))
        except BaseException:
            self.close()
            raise

    def _introduce(self, token: torch.Tensor) -> None:
        """Sends one byte: NCCL connects at the first send, so a failure to connect occurs here."""
        if self._peer == Side.SINK:
            self.send(token)
        else:
            self.recv(token)

    def _wait(self, work: dist.Work) -> None:
        started, stall = time.monotonic(), self._stall.total_seconds()
        while not work.is_completed():
            if self._hangup.poll(0):
                raise ConnectionError("the peer closed the connection")
            if (elapsed := time.monotonic() - started) > stall:
                raise ConnectionError(f"nothing came for {stall} s")
            time.sleep(min(max(PAUSE_SHARE * elapsed, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
        work.wait(self._stall)  # raises what NCCL found

    def interrupt(self) -> None:
        """Does nothing: `_wait` polls the socket, which was shut."""

    def close(self) -> None:
        self._group.abort()
        self._group = None


def join(
    store: dist.Store, side: Side, sock: socket.socket, stall_s: float, device: torch.device
) -> PairGroup:
    """Joins the group; blocks until both ranks have. Raises the store's errors or
    ConnectionError."""
    with connection_errors():
        if device.type == "cuda":
            return NcclPair(store, side, sock, stall_s, device)
        return GlooPair(store, side, sock, stall_s)


@contextmanager
def connection_errors() -> Iterator[None]:
    """Raises ConnectionError for torch's RuntimeError, by which it reports a lost or silent
    peer."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error).splitlines()[0]) from error


class PairStore(dist.Store):
    """Implements torch's store for a pair; its values go over the pair's own connection.

    It belongs to one thread while the group forms; afterwards it is local. `peer` is the other
    side's role. It raises OSError when the peer is gone, TransferError when the peer sends other
    frames; torch passes both on unchanged."""

    def __init__(self, pipe: KVPipe, peer: Blame) -> None:
        super().__init__()
        self._pipe: KVPipe | None = pipe
        self._peer = peer
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._known[key] = value.encode() if isinstance(value, str) else bytes(value)
        if self._pipe is not None:
            said = msgspec.msgpack.encode((key, self._known[key]))
            send_frame(self._pipe, Frame(FrameKind.MEET), said)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            self._receive()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def finish(self) -> None:
        """Ends the exchange; afterwards the connection is free for other frames."""
        assert self._pipe is not None  # it was not called before
        send_frame(self._pipe, Frame(FrameKind.MEET), msgspec.msgpack.encode((DONE, b"")))
        self.wait([DONE])
        self._pipe = None

    def _receive(self) -> None:
        if self._pipe is None:
            raise ConnectionError("the pair has joined already")
        frame, payload = recv_greeting(self._pipe, self._peer)
        if frame.kind is not FrameKind.MEET:
            raise bad_frame(f"{frame.kind.name} where MEET was due", self._peer)
        try:
            key, value = _values.decode(payload)
        except msgspec.DecodeError as error:
            raise bad_frame(f"meeting: {error}", self._peer) from error
        self._known[key] = value
