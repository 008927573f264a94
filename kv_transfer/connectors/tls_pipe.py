"""A socket pipe inside TLS. Python's TLS sockets move one buffer a call and encrypt what they
are given as records of their own, so small parts of blocks are joined before they are sent."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator

from kv_transfer.blocks import ByteRuns
from kv_transfer.connectors.sockets import SocketPipe
from kv_transfer.gate import Gate

CHUNK_NBYTES = 1 << 18


class TLSPipe(SocketPipe):
    """Owns an `ssl.SSLSocket`. One that was accepted shakes hands when it first receives, on
    its own thread: a stranger cannot keep others from being accepted."""

    sock: ssl.SSLSocket
    _most = 1

    def send_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        """Only the join is inside the gate: what TLS has begun to send it must be given again."""
        whole = True
        for parts in _chunks(runs.slices(memory)):
            with gate.passage() as admitted:
                chunk = b"".join(parts) if admitted else bytes(sum(map(len, parts)))
            whole = whole and admitted
            self.sock.sendall(chunk)
            if self.on_moved is not None:
                self.on_moved()
        return whole

    def wait(self) -> None:
        if not self.sock.pending():  # decrypted already
            super().wait()

    def _set_time_limit(self, seconds: float) -> None:
        self.sock.settimeout(seconds)  # TLS sockets know no other time-out

    def _send(self, buffers: list[memoryview]) -> int:
        return self.sock.send(buffers[0])

    def _recv(self, buffers: list[memoryview]) -> int:
        return self.sock.recv_into(buffers[0])


def _chunks(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """The buffers in order, in groups of at least CHUNK_NBYTES but for the last."""
    waiting: list[memoryview] = []
    size = 0
    for buffer in buffers:
        waiting.append(buffer)
        size += len(buffer)
        if size >= CHUNK_NBYTES:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting
