"""A router's process that prepares large bodies: `python -m pdserve.router.text_worker FD`.

    router ── spec ──▶                       once: the model's options
           ── kind, raw body ──▶  prepare
           ◀── what it asks, as token ids, or a typed error ──

Frames are eight bytes of length and as many bytes. It ends with its router, or when a body has
cost it much memory, which only the end of a process gives back.
"""

from __future__ import annotations

import logging
import resource
import socket
import struct
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common.config.node import ModelConfig
from pdserve.common.config.shared import LogConfig
from pdserve.common.core.errors import InvalidRequest, PdserveError
from pdserve.common.obs.logging import setup_logging
from pdserve.router.http.prepare import Prepared, TextModel
from pdserve.router.served_model import load_served_model

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("!Q")
MAX_MEMORY = 2 * 2**30  # bytes of data; a body that needs more kills this process only
KEEP_MEMORY = 512 * 2**20  # bytes at its peak, above which the process ends after its answer
MAX_FIELDS = 64 * 1024  # bytes of JSON that are neither prompt, nor messages, nor template
_CONSUMED = {"prompt", "messages", "tokens", "chat_template", "chat_template_kwargs", "tools"}
_PLACEHOLDERS: dict[str, dict[str, Any]] = {
    "completion": {"prompt": ""},
    "chat": {"messages": []},
    "detokenize": {"tokens": []},
}


@dataclass(frozen=True, slots=True)
class Spec:
    model: dict[str, Any]  # fields of ModelConfig
    log: dict[str, Any]  # of LogConfig
    trust_request_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer or an error; `last`: ask another process next time."""

    last: bool = False
    body: bytes = b""  # JSON, without what has become token ids or text
    prompts: tuple[bytes, ...] = ()  # arrays of 32 bits
    texts: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    error: dict[str, Any] | None = None  # the class's name and the arguments of a PdserveError


def main(fd: int) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    connection = socket.socket(fileno=fd)
    spec = msgspec.msgpack.decode(_receive(connection), type=Spec)
    setup_logging("router/text", LogConfig(**spec.log))
    model = load_served_model(ModelConfig(**spec.model))
    text = TextModel(model, spec.trust_request_chat_template)
    try:
        while True:
            kind = _receive(connection).decode()
            reply = answer(text, kind, _receive(connection))
            frame = msgspec.msgpack.encode(reply)
            connection.sendall(LENGTH.pack(len(frame)))
            connection.sendall(frame)
            if reply.last:
                return 0
    except (EOFError, ConnectionError):
        return 0  # the router is gone


def answer(text: TextModel, kind: str, raw: bytes | bytearray) -> Reply:
    try:
        prepared = text.prepare(kind, raw)
        return Reply(
            last=_peak_memory() > KEEP_MEMORY,
            body=_fields(kind, prepared),
            prompts=tuple(array("I", ids).tobytes() for ids in prepared.prompts),
            texts=tuple(prepared.texts),
            unknown=tuple(name[:64] for name in sorted(prepared.unknown)[:100]),
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


def _fields(kind: str, prepared: Prepared[Any]) -> bytes:
    """The body's other fields; those no schema has are left out."""
    known = set(type(prepared.body).model_fields) - _CONSUMED
    rest = prepared.body.model_dump(mode="json", include=known, exclude_none=True)
    fields = msgspec.json.encode({**rest, **_PLACEHOLDERS.get(kind, {})})
    if len(fields) > MAX_FIELDS:
        raise InvalidRequest(f"the parameters take more than {MAX_FIELDS} bytes")
    return fields


def _peak_memory() -> int:
    """Of this process alone: `ru_maxrss` begins at that of the one which started it."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _receive(connection: socket.socket) -> bytearray:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
