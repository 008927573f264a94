"""A process that preprocesses large bodies, so that the router's own neither blocks nor grows.

    router ── Ask, raw body ──▶ worker             preprocesses it
           ◀── Head: the reply, or a typed error ──
           ◀── the token ids of each prompt, then each text, then `resume` ──
           ── Ask of GRAMMAR, a constraint ──▶     compiles it in a child
           ◀── Head: the grammar, or an error ──

A frame is eight bytes of length and as many bytes. Every body gets a reply, however wrong it is.
`fork_server` forks workers; they end with the router. The router ends a worker when a body has
cost it much memory, because only the end of a process gives that back.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common.config.engine import ModelConfig
from pdserve.common.config.router import ChatConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import InvalidRequest, PdserveError, is_defect
from pdserve.common.core.structured import StructuredOutput
from pdserve.common.obs.logging import request_id_var, setup_logging
from pdserve.common.obs.process import dump_stacks_on_signal
from pdserve.router.api.conversation import CostlyTemplate, Templates
from pdserve.router.api.fork_server import LENGTH, serve
from pdserve.router.api.grammar_compiler import Compiled, compile_apart
from pdserve.router.api.preprocess import CONSUMED_FIELDS, Preprocessed, Preprocessor, failed
from pdserve.router.api.tools import AnswerPlan
from pdserve.router.cluster.served_model import load_served_model

GRAMMAR = "grammar"  # asks for a compiled constraint
MAX_MEMORY = 2 * 2**30  # bytes of data; a body that needs more ends this process only
NICENESS = 5  # so that small requests, and nodes on this host, do not wait for a large body
KEEP_MEMORY = 512 * 2**20  # bytes at the peak, above which the process ends after its reply
MAX_FIELDS = 64 * 1024  # bytes of JSON beside prompt, messages and template
_PLACEHOLDERS: dict[str, dict[str, Any]] = {
    "completion": {"prompt": ""},
    "chat": {"messages": []},
    "responses": {"input": ""},
    "messages": {"messages": []},
    "detokenize": {"tokens": []},
}


@dataclass(frozen=True, slots=True)
class Spec:
    """The fields of three configurations."""

    model: dict[str, Any]  # ModelConfig
    log: dict[str, Any]  # LogConfig
    chat: dict[str, Any]  # ChatConfig


@dataclass(frozen=True, slots=True)
class Ask:
    """The frame before a body."""

    kind: str
    adapters: frozenset[str] = frozenset()  # names that are models now
    request_id: str | None = None  # for the log
    costly: bool = False  # render the template in a child with bounds
    window: int | None = None  # tokens of context that the nodes hold; None: the model's


@dataclass(frozen=True, slots=True)
class Reply:
    """The preprocessed body, or an error."""

    last: bool = False  # ask another process next time
    costly: bool = False  # ask again with `Ask.costly`
    body: bytes = b""  # JSON, without the fields that have become token ids or text
    # These are frames of their own: arrays of 32 bits, and UTF-8.
    prompts: tuple[bytes, ...] = ()
    texts: tuple[bytes, ...] = ()
    resume: bytes = b""
    structured: StructuredOutput | None = None
    answer: AnswerPlan = field(default_factory=AnswerPlan)
    ignored: tuple[str, ...] = ()
    compiled: Compiled | None = None
    error: dict[str, Any] | None = None  # a PdserveError's class name and arguments


@dataclass(frozen=True, slots=True)
class Head:
    """The first frame of a reply."""

    reply: Reply
    num_prompts: int
    num_texts: int


_specs = msgspec.msgpack.Decoder(Spec)
_asks = msgspec.msgpack.Decoder(Ask)
_grammars = msgspec.msgpack.Decoder(StructuredOutput)


def main(fd: int) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    os.nice(NICENESS)
    dump_stacks_on_signal()
    return serve(socket.socket(fileno=fd), _load)


def _load(spec_: bytes) -> Callable[[socket.socket], None]:
    spec = _specs.decode(spec_)
    model = load_served_model(ModelConfig(**spec.model))
    preprocessor = Preprocessor(model, ChatConfig(**spec.chat))
    return partial(_work, preprocessor, LogConfig(**spec.log))


def _work(preprocessor: Preprocessor, log: LogConfig, connection: socket.socket) -> None:
    setup_logging("router/text", log)
    frames = connection.makefile("rb")
    while True:
        ask = _asks.decode(_receive(frames))
        for frame in frames_of(preprocessor, ask, _receive(frames)):
            connection.sendall(LENGTH.pack(len(frame)))
            connection.sendall(frame)


def frames_of(preprocessor: Preprocessor, ask: Ask, raw: bytes) -> list[bytes]:
    """Returns the frames of the reply; every body has one."""
    request_id_var.set(ask.request_id)
    templates: Templates = "apart" if ask.costly else "own apart"
    model = preprocessor.model.within(ask.window)
    asked = replace(preprocessor, model=model, adapters=ask.adapters, templates=templates)
    try:
        reply = answer(asked, ask.kind, raw)
    except CostlyTemplate:
        reply = Reply(costly=True)
    except PdserveError as error:
        reply = _refusal(error)
    except BaseException as error:
        if not is_defect(error):
            raise
        reply = _refusal(failed(error))
    return _frames(replace(reply, last=_peak_memory() > KEEP_MEMORY))


def _refusal(error: PdserveError) -> Reply:
    fields = {name: getattr(error, name) for name in ("message", "code", "param")}
    return Reply(error={"type": type(error).__name__, **fields})


def _frames(reply: Reply) -> list[bytes]:
    alone = replace(reply, prompts=(), texts=(), resume=b"")
    head = msgspec.msgpack.encode(Head(alone, len(reply.prompts), len(reply.texts)))
    return [head, *reply.prompts, *reply.texts, reply.resume]


def answer(preprocessor: Preprocessor, kind: str, raw: bytes | bytearray) -> Reply:
    if kind == GRAMMAR:
        structured = _grammars.decode(raw)
        return Reply(compiled=compile_apart(structured, preprocessor.model))
    preprocessed = preprocessor.preprocess(kind, raw)
    return Reply(
        body=_fields(kind, preprocessed),
        prompts=tuple(array("I", ids).tobytes() for ids in preprocessed.prompts),
        texts=tuple(text.encode() for text in preprocessed.texts),
        resume=preprocessed.resume.encode(),
        structured=preprocessed.structured,
        answer=preprocessed.answer,
        ignored=tuple(preprocessed.ignored),
    )


def _fields(kind: str, preprocessed: Preprocessed[Any]) -> bytes:
    """Returns the JSON of the body's other fields, without fields that no schema has."""
    known = set(type(preprocessed.body).model_fields) - CONSUMED_FIELDS
    rest = preprocessed.body.model_dump(mode="json", include=known, exclude_none=True)
    fields = msgspec.json.encode({**rest, **_PLACEHOLDERS.get(kind, {})})
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the parameters take more than {MAX_FIELDS} bytes")
    return fields


def _peak_memory() -> int:
    """Bytes at this process's own peak; `ru_maxrss` starts at its parent's."""
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
