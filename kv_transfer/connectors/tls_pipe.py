"""A socket pipe inside TLS. Python's TLS sockets move one buffer a call and encrypt what they
are given as records of their own, so small parts of blocks are joined before they are sent."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator

from kv_transfer.connectors.sockets import SocketPipe

CHUNK_NBYTES = 1 << 18


class TLSPipe(SocketPipe):
    """Owns an `ssl.SSLSocket`. One that was accepted shakes hands when it first receives, on
    its own thread: a stranger cannot keep others from being accepted."""

    sock: ssl.SSLSocket

    def _send(self, buffers: list[memoryview]) -> None:
        for chunk in _chunks(buffers):
            self.sock.sendall(chunk)

    def _recv(self, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            position = 0
            while position < len(buffer):
                received = self.sock.recv_into(buffer[position:])
                if received == 0:
                    raise ConnectionError("the peer closed the connection")
                position += received


def _chunks(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    """The buffers' bytes in order, in pieces of at least CHUNK_NBYTES but for the last."""
    waiting: list[memoryview] = []
    size = 0
    for buffer in buffers:
        waiting.append(buffer)
        size += len(buffer)
        if size >= CHUNK_NBYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)
