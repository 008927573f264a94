"""The processes that preprocess large bodies (`preprocess_worker`): the router's end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from pdserve.common.core import errors
from pdserve.common.core.errors import PdserveError, Unavailable
from pdserve.common.core.structured import StructuredOutput
from pdserve.router.fair_share import Turns
from pdserve.router.grammar_compiler import Compiled
from pdserve.router.http.preprocess import KINDS, Preprocessed, parse
from pdserve.router.preprocess_worker import GRAMMAR, LENGTH, Ask, Head, Reply, Spec

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # bodies, whose bytes `router/http/request.py` bounds
MAX_CLIENT_WAITING = 192  # of one client
_TIMEOUT = 60.0  # seconds one body may take
_STOP_TIMEOUT = 2.0
_MAX_FRAME = 2**30  # bytes of a reply
PIECE = 64 * 1024  # bytes that a piece of a body has at least, but for the last

_heads = msgspec.msgpack.Decoder(Head)


class Pieces:
    """A body as it comes, in pieces, each of which is freed when it is passed on. A block of a
    large body's size would be moved when it grows, all of it at once, and leave a hole as large."""

    def __init__(self, whole: bytes = b"") -> None:
        self._pieces: deque[bytearray] = deque()
        self._size = 0
        self.add(whole)

    def __len__(self) -> int:
        """Bytes."""
        return self._size

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._pieces and len(self._pieces[-1]) < PIECE:
            self._pieces[-1] += data
        else:
            self._pieces.append(bytearray(data))

    def whole(self) -> bytes:
        return b"".join(self._pieces)

    def take(self) -> Iterator[bytearray]:
        """All of them, once."""
        while self._pieces:
            yield self._pieces.popleft()


class PreprocessWorkers:
    """Starts its processes when they are needed, and a new one for each that ends."""

    def __init__(self, spec: Spec, size: int = 2) -> None:
        self._spec = msgspec.msgpack.encode(spec)
        self._turns = Turns(size, MAX_WAITING, MAX_CLIENT_WAITING)
        self._idle: list[_Worker] = []

    async def preprocess(
        self, kind: str, raw: Pieces, client: str = "", adapters: frozenset[str] = frozenset()
    ) -> Preprocessed[Any]:
        """As `Preprocessor.preprocess`, in another process; clients take turns. `raw` is used up.

        Raises:
            Overloaded: too many bodies wait.
            PdserveError: also when the process died of this body, or needs too long for it.
        """
        reply = await self._ask_in_turn(Ask(kind, adapters), raw, client)
        body, unknown = parse(KINDS[kind][0], reply.body), frozenset(reply.unknown)
        return Preprocessed(
            body, reply.prompts, reply.texts, reply.structured, reply.answer, unknown
        )

    async def compile(self, structured: StructuredOutput, client: str = "") -> Compiled:
        """As `compile_apart`, in another process; raises as `preprocess`."""
        raw = Pieces(msgspec.msgpack.encode(structured))
        reply = await self._ask_in_turn(Ask(GRAMMAR), raw, client)
        assert reply.compiled is not None
        return reply.compiled

    async def close(self) -> None:
        await self._turns.close()
        await asyncio.gather(*(worker.end() for worker in self._idle))
        self._idle.clear()

    async def _ask_in_turn(self, ask: Ask, raw: Pieces, client: str) -> Reply:
        # A client that leaves does not end the work: starting a process anew costs more.
        reply = await self._turns.run(client, partial(self._ask, ask, raw))
        if reply.error is not None:
            raise _error(**reply.error)
        return reply

    async def _worker(self) -> _Worker:
        """One that lives: an idle one may have been killed, as by a host without memory."""
        while self._idle:
            if (worker := self._idle.pop()).alive:
                return worker
            await worker.end()
        return await _Worker.start(self._spec)

    async def _ask(self, ask: Ask, raw: Pieces) -> Reply:
        worker = await self._worker()
        try:
            async with asyncio.timeout(_TIMEOUT):
                reply = await worker.ask(ask, raw)
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
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, spec: bytes) -> _Worker:
        """Raises Unavailable: the host has no room for a process."""
        try:
            with ExitStack() as opened:
                ours, theirs = map(opened.enter_context, socket.socketpair())
                process = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        "-m",
                        "pdserve.router.preprocess_worker",
                        str(theirs.fileno()),
                    ),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    # The work of one body is one thread's: clients share the cores.
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                    # Ctrl-C in a terminal is for the router, which ends its processes itself.
                    start_new_session=True,
                )
                reader, writer = await asyncio.open_connection(sock=ours.dup())
        except OSError as error:
            logger.error("cannot start a process for large bodies: %s", error.strerror)
            raise Unavailable(
                f"no process can prepare the body: {error.strerror}",
                code="PREPARATION_FAILED",
                retry_after=2.0,
            ) from None
        writer.write(LENGTH.pack(len(spec)) + spec)  # if it is gone already, who asks it will see
        return cls(process, reader, writer)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._reader.at_eof()

    async def ask(self, ask: Ask, raw: Pieces) -> Reply:
        await self._send(Pieces(msgspec.msgpack.encode(ask)))
        await self._send(raw)
        head = _heads.decode(await self._receive())
        prompts = [_ids(await self._receive()) for _ in range(head.num_prompts)]
        texts = [(await self._receive()).decode() for _ in range(head.num_texts)]
        return replace(head.reply, prompts=tuple(prompts), texts=tuple(texts))

    async def end(self) -> None:
        self._writer.transport.abort()
        with suppress(ProcessLookupError):
            self._process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()

    async def _send(self, data: Pieces) -> None:
        self._writer.write(LENGTH.pack(len(data)))
        for piece in data.take():
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0)  # a worker that reads as fast makes no pause

    async def _receive(self) -> bytes:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > _MAX_FRAME:
            raise EOFError
        return await self._reader.readexactly(length)


def _ids(packed: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(packed)
    return ids


def _error(type: str, message: str, code: str, param: str | None) -> PdserveError:
    kind = getattr(errors, type, PdserveError)
    error: PdserveError = kind(message, code=code, param=param)
    return error
