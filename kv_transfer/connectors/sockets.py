"""A pipe over a connected stream socket (TCP or Unix), straight from and into the blocks."""

from __future__ import annotations

import contextlib
import socket
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

import torch

from kv_transfer.blocks import ByteRuns
from kv_transfer.pipe import KVPipe, memory_of_bytes

IOV_MAX = 1024  # buffers one system call takes (Linux)


class SocketPipe(KVPipe):
    """Owns `sock`, which is blocking: who waits too long is interrupted by the core.

    `alive` and `interrupt` are about the connection itself, whatever is spoken on it, and so go
    past the methods of TLS sockets: those cannot peek, and fall back to plain text once shut.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self.sock = sock

    def send_tensor(self, tensor: torch.Tensor) -> None:
        self._send([memory_of_bytes(tensor)])

    def recv_tensor(self, tensor: torch.Tensor) -> None:
        self._recv([memory_of_bytes(tensor)])

    def send_runs(self, memory: memoryview, runs: ByteRuns) -> None:
        self._send(runs.slices(memory))

    def recv_runs(self, memory: memoryview, runs: ByteRuns) -> None:
        self._recv(runs.slices(memory))

    def _send(self, buffers: list[memoryview]) -> None:
        _move_all(self.sock.sendmsg, buffers)

    def _recv(self, buffers: list[memoryview]) -> None:
        def receive(batch: list[memoryview]) -> int:
            return self.sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

        _move_all(receive, buffers)

    def alive(self) -> bool:
        """A peer that is silent and has not closed. (It never speaks first.)"""
        try:
            socket.socket.recv(self.sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


def _move_all(move: Callable[[list[memoryview]], int], buffers: list[memoryview]) -> None:
    """Calls `move` on at most IOV_MAX buffers at a time until all bytes of all are moved.

    Raises:
        ConnectionError: the peer closed before that.
    """
    ends = list(accumulate(len(buffer) for buffer in buffers))
    position = 0
    while ends and position < ends[-1]:
        index = bisect_right(ends, position)
        batch = buffers[index : index + IOV_MAX]
        batch[0] = batch[0][position - ends[index] + len(batch[0]) :]
        moved = move(batch)
        if moved == 0:
            raise ConnectionError("the peer closed the connection")
        position += moved
