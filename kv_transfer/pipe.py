"""The small plugin interface: a pipe between two ranks. Whoever implements `KVPipe` and
`PipeTransport` has a connector: see `kv_transfer/connectors/pipe_connector.py`.

A pipe belongs to one thread at each end. Errors are OSError (the peer is gone) or
TransferError (typed).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from kv_transfer.blocks import ByteRuns


class KVPipe(ABC):
    """An ordered, reliable, two-way pipe. Every send is met by a receive of equal size."""

    @abstractmethod
    def send_tensor(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous 1-D uint8 CPU tensor; may block; the tensor is free afterwards."""

    @abstractmethod
    def recv_tensor(self, tensor: torch.Tensor) -> None:
        """Fills a contiguous 1-D uint8 CPU tensor."""

    @abstractmethod
    def interrupt(self) -> None:
        """Makes a blocked call of the owning thread fail; called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; called by the owning thread. The peer sees an OSError."""

    def alive(self) -> bool:
        """Whether an idle pipe is known to be broken; a cheap look, no round trip."""
        return True

    def send_runs(self, memory: memoryview, runs: ByteRuns) -> None:
        """Sends scattered bytes as one tensor. Override to spare the copy."""
        staged = np.frombuffer(bytearray().join(runs.slices(memory)), dtype=np.uint8)
        self.send_tensor(torch.from_numpy(staged))

    def recv_runs(self, memory: memoryview, runs: ByteRuns) -> None:
        """Receives one tensor into scattered bytes. Override to spare the copy."""
        staged = torch.empty(int(runs.lengths.sum()), dtype=torch.uint8)
        self.recv_tensor(staged)
        data, position = memory_of_bytes(staged), 0
        for part in runs.slices(memory):
            part[:] = data[position : position + len(part)]
            position += len(part)


def memory_of_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor."""
    return tensor.numpy().data


def send_bytes(pipe: KVPipe, data: bytes) -> None:
    pipe.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def recv_bytes(pipe: KVPipe, nbytes: int) -> bytes:
    if nbytes == 0:
        return b""
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    pipe.recv_tensor(tensor)
    return tensor.numpy().tobytes()


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
