"""The router's pool of processes that preprocess large bodies (`preprocess_worker`).

If a process dies, its body gets a second try in a fresh one; a body that ends two processes is
refused. A process that a signal has stopped counts as dead after a few seconds.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from pdserve.common.core import errors
from pdserve.common.core.errors import PdserveError, Unavailable
from pdserve.common.core.structured import StructuredOutput
from pdserve.common.obs.logging import request_id_var
from pdserve.router.api.fork_server import LENGTH, Fork, ForkServer, is_stopped, unless_stopped
from pdserve.router.api.grammar_compiler import Compiled
from pdserve.router.api.preprocess import KINDS, BodyBuffer, Preprocessed, parse
from pdserve.router.api.preprocess_worker import GRAMMAR, Ask, Head, Reply, Spec
from pdserve.router.requests.fair_share import FairExecutor

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # bodies, whose bytes `router/http/request.py` bounds
_MODULE = "pdserve.router.api.preprocess_worker"
_TIMEOUT = 60.0  # seconds one body may take
_RESTART_PAUSE = 0.5  # seconds; a host without memory would kill the next one, too
_MAX_FRAME = 2**30  # bytes

_heads = msgspec.msgpack.Decoder(Head)


@dataclass(frozen=True, slots=True)
class ReceivedReply:
    """A reply with the frames that follow it."""

    reply: Reply
    prompts: tuple[array[int], ...]
    texts: tuple[str, ...]
    resume: str


class DiedError(Exception):
    """A process ended, or was stopped, before its reply."""


class PreprocessWorkers:
    """Starts processes when they are needed; clients take turns."""

    def __init__(self, spec: Spec, size: int = 2) -> None:
        self._spec = msgspec.msgpack.encode(spec)
        self._turns = FairExecutor(size, MAX_WAITING)
        # Costly templates never occupy all processes.
        self._costly = FairExecutor(max(1, size - 1), MAX_WAITING)
        self._idle: list[_Worker] = []
        self._server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def preprocess(
        self,
        kind: str,
        raw: BodyBuffer,
        client: str = "",
        adapters: frozenset[str] = frozenset(),
        costly: bool = False,
        window: int | None = None,
    ) -> Preprocessed[Any]:
        """Calls `Preprocessor.preprocess` in another process; `raw` is used up. `costly`: the
        template may take any time. `window`: as `ServedModel.within`.

        Raises:
            Overloaded: too many bodies wait.
            PdserveError: as `Preprocessor.preprocess`, or two processes died of this body, or it
                takes too long.
        """
        ask = Ask(kind, adapters, request_id_var.get(), costly, window)
        answer = await self._ask_in_turn(ask, raw, client)
        reply = answer.reply
        body = parse(KINDS[kind][0], reply.body)
        return Preprocessed(
            *(body, answer.prompts, answer.texts, reply.structured, reply.answer, reply.ignored),
            resume=answer.resume,
        )

    async def compile(self, structured: StructuredOutput, client: str = "") -> Compiled:
        """Calls `compile_apart` in another process; raises as `preprocess`."""
        raw = BodyBuffer(msgspec.msgpack.encode(structured))
        ask = Ask(GRAMMAR, request_id=request_id_var.get())
        compiled = (await self._ask_in_turn(ask, raw, client)).reply.compiled
        assert compiled is not None
        return compiled

    async def close(self) -> None:
        await self._costly.close()
        await self._turns.close()
        await asyncio.gather(*(worker.end() for worker in self._idle))
        self._idle.clear()
        if self._keeping is not None:
            self._keeping.cancel()
        if self._server is not None:
            await self._server.end()

    async def _ask_in_turn(self, ask: Ask, raw: BodyBuffer, client: str) -> ReceivedReply:
        # The work continues when its client leaves; it is short.
        work = partial(self._turns.run, client, partial(self._ask, ask, raw))
        answer = await (self._costly.run(client, work) if ask.costly else work())
        if answer.reply.costly:
            return await self._ask_in_turn(replace(ask, costly=True), raw, client)
        if answer.reply.error is not None:
            raise _error(**answer.reply.error)
        return answer

    async def _ask(self, ask: Ask, raw: BodyBuffer) -> ReceivedReply:
        keep = False
        try:
            answer = await self._ask_twice(ask, raw)
            keep = answer.reply.costly  # the body is sent again
            return answer
        finally:
            if not keep:
                raw.clear()

    async def _ask_twice(self, ask: Ask, raw: BodyBuffer) -> ReceivedReply:
        how = "ended a process, and another one when it was tried again"
        try:
            async with asyncio.timeout(_TIMEOUT):
                with suppress(DiedError):
                    return await self._try(ask, raw, await self._worker())
                with suppress(DiedError):
                    return await self._try(ask, raw, await self._fresh())
        except TimeoutError:
            how = f"took more than {_TIMEOUT:.0f} s"
        logger.error("preparing a body of %d bytes %s", len(raw), how)
        raise PdserveError(f"preparing the body {how}", code="PREPARATION_FAILED")

    async def _try(self, ask: Ask, raw: BodyBuffer, worker: _Worker) -> ReceivedReply:
        try:
            answer = await unless_stopped(worker.pid, worker.ask(ask, raw))
        except (OSError, EOFError, msgspec.DecodeError) as error:
            logger.warning("a process that prepares bodies died: %s", error)
            await worker.end()
            raise DiedError from error
        except BaseException:
            await worker.end()
            raise
        if answer.reply.last:
            await worker.end()
        else:
            self._idle.append(worker)
        return answer

    async def _worker(self) -> _Worker:
        """Returns an idle worker that is alive, or a fresh one: the host may have killed an idle
        one."""
        while self._idle:
            if (worker := self._idle.pop()).alive and not is_stopped(worker.pid):
                return worker
            await worker.end()
        return await self._fresh()

    async def _fresh(self) -> _Worker:
        """Raises Unavailable: the host has no room for a process."""
        with suppress(OSError):  # the fork server is gone or stopped
            return _Worker(await (await self._fork_server()).fork())
        try:
            return _Worker(await (await self._fork_server()).fork())
        except OSError as error:
            raise _no_process(error) from None

    async def _fork_server(self) -> ForkServer:
        async with self._starting:
            if self._server is None or not self._server.alive:
                if self._server is not None:
                    await self._server.end()
                self._server = await ForkServer.start(_MODULE, self._spec)
                self._keeping = asyncio.create_task(self._keep(self._server))
            return self._server

    async def _keep(self, server: ForkServer) -> None:
        """Replaces the fork server when it ends, so that no body has to wait for that."""
        await server.ended()
        await asyncio.sleep(_RESTART_PAUSE)
        with suppress(OSError):  # the next body meets the same error
            await self._fork_server()


class _Worker:
    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self.pid = fork.pid
        self.end = fork.end

    @property
    def alive(self) -> bool:
        return self._fork.alive

    async def ask(self, ask: Ask, raw: BodyBuffer) -> ReceivedReply:
        await self._send(BodyBuffer(msgspec.msgpack.encode(ask)))
        await self._send(raw)
        head = _heads.decode(await self._receive())
        prompts = [_ids(await self._receive()) for _ in range(head.num_prompts)]
        texts = [(await self._receive()).decode() for _ in range(head.num_texts)]
        resume = (await self._receive()).decode()
        return ReceivedReply(head.reply, tuple(prompts), tuple(texts), resume)

    async def _send(self, data: BodyBuffer) -> None:
        writer = self._fork.writer
        writer.write(LENGTH.pack(len(data)))
        for piece in data:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # `drain` does not pause if the worker reads as fast

    async def _receive(self) -> bytes:
        reader = self._fork.reader
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > _MAX_FRAME:
            raise EOFError
        return await reader.readexactly(length)


def _ids(packed: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(packed)
    return ids


def _no_process(error: OSError) -> Unavailable:
    logger.error("cannot start a process for large bodies: %s", error.strerror)
    message = f"no process can prepare the body: {error.strerror}"
    return Unavailable(message, code="PREPARATION_FAILED", retry_after=2.0)


def _error(type: str, message: str, code: str, param: str | None) -> PdserveError:
    kind = getattr(errors, type, PdserveError)
    error: PdserveError = kind(message, code=code, param=param)
    return error
