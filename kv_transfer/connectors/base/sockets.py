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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from pdserve.kv_transfer.blocks import ByteRuns, RunsHash
from pdserve.kv_transfer.gate import Gate
from pdserve.kv_transfer.native.code import BlockCode, block_code
from pdserve.kv_transfer.pipe import KVPipe, PipeListener, memory_of_bytes

IOV_MAX = 1024  # buffers one system call takes (Linux)
SCRATCH_NBYTES = 1 << 20
TICK_S = 0.05
HOT_NBYTES = 4 << 20  # moved, then hashed without compiled code: more would leave the caches
STALL_S = 30.0  # without a byte of the frame, after which the peer is lost

Call = Callable[[list[memoryview], int], int]  # moves some bytes of buffers, with flags: how many
MoveBlocks = Callable[[memoryview, ByteRuns, Gate, RunsHash | None], bool]


class Step(Protocol):
    """Moves some bytes from `position` on, 0 if the peer has closed; returns how many. Raises
    BlockingIOError if it would wait longer than the socket's time limit, or at all."""

    def __call__(self, position: int, flags: int = 0) -> int: ...


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
        self._move_all(self._send, [*self._pop_header(), memory_of_bytes(tensor)])

    def recv_tensor(self, tensor: torch.Tensor) -> None:
        self._move_all(self._recv, [memory_of_bytes(tensor)])

    def send_header(self, data: bytes) -> None:
        self._header += data

    def send_bytes(self, data: bytes) -> None:
        self._move_all(self._send, [*self._pop_header(), memoryview(data)])

    def send_now(self, data: bytes) -> int:
        try:
            return self.sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # it is full, or broken: the owning thread will see that
            return 0

    def recv_bytes(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._move_all(self._recv, [memoryview(data)])
        return bytes(data)

    def _pop_header(self) -> list[memoryview]:
        header, self._header = self._header, b""
        return [memoryview(header)] if header else []

    def send_blocks(
        self, memory: memoryview, runs: ByteRuns, gate: Gate, hashed: RunsHash | None = None
    ) -> bool:
        """Continues `hashed` with all bytes of the runs; it is complete if this returns True."""
        return self._move_blocks(False, memory, runs, gate, hashed)

    def recv_blocks(
        self, memory: memoryview, runs: ByteRuns, gate: Gate, hashed: RunsHash | None = None
    ) -> bool:
        """Continues `hashed` as `send_blocks`."""
        return self._move_blocks(True, memory, runs, gate, hashed)

    def _move_blocks(
        self,
        receiving: bool,
        memory: memoryview,
        runs: ByteRuns,
        gate: Gate,
        hashed: RunsHash | None,
    ) -> bool:
        code = self._code()
        if hashed is None or (code is not None and hashed.state is not None):
            return self._move_part(receiving, memory, runs, gate, code, hashed)
        whole = True
        for part in runs.parts(HOT_NBYTES):
            whole &= self._move_part(receiving, memory, part, gate, code, None)
            if whole:
                hashed.update(part)
        return whole

    def _move_part(
        self,
        receiving: bool,
        memory: memoryview,
        runs: ByteRuns,
        gate: Gate,
        code: BlockCode | None,
        hashed: RunsHash | None,
    ) -> bool:
        """Moves a header that waits, even if the gate is closed, and then the blocks."""
        header = [] if receiving else self._pop_header()
        call = self._recv if receiving else self._send
        begun = sum(map(len, header))
        total = begun + int(runs.lengths.sum())
        moved = 0
        with gate.passage() as admitted:
            if admitted:
                step = (
                    self._steps(call, [*header, *runs.slices(memory)])
                    if code is None
                    else self._compiled_steps(code, receiving, header, memory, runs, hashed)
                )
                moved = self._move_at_once(step)
                if moved < total:
                    with self._ticking():
                        moved = self._move(step, total, moved, lambda: gate.is_open)
        if rest := total - moved:
            unsent = [each[moved:] for each in header if moved < begun]
            self._move_all(call, [*unsent, *scratch(rest - sum(map(len, unsent)))])
        return rest == 0

    def _code(self) -> BlockCode | None:
        """Returns the compiled code that moves blocks through this socket, if there is any."""
        return block_code()

    def _compiled_steps(
        self,
        code: BlockCode,
        receiving: bool,
        header: list[memoryview],
        memory: memoryview,
        runs: ByteRuns,
        hashed: RunsHash | None,
    ) -> Step:
        data = np.frombuffer(memory, np.uint8)
        head, state = b"".join(header), None if hashed is None else hashed.state
        fd, place = self.sock.fileno(), (data.ctypes.data, len(data), runs.offsets, runs.lengths)

        def step(position: int, flags: int = 0) -> int:
            return code.move(fd, receiving, flags, head, *place, position, state)

        return step

    def _steps(self, call: Call, buffers: list[memoryview]) -> Step:
        """Moves at most `_most` buffers in a step."""
        ends = list(accumulate(len(buffer) for buffer in buffers))

        def step(position: int, flags: int = 0) -> int:
            index = bisect_right(ends, position)
            batch = buffers[index : index + self._most]
            batch[0] = batch[0][position - ends[index] + len(batch[0]) :]
            return call(batch, flags)

        return step

    def _move_all(self, call: Call, buffers: list[memoryview]) -> None:
        self._move(self._steps(call, buffers), sum(map(len, buffers)))

    def _move_at_once(self, step: Step) -> int:
        """Tries one step that does not wait, which is enough for most small frames; returns the
        bytes moved."""
        try:
            moved = step(0, socket.MSG_DONTWAIT)
        except (BlockingIOError, TimeoutError):
            return 0
        if moved == 0:
            raise ConnectionError("the peer closed the connection")
        return moved

    def _send(self, buffers: list[memoryview], flags: int) -> int:
        return self.sock.sendmsg(buffers, [], flags)

    def _recv(self, buffers: list[memoryview], flags: int) -> int:
        return self.sock.recvmsg_into(buffers, 0, flags or socket.MSG_WAITALL)[0]

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
        step: Step,
        total: int,
        position: int = 0,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> int:
        """Moves what lies between `position` and `total`, while it `may_go_on`; returns the new
        position.

        Raises:
            ConnectionError: the peer closed before the end, or moved nothing for STALL_S.
        """
        since = time.monotonic()
        while position < total and may_go_on():
            try:
                moved = step(position)
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

    def send_blocks(
        self, memory: memoryview, runs: ByteRuns, gate: Gate, hashed: RunsHash | None = None
    ) -> bool:
        """Joins chunks inside the gate and sends them outside: bytes that TLS has begun to send
        must not change."""
        whole = True
        self._move_all(self._send, self._pop_header())
        for part in runs.parts(CHUNK_NBYTES):
            with gate.passage() as admitted:
                slices = part.slices(memory) if admitted else []
                chunk = b"".join(slices) if admitted else bytes(int(part.lengths.sum()))
                if admitted and hashed is not None:
                    hashed.update(part)
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

    def _code(self) -> BlockCode | None:
        return None  # only Python encrypts

    def _move_at_once(self, step: Step) -> int:
        return 0  # TLS has no flags

    def _send(self, buffers: list[memoryview], flags: int) -> int:
        return self.sock.send(buffers[0])

    def _recv(self, buffers: list[memoryview], flags: int) -> int:
        return self.sock.recv_into(buffers[0])
