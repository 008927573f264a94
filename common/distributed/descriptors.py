"""Hands the descriptors that a group on one host shares to all its ranks: one memory file, and
of each rank the read end of a pipe that only it holds open.

They travel as SCM_RIGHTS (unix(7)) over a socket in the abstract namespace, which leaves no file.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass

from pdserve.common.distributed.communicator import CommunicatorContext

_KEY = "descriptors"
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


@dataclass(slots=True)
class Descriptors:
    segment: int
    living: list[int]  # by rank; readable (at their end) once that rank is gone
    own: int  # this rank's write end

    @property
    def closed(self) -> bool:
        return self.own < 0

    def close(self) -> None:
        """May be called again."""
        fds = [fd for fd in (self.own, self.segment, *self.living) if fd >= 0]
        self.own, self.segment, self.living = -1, -1, []
        for fd in fds:
            os.close(fd)


def share(context: CommunicatorContext, make_segment: Callable[[], int]) -> Descriptors:
    """Every rank of `context` calls this; rank 0 makes the segment.

    Raises:
        OSError, RuntimeError: the ranks did not meet within the context's timeout.
    """
    watched, own = os.pipe()
    shared = Descriptors(-1, [watched], own)
    try:
        if context.rank == 0:
            shared.segment = make_segment()
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
    """Takes a pipe from each other rank, then sends everything to all of them."""
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
        raise ConnectionError("rank 0 went away while the ranks met")
    return fds


def _uid(peer: socket.socket) -> int:
    """Sockets in the abstract namespace have no permissions of their own."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
