"""The small plugin interface: a pipe between two ranks. An implementation of `KVPipe` and
`PipeTransport` makes a connector: see `kv_transfer/connectors/pipe_connector.py`.

A pipe belongs to one thread at each end. Errors are OSError (the peer is gone) or TransferError
(typed). All transfers between two ranks share one pipe, or `streams` of them, so a pipe is never
interrupted because one transfer was cancelled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.kv_transfer.blocks import ByteRuns
from pdserve.kv_transfer.gate import Gate


class KVPipe(ABC):
    """Moves bytes both ways, ordered and reliably. Each send meets a receive of equal size."""

    on_moved: Callable[[], None] | None = None  # call it repeatedly while a tensor moves
    # A listener may set the peer's host, so that pipes of one host without a greeting take no place
    # of another host's.
    peer_host: str = ""

    @abstractmethod
    def send_tensor(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous 1-D uint8 CPU tensor; may block; the tensor is free afterwards."""

    @abstractmethod
    def recv_tensor(self, tensor: torch.Tensor) -> None:
        """Fills a contiguous 1-D uint8 CPU tensor."""

    def send_bytes(self, data: bytes) -> None:
        """Sends a header or something as small. Override to save the tensor."""
        self.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def send_header(self, data: bytes) -> None:
        """Sends a header that another send follows at once; it may wait and go with that."""
        self.send_bytes(data)

    def send_now(self, data: bytes) -> int:
        """Sends what can be sent without waiting; returns how many bytes. The owning thread does
        not use the pipe meanwhile. Default: none."""
        return 0

    def recv_bytes(self, nbytes: int) -> bytes:
        """Receives at least one byte. Override to save the tensor."""
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.recv_tensor(tensor)
        return tensor.numpy().tobytes()

    def wait(self) -> None:  # noqa: B027 (optional)
        """Waits, without a limit, until there is something to receive: a peer may be silent between
        two frames. Within a frame a pipe should time a silent peer out. Default: no wait."""

    @abstractmethod
    def interrupt(self) -> None:
        """Makes a blocked call of the owning thread fail; called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; called by the owning thread. The peer sees an OSError."""

    def alive(self) -> bool:
        """Returns False for an idle pipe that is known to be broken; makes no round trip."""
        return True

    def send_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        """Sends scattered bytes as one tensor. Returns whether all were read inside the gate; once
        it is closed, other bytes are sent instead. Override to save the copy; inside the gate a
        thread may wait for the peer only briefly."""
        staged = np.zeros(int(runs.lengths.sum()), dtype=np.uint8)
        with gate.passage() as admitted:
            if admitted:
                _gather(memory, runs, staged)
        self.send_tensor(torch.from_numpy(staged))
        return admitted

    def recv_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        """Receives one tensor into scattered bytes. Returns whether all were written inside the
        gate; once it is closed, the rest is received and dropped. Override as `send_blocks`."""
        staged = torch.empty(int(runs.lengths.sum()), dtype=torch.uint8)
        self.recv_tensor(staged)
        with gate.passage() as admitted:
            if admitted:
                _scatter(memory, runs, memory_of_bytes(staged))
        return admitted


def _gather(memory: memoryview, runs: ByteRuns, staged: NDArray[np.uint8]) -> None:
    position = 0
    for part in runs.slices(memory):
        staged[position : position + len(part)] = part
        position += len(part)


def _scatter(memory: memoryview, runs: ByteRuns, data: memoryview) -> None:
    position = 0
    for part in runs.slices(memory):
        part[:] = data[position : position + len(part)]
        position += len(part)


def memory_of_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous uint8 CPU tensor."""
    return tensor.numpy().data


class PipeListener(ABC):
    """Accepts the pipes of a sink rank."""

    @property
    @abstractmethod
    def endpoint(self) -> bytes:
        """Returns the bytes that `PipeTransport.dial` needs on the other host; opaque to others."""

    @abstractmethod
    def accept(self) -> KVPipe:
        """Waits for the next pipe; OSError once interrupted."""

    @abstractmethod
    def interrupt(self) -> None:
        """Makes a blocked `accept` fail; called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; called when no thread is in `accept`."""


class PipeTransport(ABC):
    """Makes pipes."""

    streams: int = 1  # pipes between two ranks, which share the work

    @abstractmethod
    def listen(self, host: str) -> PipeListener:
        """Starts to listen at an address of this host."""

    @abstractmethod
    def dial(self, endpoint: bytes) -> KVPipe:
        """Connects to a listener; OSError when that fails, within a bounded time."""
