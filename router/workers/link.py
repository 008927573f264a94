"""Calls in both directions between two processes, over one socket.

A frame is its length (4 bytes) and a `Frame` in msgpack. The answer to a call has its number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable

import msgspec

logger = logging.getLogger(__name__)

Answer = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a call: (what, argument)."""

TIMEOUT = 2.0  # seconds for an answer
_LENGTH_NBYTES = 4


class Frame(msgspec.Struct, array_like=True):
    number: int  # of the call
    what: str  # empty: this is the answer
    body: bytes
    failed: bool = False


_frames = msgspec.msgpack.Decoder(Frame)


class Link:
    """One end of a connection. The other end is a process of ours, so its messages are trusted."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, end: socket.socket) -> asyncio.Task[None]:
        """Takes the socket, which becomes its own. The task ends with the other end."""
        reader, self._writer = await asyncio.open_connection(sock=end)
        self._reading = asyncio.create_task(self._read(reader))
        return self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(_LENGTH_NBYTES))
                self._take(_frames.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._close()

    async def call(self, what: str, argument: bytes = b"", timeout: float = TIMEOUT) -> bytes:
        """Returns the other end's answer.

        Raises:
            ConnectionError: the other end is gone, or has failed to answer.
            TimeoutError: it is late.
        """
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Frame(number, what, argument))
            async with asyncio.timeout(timeout):
                return await answer
        finally:
            self._waiting.pop(number, None)

    def _take(self, frame: Frame) -> None:
        if frame.what:
            task = asyncio.create_task(self._reply(frame))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif (answer := self._waiting.get(frame.number)) is None or answer.done():
            return  # it came too late
        elif frame.failed:
            answer.set_exception(ConnectionError("the other process failed to answer"))
        else:
            answer.set_result(frame.body)

    async def _reply(self, call: Frame) -> None:
        try:
            reply = Frame(call.number, "", await self._answer(call.what, call.body))
        except Exception:
            logger.exception("a call of %s between workers", call.what)
            reply = Frame(call.number, "", b"", failed=True)
        try:
            self._send(reply)
        except ConnectionError:
            logger.debug("the answer to %s comes too late", call.what)

    def _send(self, frame: Frame) -> None:
        if self._writer is None or self._writer.is_closing():
            raise ConnectionError("the other process is gone")
        data = msgspec.msgpack.encode(frame)
        self._writer.write(len(data).to_bytes(_LENGTH_NBYTES) + data)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for task in self._answering:
            task.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the other process is gone"))
