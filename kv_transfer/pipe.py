"""The small plugin interface: a pipe between two ranks. Whoever implements `KVPipe` and
`PipeTransport` has a connector: see `kv_transfer/connectors/pipe_connector.py`.

A pipe belongs to one thread at each end. Errors are OSError (the peer is gone) or
TransferError (typed). All transfers between two ranks share one (or `streams`): none is
interrupted because one transfer was given up.
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
    """An ordered, reliable, two-way pipe. Every send is met by a receive of equal size."""

    on_moved: Callable[[], None] | None = None  # call it now and then while a tensor moves
    # The peer's host, where that is known: a listener may set it, so that those of one host who do
    # not say who they are take no place of another host's.
    peer_host: str = ""

    @abstractmethod
    def send_tensor(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous 1-D uint8 CPU tensor; may block; the tensor is free afterwards."""

    @abstractmethod
    def recv_tensor(self, tensor: torch.Tensor) -> None:
        """Fills a contiguous 1-D uint8 CPU tensor."""

    def send_bytes(self, data: bytes) -> None:
        """Sends a header or what is as small. Override to spare the tensor."""
        self.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def send_header(self, data: bytes) -> None:
        """As `send_bytes`, where the next thing on this pipe is a send that follows at once: it
        may wait for that and go with it."""
        self.send_bytes(data)

    def recv_bytes(self, nbytes: int) -> bytes:
        """As `send_bytes`, at least one byte."""
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.recv_tensor(tensor)
        return tensor.numpy().tobytes()

    def wait(self) -> None:  # noqa: B027 (optional)
        """Until there is something to receive, for as long as it takes: the peer may be silent
        between two frames, and nowhere else, where a pipe should give a silent peer up. Default:
        it does not tell the two apart."""

    @abstractmethod
    def interrupt(self) -> None:
        """Makes a blocked call of the owning thread fail; called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; called by the owning thread. The peer sees an OSError."""

    def alive(self) -> bool:
        """Whether an idle pipe is known to be broken; a cheap look, no round trip."""
        return True

    def send_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        """Sends scattered bytes as one tensor. Whether all were read within the gate: when it
        shuts, others take their place. Override to spare the copy; not for longer than a moment
        may a thread inside the gate wait for the peer."""
        staged = np.zeros(int(runs.lengths.sum()), dtype=np.uint8)
        with gate.passage() as admitted:
            if admitted:
                _gather(memory, runs, staged)
        self.send_tensor(torch.from_numpy(staged))
        return admitted

    def recv_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        """Receives one tensor into scattered bytes. Whether all were written within the gate:
        when it shuts, the rest is received all the same, and dropped. Override as
        `send_blocks`."""
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
    """The bytes of a contiguous uint8 CPU tensor."""
    return tensor.numpy().data


def send_bytes(pipe: KVPipe, data: bytes) -> None:
    pipe.send_bytes(data)


def recv_bytes(pipe: KVPipe, nbytes: int) -> bytes:
    return pipe.recv_bytes(nbytes) if nbytes else b""


class PipeListener(ABC):
    """Where the pipes of a sink rank begin."""

    @property
    @abstractmethod
    def endpoint(self) -> bytes:
        """What `PipeTransport.dial` needs on the other host; opaque to all others."""

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

    streams: int = 1  # pipes between two ranks that share the work

    @abstractmethod
    def listen(self, host: str) -> PipeListener:
        """Starts to take pipes at an address of this host."""

    @abstractmethod
    def dial(self, endpoint: bytes) -> KVPipe:
        """Connects to a listener; OSError when that fails, within a bounded time."""
