"""Processes that preprocess large bodies, so that the router's own neither stops nor swells.

    router ── spec ──▶ worker               once: the model's options
           ── kind, raw body ──▶            preprocesses it
           ◀── what it asks, as token ids, or a typed error ──
           ── "grammar", a constraint ──▶   compiles it in a child
           ◀── grammar, or an error ──

Frames are eight bytes of length and as many bytes. A worker (`python -m
pdserve.router.preprocess_workers FD`) ends with its router, or when a body has cost it much memory,
which only the end of a process gives back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
import sys
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common.config.node import ModelConfig
from pdserve.common.config.router import ChatConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core import errors
from pdserve.common.core.errors import InvalidRequest, Overloaded, PdserveError
from pdserve.common.core.structured import StructuredOutput
from pdserve.common.obs.logging import setup_logging
from pdserve.router.fair_share import FairShare
from pdserve.router.grammar_compiler import Compiled, compile_apart
from pdserve.router.http.preprocess import KINDS, Preprocessed, Preprocessor, parse
from pdserve.router.http.tools import AnswerPlan
from pdserve.router.served_model import load_served_model

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("!Q")
# Of the router:
MAX_WAITING = 256  # bodies, whose bytes `router/http/request.py` bounds
MAX_CLIENT_WAITING = 192  # of one client
_TIMEOUT = 60.0  # seconds one body may take
_STOP_TIMEOUT = 2.0
_MAX_REPLY = 2**30  # bytes
# Of a worker:
MAX_MEMORY = 2 * 2**30  # bytes of data; a body that needs more kills this process only
KEEP_MEMORY = 512 * 2**20  # bytes at its peak, above which the process ends after its answer
MAX_FIELDS = 64 * 1024  # bytes of JSON that are neither prompt, nor messages, nor template
_GRAMMAR = "grammar"  # what is asked beside the kinds of bodies
_CONSUMED = {
    "prompt", "messages", "input", "instructions", "system", "tokens",
    "chat_template", "chat_template_kwargs", "documents", "tools", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern",
}  # fmt: skip
_PLACEHOLDERS: dict[str, dict[str, Any]] = {
    "completion": {"prompt": ""},
    "chat": {"messages": []},
    "responses": {"input": ""},
    "messages": {"messages": []},
    "detokenize": {"tokens": []},
}


@dataclass(frozen=True, slots=True)
class Spec:
    model: dict[str, Any]  # fields of ModelConfig
    log: dict[str, Any]  # of LogConfig
    chat: dict[str, Any]  # of ChatConfig


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer or an error; `last`: ask another process next time."""

    last: bool = False
    body: bytes = b""  # JSON, without what has become token ids or text
    prompts: tuple[bytes, ...] = ()  # arrays of 32 bits
    texts: tuple[str, ...] = ()
    structured: StructuredOutput | None = None
    answer: AnswerPlan = field(default_factory=AnswerPlan)
    unknown: tuple[str, ...] = ()
    compiled: Compiled | None = None
    error: dict[str, Any] | None = None  # the class's name and the arguments of a PdserveError


# ---- the router ---------------------------------------------------------------------------------


class PreprocessWorkers:
    """Starts its processes when they are needed, and a new one for each that ends."""

    def __init__(self, spec: Spec, size: int = 2) -> None:
        self._spec = msgspec.msgpack.encode(spec)
        self._free = FairShare(size)
        self._idle: list[_Worker] = []
        self._work: set[asyncio.Task[Reply]] = set()

    async def preprocess(
        self, kind: str, raw: bytes | bytearray, client: str = ""
    ) -> Preprocessed[Any]:
        """As `Preprocessor.preprocess`, in another process; clients take turns.

        Raises:
            Overloaded: too many bodies wait.
            PdserveError: also when the process died of this body, or needs too long for it.
        """
        reply = await self._ask_in_turn(kind, raw, client)
        prompts = [_ids(each) for each in reply.prompts]
        body = parse(KINDS[kind][0], reply.body)
        return Preprocessed(
            body, prompts, reply.texts, reply.structured, reply.answer, frozenset(reply.unknown)
        )

    async def compile(self, structured: StructuredOutput, client: str = "") -> Compiled:
        """As `compile_apart`, in another process; raises as `preprocess`."""
        raw = msgspec.msgpack.encode(structured)
        reply = await self._ask_in_turn(_GRAMMAR, raw, client)
        assert reply.compiled is not None
        return reply.compiled

    async def _ask_in_turn(self, kind: str, raw: bytes | bytearray, client: str) -> Reply:
        waiting, own = self._free.waiting, self._free.waiting_of(client)
        if waiting >= MAX_WAITING or own >= MAX_CLIENT_WAITING:
            raise Overloaded(f"{waiting} large bodies are waiting already", retry_after=1.0)
        await self._free.acquire(client)
        # A client that leaves does not end the work: starting a process anew costs more.
        work = asyncio.create_task(self._ask(kind, raw))
        self._work.add(work)
        work.add_done_callback(partial(self._done, client))
        reply = await asyncio.shield(work)
        if reply.error is not None:
            raise _error(**reply.error)
        return reply

    async def close(self) -> None:
        for task in list(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._idle))
        self._idle.clear()

    def _done(self, client: str, work: asyncio.Task[Reply]) -> None:
        self._work.discard(work)
        self._free.release(client)
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
                *(sys.executable, "-m", "pdserve.router.preprocess_workers", str(theirs.fileno())),
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


# ---- a worker -----------------------------------------------------------------------------------


def main(fd: int) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    connection = socket.socket(fileno=fd)
    frames = connection.makefile("rb")
    spec = msgspec.msgpack.decode(_receive(frames), type=Spec)
    setup_logging("router/text", LogConfig(**spec.log))
    model = load_served_model(ModelConfig(**spec.model))
    preprocessor = Preprocessor(model, ChatConfig(**spec.chat))
    try:
        while True:
            kind = _receive(frames).decode()
            reply = answer(preprocessor, kind, _receive(frames))
            frame = msgspec.msgpack.encode(reply)
            connection.sendall(LENGTH.pack(len(frame)))
            connection.sendall(frame)
            if reply.last:
                return 0
    except (EOFError, ConnectionError):
        return 0  # the router is gone


def answer(preprocessor: Preprocessor, kind: str, raw: bytes | bytearray) -> Reply:
    try:
        if kind == _GRAMMAR:
            structured = msgspec.msgpack.decode(raw, type=StructuredOutput)
            return Reply(compiled=compile_apart(structured, preprocessor.model))
        preprocessed = preprocessor.preprocess(kind, raw)
        return Reply(
            last=_peak_memory() > KEEP_MEMORY,
            body=_fields(kind, preprocessed),
            prompts=tuple(array("I", ids).tobytes() for ids in preprocessed.prompts),
            texts=tuple(preprocessed.texts),
            structured=preprocessed.structured,
            answer=preprocessed.answer,
            unknown=tuple(name[:64] for name in sorted(preprocessed.unknown)[:100]),
        )
    except PdserveError as error:
        fields = {name: getattr(error, name) for name in ("message", "code", "param")}
        return Reply(
            last=_peak_memory() > KEEP_MEMORY, error={"type": type(error).__name__, **fields}
        )
    except MemoryError:
        message = "preparing the body takes too much memory"
        fields = {"message": message, "code": "REQUEST_TOO_LARGE", "param": None}
        return Reply(last=True, error={"type": "RequestTooLarge", **fields})


def _fields(kind: str, preprocessed: Preprocessed[Any]) -> bytes:
    """The body's other fields; those no schema has are left out."""
    known = set(type(preprocessed.body).model_fields) - _CONSUMED
    rest = preprocessed.body.model_dump(mode="json", include=known, exclude_none=True)
    fields = msgspec.json.encode({**rest, **_PLACEHOLDERS.get(kind, {})})
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the parameters take more than {MAX_FIELDS} bytes")
    return fields


def _peak_memory() -> int:
    """Of this process alone: `ru_maxrss` begins at that of the one which started it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _receive(frames: BufferedIOBase) -> bytes:
    header = frames.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(header)
    data = frames.read(length)
    if len(data) < length:
        raise EOFError
    return data


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
