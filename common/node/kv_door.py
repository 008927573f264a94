"""The ports of KV events: few connections, and little from each.

ZeroMQ keeps what its peers send, subscriptions above all, and takes as many connections as the
process may open files. So its sockets are bound where only this process reaches them, and a door
relays the bytes of the connections that it lets in:

    subscriber ──TCP or unix──▶ KVEventsDoor ──unix──▶ ZeroMQ socket

A connection that sends too much, or reads too slowly, is closed; ZeroMQ's clients connect anew.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import re
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import zmq

from pdserve.common.core.throttle import LogThrottle

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32  # of one endpoint
MAX_OF_ADDRESS = 16  # of these, from one host
MAX_SENT = 2**14  # bytes from one connection: greeting, subscriptions, heartbeats, requests
UNREAD_TIMEOUT = 10.0  # seconds until a connection that takes nothing is closed
MAX_BEHIND = 2**26  # bytes that a connection may be behind
_CHUNK = 2**16
PERIOD = 1.0  # seconds between two looks at slow connections
_TCP = re.compile(r"tcp://(?P<host>.+):(?P<port>\d+)")
_HOSTS = {"*": "0.0.0.0", "lo": "127.0.0.1"}
_numbers = itertools.count()


class KVEventsDoor:
    """Lets clients of one endpoint reach a ZeroMQ socket."""

    def __init__(self, endpoint: str, inner: zmq.Socket[Any]) -> None:
        """Opens the endpoint, and binds `inner` for `serve`.

        Raises:
            OSError, zmq.ZMQError: the endpoint cannot be used.
        """
        self._socket = _listen(endpoint)
        try:
            self._inner = f"pdserve-kv-{os.getpid()}-{next(_numbers)}"
            inner.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
            inner.bind(f"ipc://@{self._inner}")
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._endpoint = endpoint
        self._open: set[_Connection] = set()
        self._log = LogThrottle(logger)
        self.published = 0  # bytes of all messages for subscribers, if the publisher counts them

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    async def serve(self) -> None:
        """Relays until cancelled."""
        start = asyncio.start_unix_server if _is_unix(self._socket) else asyncio.start_server
        server = await start(self._let_in, sock=self._socket, limit=_CHUNK)
        try:
            while True:
                await asyncio.sleep(PERIOD)
                for each in list(self._open):
                    if why := each.too_slow(self.published):
                        self._log.warning("a client of %s is closed: %s", self._endpoint, why)
                        each.close()
        finally:
            server.close()
            for each in list(self._open):
                each.close()
            while self._open:  # until their tasks have ended
                await asyncio.sleep(0)

    def close(self) -> None:
        with suppress(OSError):
            name = self._socket.getsockname()
            if _is_unix(self._socket):
                Path(name).unlink(missing_ok=True)
        self._socket.close()

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = (writer.get_extra_info("peername") or ("",))[0]
        of_address = Counter(each.address for each in self._open)[address]
        if len(self._open) >= MAX_CONNECTIONS or of_address >= MAX_OF_ADDRESS:
            self._log.warning("%s has too many clients; another one is refused", self._endpoint)
            writer.transport.abort()
            return
        connection = _Connection(address, writer, self.published)
        self._open.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                inner = await asyncio.open_unix_connection(f"\0{self._inner}", limit=_CHUNK)
                connection.inner = inner[1]
                group.create_task(self._take(connection, reader))
                group.create_task(connection.give(inner[0]))
        except* OSError:
            pass  # one side is gone
        finally:
            connection.close()
            self._open.discard(connection)

    async def _take(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        sent = 0
        while data := await reader.read(_CHUNK):
            sent += len(data)
            if sent > MAX_SENT:
                self._log.warning(
                    "a client of %s is closed: it sent more than %d bytes", self._endpoint, MAX_SENT
                )
                break
            assert connection.inner is not None
            connection.inner.write(data)
        connection.close()


class _Connection:
    def __init__(self, address: str, outer: asyncio.StreamWriter, published: int) -> None:
        self.address = address
        self.inner: asyncio.StreamWriter | None = None
        self._outer = outer
        self._begun = published
        self._given = 0
        self._waits_since: float | None = None  # for the client to read

    async def give(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            self._outer.write(data)
            self._given += len(data)
            self._waits_since = monotonic()
            await self._outer.drain()
            self._waits_since = None
        self.close()

    def too_slow(self, published: int) -> str:
        """Returns why the client must go; empty if it may stay."""
        if self._waits_since is not None:
            if monotonic() - self._waits_since > UNREAD_TIMEOUT:
                return f"it has read nothing for {UNREAD_TIMEOUT:.0f} s"
            if (behind := published - self._begun - self._given) > MAX_BEHIND:
                return f"it is {behind} bytes behind"
        return ""

    def close(self) -> None:
        for each in (self._outer, self.inner):
            if each is not None:
                each.transport.abort()


def _is_unix(listening: socket.socket) -> bool:
    return listening.family == socket.AF_UNIX


def _listen(endpoint: str) -> socket.socket:
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        listening = socket.socket(socket.AF_UNIX)
        try:
            _remove_stale(path)
            listening.bind(path)
            listening.listen()
        except OSError:
            listening.close()
            raise
        return listening
    found = _TCP.fullmatch(endpoint)
    assert found is not None, "the option has been checked"
    host = _HOSTS.get(found["host"], found["host"].strip("[]"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(found["port"])), family=family)


def _remove_stale(path: str) -> None:
    """Removes the socket of a process that has ended, as ZeroMQ does.

    Raises:
        OSError: a process listens there.
    """
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as other:
        try:
            other.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
