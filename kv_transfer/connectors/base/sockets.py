"""A pipe over a connected stream socket (TCP or Unix), straight from and into the blocks.

Inside a transfer's gate a thread waits for the peer for `TICK_S` at a time and then checks that the
gate is still open. When a transfer is cancelled, the rest of its frame goes from or to scratch
memory and the connection serves the others. A peer that moves nothing for `STALL_S` is lost; only
between two frames (`wait`) may it be silent.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch

from pdserve.kv_transfer.blocks import ByteRuns
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.pipe import KVPipe, PipeListener, memory_of_bytes

IOV_MAX = 1024  # buffers one system call takes (Linux)
SCRATCH_NBYTES = 1 << 20
TICK_S = 0.05
STALL_S = 30.0  # without a byte of the frame, after which the peer is lost

Move = Callable[..., int]  # moves some bytes of a list of buffers, with flags; returns how many


class SocketPipe(KVPipe):
    """Owns `sock`.

    `interrupt` shuts the connection by the method of plain sockets, because a TLS socket falls back
    to plain text when its own method shuts it.
    """

    _most = IOV_MAX

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self.sock = sock
        self._header = b""  # to be sent with the next send
        self._set_time_limit(STALL_S)

    def wait(self) -> None:
        self._poll(None)

    def _poll(self, timeout: float | None) -> bool:
        """Returns whether there is something to receive, or the peer has closed."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(timeout))

    def send_tensor(self, tensor: torch.Tensor) -> None:
        self._move(self._send, [*self._pop_header(), memory_of_bytes(tensor)])

    def recv_tensor(self, tensor: torch.Tensor) -> None:
        self._move(self._recv, [memory_of_bytes(tensor)])

    def send_header(self, data: bytes) -> None:
        self._header += data

    def send_bytes(self, data: bytes) -> None:
        self._move(self._send, [*self._pop_header(), memoryview(data)])

    def recv_bytes(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._move(self._recv, [memoryview(data)])
        return bytes(data)

    def _pop_header(self) -> list[memoryview]:
        header, self._header = self._header, b""
        return [memoryview(header)] if header else []

    def send_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        return self._move_blocks(self._send, memory, runs, gate, self._pop_header())

    def recv_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        return self._move_blocks(self._recv, memory, runs, gate, [])

    def _move_blocks(
        self, move: Move, memory: memoryview, runs: ByteRuns, gate: Gate, first: list[memoryview]
    ) -> bool:
        """Moves `first`, even if the gate is closed, and then the blocks."""
        with gate.passage() as admitted:
            buffers = [*first, *runs.slices(memory)] if admitted else []
            moved = self._move_at_once(move, buffers)
            if moved < sum(map(len, buffers)):
                with self._ticking():
                    moved = self._move(move, buffers, moved, lambda: gate.is_open)
        begun = sum(map(len, first))
        rest = begun + int(runs.lengths.sum()) - moved
        if rest:
            unsent = [each[moved:] for each in first if moved < begun]
            self._move(move, [*unsent, *scratch(rest - sum(map(len, unsent)))])
        return rest == 0

    def _move_at_once(self, move: Move, buffers: list[memoryview]) -> int:
        """Tries one call that does not wait, which is enough for most small frames; returns the
        bytes moved."""
        if not buffers or len(buffers) > self._most:
            return 0
        try:
            moved = move(buffers, socket.MSG_DONTWAIT)
        except (BlockingIOError, TimeoutError):
            return 0
        if moved == 0:
            raise ConnectionError("the peer closed the connection")
        return moved

    def _send(self, buffers: list[memoryview], flags: int = 0) -> int:
        return self.sock.sendmsg(buffers, [], flags)

    def _recv(self, buffers: list[memoryview], flags: int = socket.MSG_WAITALL) -> int:
        return self.sock.recvmsg_into(buffers, 0, flags)[0]

    @contextmanager
    def _ticking(self) -> Iterator[None]:
        """Makes calls in the body return after `TICK_S`, with the bytes moved so far."""
        self._set_time_limit(TICK_S)
        try:
            yield
        finally:
            self._set_time_limit(STALL_S)

    def _set_time_limit(self, seconds: float) -> None:
        """Limits one call, by the kernel's clock. Python's own time-outs make calls non-blocking,
        and each would move little and pass all buffers again."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))  # struct timeval
        with contextlib.suppress(OSError):  # it is closed: the next call raises
            for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.sock.setsockopt(socket.SOL_SOCKET, name, limit)

    def _move(
        self,
        move: Move,
        buffers: list[memoryview],
        position: int = 0,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> int:
        """Moves the bytes of all buffers from `position` on, at most `_most` buffers in a call,
        while it `may_go_on`; returns the new position.

        Raises:
            ConnectionError: the peer closed before the end, or moved nothing for STALL_S.
        """
        ends = list(accumulate(len(buffer) for buffer in buffers))
        since = time.monotonic()
        while ends and position < ends[-1] and may_go_on():
            index = bisect_right(ends, position)
            batch = buffers[index : index + self._most]
            batch[0] = batch[0][position - ends[index] + len(batch[0]) :]
            try:
                moved = move(batch)
            except (BlockingIOError, TimeoutError) as error:
                if time.monotonic() - since > STALL_S - TICK_S:
                    raise ConnectionError(f"nothing moved for {STALL_S:.0f} s") from error
                continue
            if moved == 0:
                raise ConnectionError("the peer closed the connection")
            position, since = position + moved, time.monotonic()
            if self.on_moved is not None:
                self.on_moved()
        return position

    def alive(self) -> bool:
        """Returns whether the peer has not closed. (It never sends first, so any event is its
        end.)"""
        return not self._poll(0)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()


class SocketListener(PipeListener):
    """Owns `sock`, which listens."""

    def __init__(self, sock: socket.socket, endpoint: bytes) -> None:
        self._sock = sock
        self._endpoint = endpoint

    @property
    def endpoint(self) -> bytes:
        return self._endpoint

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


def scratch(nbytes: int) -> list[memoryview]:
    """Returns buffers of `nbytes` in all, over one small piece of zeroed memory."""
    memory = memoryview(bytearray(min(nbytes, SCRATCH_NBYTES)))
    whole, rest = divmod(nbytes, SCRATCH_NBYTES)
    return [memory] * whole + [memory[:rest]] * bool(rest)


# ---- the same inside TLS ----

CHUNK_NBYTES = 1 << 18


class TLSPipe(SocketPipe):
    """Owns an `ssl.SSLSocket`. An accepted one shakes hands at its first receive, on its own
    thread, so a stranger cannot delay the accepting of others."""

    sock: ssl.SSLSocket
    _most = 1

    def send_blocks(self, memory: memoryview, runs: ByteRuns, gate: Gate) -> bool:
        """Joins chunks inside the gate and sends them outside: bytes that TLS has begun to send
        must not change."""
        whole = True
        self._move(self._send, self._pop_header())
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
        self.sock.settimeout(seconds)  # TLS sockets have no other time-out

    def _move_at_once(self, move: Move, buffers: list[memoryview]) -> int:
        return 0  # TLS has no flags

    def _send(self, buffers: list[memoryview], flags: int = 0) -> int:
        return self.sock.send(buffers[0])

    def _recv(self, buffers: list[memoryview], flags: int = 0) -> int:
        return self.sock.recv_into(buffers[0])


def _chunks(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Groups the buffers, in order; each group but the last has at least CHUNK_NBYTES."""
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
