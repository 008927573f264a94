"""The processes that prepare large bodies, so that the router's own neither stops nor swells."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from array import array
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from pdserve.common.core import errors
from pdserve.common.core.errors import Overloaded, PdserveError
from pdserve.router.fair_share import FairShare
from pdserve.router.http.prepare import KINDS, Prepared, parse
from pdserve.router.text_worker import LENGTH, Reply, Spec

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # bodies, whose bytes `router/http/bodies.py` bounds
MAX_CLIENT_WAITING = 192  # of one client
_TIMEOUT = 60.0  # seconds one body may take
_STOP_TIMEOUT = 2.0
_MAX_REPLY = 2**30  # bytes


class TextWorkers:
    """Starts its processes when they are needed, and a new one for each that ends."""

    def __init__(self, spec: Spec, size: int = 2) -> None:
        self._spec = msgspec.msgpack.encode(spec)
        self._free = FairShare(size)
        self._waiting: Counter[str] = Counter()  # bodies, by client
        self._idle: list[_Worker] = []
        self._work: set[asyncio.Task[Reply]] = set()

    async def prepare(self, kind: str, raw: bytes | bytearray, client: str = "") -> Prepared[Any]:
        """As `TextModel.prepare`, in another process; clients take turns.

        Raises:
            Overloaded: too many bodies wait.
            PdserveError: also when the process died of this body, or needs too long for it.
        """
        waiting, own = self._waiting.total(), self._waiting[client]
        if waiting >= MAX_WAITING or own >= MAX_CLIENT_WAITING:
            raise Overloaded(f"{waiting} large bodies are waiting already", retry_after=1.0)
        self._waiting[client] += 1
        try:
            await self._free.take(client)
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client]
        # A client that leaves does not end the work: starting a process anew costs more.
        work = asyncio.create_task(self._ask(kind, raw))
        self._work.add(work)
        work.add_done_callback(partial(self._done, client))
        reply = await asyncio.shield(work)
        if reply.error is not None:
            raise _error(**reply.error)
        prompts = [_ids(each) for each in reply.prompts]
        body = parse(KINDS[kind][0], reply.body)
        return Prepared(body, prompts, reply.texts, frozenset(reply.unknown))

    async def close(self) -> None:
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._idle))
        self._idle.clear()

    def _done(self, client: str, work: asyncio.Task[Reply]) -> None:
        self._work.discard(work)
        self._free.give_back(client)
        if not work.cancelled():
            work.exception()  # whoever asked may be gone

    async def _ask(self, kind: str, raw: bytes | bytearray) -> Reply:
        worker = self._idle.pop() if self._idle else await _Worker.start(self._spec)
        try:
            async with asyncio.timeout(_TIMEOUT):
                reply = await worker.ask(kind, raw)
        except (OSError, EOFError, msgspec.DecodeError) as error:  # TimeoutError is an OSError
            await worker.end()
            took_long = isinstance(error, TimeoutError)
            how = f"took more than {_TIMEOUT:.0f} s" if took_long else "ended a process"
            logger.error("preparing a body of %d bytes %s", len(raw), how)
            raise PdserveError(f"preparing the body {how}", code="PREPARATION_FAILED") from None
        except BaseException:
            await worker.end()
            raise
        if reply.last:
            await worker.end()
        else:
            self._idle.append(worker)
        return reply


class _Worker:
    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self._process = process
        self._connection = connection

    @classmethod
    async def start(cls, spec: bytes) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pdserve.router.text_worker", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                # The work of one body is one thread's: clients share the cores.
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                # Ctrl-C in a terminal is for the router, which ends its processes itself.
                start_new_session=True,
            )
        ours.setblocking(False)
        worker = cls(process, ours)
        await worker._send(spec)
        return worker

    async def ask(self, kind: str, raw: bytes | bytearray) -> Reply:
        await self._send(kind.encode())
        await self._send(raw)
        (length,) = LENGTH.unpack(await self._receive(LENGTH.size))
        if length > _MAX_REPLY:
            raise EOFError
        return msgspec.msgpack.decode(await self._receive(length), type=Reply)

    async def end(self) -> None:
        self._connection.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()

    async def _send(self, data: bytes | bytearray) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, LENGTH.pack(len(data)))
        await loop.sock_sendall(self._connection, data)

    async def _receive(self, length: int) -> bytearray:
        loop = asyncio.get_running_loop()
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = await loop.sock_recv_into(self._connection, view)
            if not count:
                raise EOFError
            view = view[count:]
        return data


def _ids(packed: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(packed)
    return ids


def _error(type: str, message: str, code: str, param: str | None) -> PdserveError:
    kind = getattr(errors, type, PdserveError)
    error: PdserveError = kind(message, code=code, param=param)
    return error
