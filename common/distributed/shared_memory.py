"""A barrier with data in shared memory: ranks of one host publish bytes, wait, and read.

    segment = | words | slots of even rounds, one per rank | slots of odd rounds, one per rank |
    words   = round[rank] for each rank, and `complete`, each on a cache line of its own

Round n: each rank writes its slot of parity n % 2, then round[rank] = n. A rank that then sees n
(or n + 1) in all words writes `complete` = n and wakes the others, which wait for it: first
spinning, then on a futex. Then all ranks read all slots.

Two slots per rank suffice: a rank that writes round n + 2 has seen all ranks in n + 1, and they get
there only after reading the slots of n.

The segment is an anonymous memory file. Ranks pass its descriptor over a socket once, together with
the read end of a pipe whose write end each rank keeps. The kernel closes that end when the process
ends in any way, so all ranks notice every death, and nothing is left behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.common.core.host import usable_cores
from pdserve.common.distributed.communicator import CommunicatorContext, rank_lost

SLOT_BYTES = 1 << 20
_LINE = 16  # uint32 words in a cache line
_MASK = 2**32 - 1
_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # linux/futex.h, x86-64
_SLICE = 0.05  # seconds of sleep between two checks for dead ranks
# Seconds of spinning before sleep: several times the cost of a sleep and wake-up. Each iteration
# yields, because the rank it waits for may need this core. A rank that waited longer than this does
# not spin in the next round: where others need the cores, too, spinning would only take them.
_SPIN = 200e-6

_KEY = "descriptors"  # key in the store
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = [
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    ctypes.POINTER(_Timespec),
]


@dataclass(slots=True)
class Descriptors:
    """The file descriptors of a group: the memory file, and per rank the read end of a pipe whose
    write end only that rank holds."""

    segment: int
    living: list[int]  # by rank; hung up once that rank is gone
    own: int  # this rank's write end

    @property
    def closed(self) -> bool:
        return self.own < 0

    def close(self) -> None:
        """Closes all descriptors; may be called again."""
        fds = [fd for fd in (self.own, self.segment, *self.living) if fd >= 0]
        self.own, self.segment, self.living = -1, -1, []
        for fd in fds:
            os.close(fd)


class SharedMemory:
    """One rank's view of the segment."""

    def __init__(self, rank: int, ranks: tuple[int, ...], shared: Descriptors) -> None:
        """`ranks`: world ranks. Takes ownership of all descriptors."""
        size = len(ranks)
        memory = mmap.mmap(shared.segment, segment_bytes(size))
        self._rank, self._ranks, self._shared = rank, ranks, shared
        self._words = memoryview(memory).cast("I")
        self._complete = size * _LINE
        word = ctypes.c_uint32.from_buffer(memory, 4 * self._complete)
        self._address = ctypes.addressof(word)
        self._round = 0
        self._fence = threading.Lock()
        # With more ranks than cores, spinning would only take cores from ranks that compute.
        self._spin_seconds = _SPIN if size <= usable_cores() else 0.0
        self._spins = self._spin_seconds > 0
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_words_bytes(size))
        self._slots = slots.view(2, size, SLOT_BYTES)
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}

    def slots(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns the slots of the next round, by rank, as `dtype`."""
        views = self._views.get(dtype)
        if views is None:
            views = [list(parity.view(dtype)) for parity in self._slots]
            self._views[dtype] = views
        return views[(self._round + 1) & 1]

    def barrier(self, deadline: float) -> None:
        """Publishes this rank's slot and returns when all slots of the round can be read. They are
        valid until the next call.

        Raises:
            NodeError: RANK_LOST, a rank died or did not arrive before `deadline` (monotonic).
        """
        if self._shared.closed:
            raise rank_lost("the group is closed")
        self._round = (self._round + 1) & _MASK
        self._words[self._rank * _LINE] = self._round
        # A lock's atomic exchange is a full fence: of two ranks that publish at the same time, at
        # least one sees the other.
        with self._fence:
            pass
        if not self._missing():
            self._words[self._complete] = self._round
            _syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 2**31 - 1, None)
        else:
            began = time.perf_counter()
            if not (self._spins and self._spin(began + self._spin_seconds)):
                self._wait(deadline)
            self._spins = time.perf_counter() - began < self._spin_seconds

    def _missing(self) -> list[int]:
        """Returns the ranks that are not in this round yet. None can be more than one ahead."""
        words, current = self._words, self._round
        ranks = range(len(self._ranks))
        return [rank for rank in ranks if (words[rank * _LINE] - current) & _MASK > 1]

    def _spin(self, end: float) -> bool:
        words, complete, current = self._words, self._complete, self._round
        while words[complete] != current:
            if time.perf_counter() > end:
                return False
            os.sched_yield()
        return True

    def _wait(self, deadline: float) -> None:
        """Waits until the round is complete, with periodic checks for dead ranks and the
        deadline."""
        pause = _Timespec(0, int(_SLICE * 1e9))
        while (seen := self._words[self._complete]) != self._round:
            if _syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, seen, pause) == 0:
                continue
            missing = self._missing()
            if not missing:  # the last rank may have died before it set `complete`
                return
            self._check(missing, deadline)

    def _check(self, missing: list[int], deadline: float) -> None:
        dead = self._dead()
        if gone := [rank for rank in missing if rank in dead]:
            raise rank_lost(f"{self._names(gone)} is gone")
        if time.monotonic() > deadline:
            raise rank_lost(f"{self._names(missing)} did not arrive in time")

    def _dead(self) -> set[int]:
        """Returns the ranks whose pipe end is closed."""
        poll = select.poll()
        for fd in self._shared.living:
            poll.register(fd, 0)
        closed = {fd for fd, _ in poll.poll(0)}
        return {rank for rank, fd in enumerate(self._shared.living) if fd in closed}

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(f"rank {self._ranks[rank]}" for rank in ranks)

    def close(self) -> None:
        """Closes the descriptors, so that the other ranks see this one as dead. The memory is freed
        with its last view."""
        self._shared.close()


def make_segment(size: int) -> int:
    """Returns a descriptor of the memory of `size` ranks. Pages are mapped at the first write."""
    fd = os.memfd_create("pdserve-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, segment_bytes(size))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def segment_bytes(size: int) -> int:
    return _words_bytes(size) + 2 * size * SLOT_BYTES


def _words_bytes(size: int) -> int:
    """Returns the size of the words in whole pages, so that slots begin on a page."""
    return -(-4 * _LINE * (size + 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def share_segment(context: CommunicatorContext) -> Descriptors:
    """Exchanges the descriptors; every rank of `context` must call it, and rank 0 makes the
    segment. Descriptors are sent as SCM_RIGHTS (unix(7)) over a socket in the abstract namespace,
    which leaves no file.

    Raises:
        OSError, RuntimeError: the ranks did not connect within the context's timeout.
    """
    watched, own = os.pipe()
    shared = Descriptors(-1, [watched], own)
    try:
        if context.rank == 0:
            shared.segment = make_segment(context.size)
            shared.living += [-1] * (context.size - 1)
            _serve(context, shared)
        else:
            shared.segment, *living = _ask(context, watched)
            os.close(watched)
            shared.living = living
    except BaseException:
        shared.close()
        raise
    return shared


def _serve(context: CommunicatorContext, shared: Descriptors) -> None:
    """Receives a pipe from each other rank, then sends all descriptors to all of them."""
    name = f"pdserve-{secrets.token_hex(16)}"
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.settimeout(context.timeout)
        server.bind("\0" + name)
        server.listen(context.size)
        context.store.set(_KEY, name)
        peers: dict[int, socket.socket] = {}
        while len(peers) < context.size - 1:
            peer = stack.enter_context(closing(server.accept()[0]))
            if _uid(peer) == os.getuid():
                peer.settimeout(context.timeout)
                rank, shared.living[rank] = _take(peer)
                peers[rank] = peer
        for peer in peers.values():
            socket.send_fds(peer, [b"."], [shared.segment, *shared.living])


def _take(peer: socket.socket) -> tuple[int, int]:
    data, fds, _, _ = socket.recv_fds(peer, _RANK.size, 1, socket.MSG_CMSG_CLOEXEC)
    return _RANK.unpack(data)[0], fds[0]


def _ask(context: CommunicatorContext, watched: int) -> list[int]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(context.timeout)
        sock.connect("\0" + context.store.get(_KEY).decode())
        socket.send_fds(sock, [_RANK.pack(context.rank)], [watched])
        _, fds, _, _ = socket.recv_fds(sock, 1, context.size + 1, socket.MSG_CMSG_CLOEXEC)
    if len(fds) != context.size + 1:
        raise ConnectionError("rank 0 disconnected while the ranks were connecting")
    return fds


def _uid(peer: socket.socket) -> int:
    """Returns the peer's user id; sockets in the abstract namespace have no permissions."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
