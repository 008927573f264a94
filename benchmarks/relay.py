"""Relays before the servers of hosts, which can corrupt or cut connections.

Run as a program this is one process for all relays of a network; `Relays` is its handle. Linux root
only, as `benchmarks.hosts`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.hosts import go

CHUNK = 1 << 16  # bytes read at a time
SPOILT = 0.2  # share of corrupted chunks on a faulty edge
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close resets the connection
MODES = ("pass", "flip", "truncate")


class Relays:
    """The relays of a network, in their own process until `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def add(self, pid: int, listen: str, target: str, ports: Sequence[int]) -> None:
        """On the host of `pid`, relays connections to `listen` to the same ports of `target`."""
        self._ask("add", pid=pid, listen=listen, target=target, ports=[*ports])

    def set(self, source: str, listen: str, mode: str) -> None:
        """Sets how traffic of the host `source` passes: unchanged, sometimes with a flipped bit
        ("flip"), or with the connection closed within a message ("truncate")."""
        self._ask("set", source=source, listen=listen, mode=mode)

    def spoilt(self) -> int:
        """Returns the number of corrupted chunks."""
        count: int = self._ask("spoilt")
        return count

    def _ask(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps([what, arguments]).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


# ---- the process ----


class Relay:
    """The listening sockets, and the mode of each edge."""

    def __init__(self) -> None:
        self._modes: dict[tuple[str, str], str] = {}  # (source, listening address) → mode
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = random.Random(0)
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._spoilt = 0

    async def add(self, pid: int, listen: str, target: str, ports: Sequence[int]) -> None:
        for port in ports:
            with self._at(pid):
                server = socket.create_server((listen, port), backlog=256)
            server.setblocking(False)
            self._spawn(self._serve(server, pid, listen, (target, port)))

    async def set(self, source: str, listen: str, mode: str) -> None:
        assert mode in MODES
        self._modes[source, listen] = mode

    async def spoilt(self) -> int:
        return self._spoilt

    @contextmanager
    def _at(self, pid: int) -> Iterator[None]:
        """Moves this thread to a host to create a socket, which stays on that host."""
        host = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            go(host)
            yield
        finally:
            go(self._home)
            os.close(host)

    async def _serve(
        self, server: socket.socket, pid: int, listen: str, target: tuple[str, int]
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            inner, (source, _) = await loop.sock_accept(server)
            with self._at(pid):
                outer = socket.socket()
            self._spawn(self._carry(inner, outer, target, (source, listen)))

    async def _carry(
        self,
        inner: socket.socket,
        outer: socket.socket,
        target: tuple[str, int],
        edge: tuple[str, str],
    ) -> None:
        """Relays one connection in both directions until one side closes it, then closes both."""
        loop = asyncio.get_running_loop()
        for each in (inner, outer):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with inner, outer, suppress(OSError):
            await loop.sock_connect(outer, target)
            ways = [
                self._spawn(self._pump(*pair, edge)) for pair in ((inner, outer), (outer, inner))
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)

    async def _pump(
        self, source: socket.socket, target: socket.socket, edge: tuple[str, str]
    ) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await loop.sock_recv(source, CHUNK):
                mode = self._modes.get(edge, "pass")
                if mode != "pass" and self._random.random() < SPOILT:
                    self._spoilt += 1
                    if mode == "truncate":
                        await loop.sock_sendall(target, data[: self._random.randrange(len(data))])
                        for each in (source, target):
                            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                        return
                    data = self._flip(data)
                await loop.sock_sendall(target, data)

    def _flip(self, data: bytes) -> bytes:
        spoilt = bytearray(data)
        spoilt[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(spoilt)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def main() -> None:
    relay = Relay()
    answers = {"add": relay.add, "set": relay.set, "spoilt": relay.spoilt}
    while line := await asyncio.to_thread(sys.stdin.readline):
        what, arguments = json.loads(line)
        print(json.dumps(await answers[what](**arguments)), flush=True)  # type: ignore[operator]


if __name__ == "__main__":
    asyncio.run(main())
