"""The frames between a node and its ranks' processes.

    node   ROUTER ipc://<directory>/node, or over a network tcp://<address>:<port> with CURVE
    rank r DEALER "r.steps"  takes steps, on the main thread
           DEALER "r.calls"  takes calls to the extension, on a thread of its own
           DEALER "r.out"    sends every answer and event, in one order

    node → rank   [number, body]           number STOP: end; body = seconds granted (msgpack)
    rank → node   [header, body]           header = rank, kind, number

A ROUTER drops what is meant for a dead rank instead of blocking; the rank's exit fails the
futures that wait for it. The directory is private to the user and holds, until all ranks have
connected, the socket, each rank's spec and the ranks' rendezvous file. Over a network every frame
is encrypted, and nobody is heard who was not told the node's key (CurveZMQ, RFC 26: it never
shows on the wire).
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec
import zmq

from pdserve.common.core.errors import (
    Blame,
    ConfigError,
    InvalidRequest,
    NodeError,
    PdserveError,
    TransferError,
)

logger = logging.getLogger(__name__)


NUMBER = struct.Struct("<Q")
HEADER = struct.Struct("<HBQ")
STOP = 2**64 - 1


class Kind(IntEnum):
    """What a rank sends. RESULT and FAILURE answer the call of the same number; a rank's start
    counts as three calls (`start_number`)."""

    RESULT = 0
    FAILURE = 1
    BROKEN = 2  # a step failed, so the ranks no longer agree; nothing can be asked any more
    EVENT = 3
    LOG = 4  # what a rank on another host would write to standard error


class Link(IntEnum):
    """A rank's sockets, in the order in which they announce themselves."""

    STEPS = 0
    CALLS = 1
    OUT = 2


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a rank reaches its node."""

    url: str
    key: str = ""  # over a network: the node's public key (Z85), which only its ranks are told


def start_number(rank: int, link: Link) -> int:
    """The call that is answered when this socket of this rank is connected (OUT: when the
    worker is built)."""
    return rank * len(Link) + link


def routing_id(rank: int, link: Link) -> bytes:
    return f"{rank}.{link.name.lower()}".encode()


def local_address(directory: Path) -> NodeAddress:
    return NodeAddress(f"ipc://{directory}/node")


def spec_path(directory: Path, rank: int) -> Path:
    return directory / f"spec.{rank}"


def remove_high_water_mark(socket: zmq.Socket) -> None:
    """No high-water mark: nothing is dropped or blocked while a peer is slow."""
    socket.set_hwm(0)


# ---- errors on their way from a rank to its node ----

_CLASSES: dict[str, type[PdserveError]] = {
    cls.__name__: cls for cls in (ConfigError, InvalidRequest, NodeError, TransferError)
}


@dataclass(frozen=True, slots=True)
class _Failure:
    error: str
    message: str
    code: str
    blame: str
    retryable: bool


_failures = msgspec.msgpack.Decoder(_Failure)


def to_pdserve_error(error: BaseException, rank: int) -> PdserveError:
    """`error` itself if it is typed, else a NodeError that names the rank and the cause. What
    nobody foresaw is logged here, where its traceback still is."""
    if isinstance(error, PdserveError):
        return error
    logger.error("rank %d failed", rank, exc_info=error)
    return NodeError(f"rank {rank}: {type(error).__name__}: {error}")


def encode_failure(error: BaseException, rank: int) -> bytes:
    known = to_pdserve_error(error, rank)
    failure = _Failure(
        error=type(known).__name__,
        message=known.message,
        code=known.code,
        blame=known.blame.value,
        retryable=known.retryable,
    )
    return msgspec.msgpack.encode(failure)


def decode_failure(body: bytes) -> PdserveError:
    """The error a rank met. A class that is not a rank's business becomes a NodeError."""
    failure = _failures.decode(body)
    return _CLASSES.get(failure.error, NodeError)(
        failure.message,
        code=failure.code,
        blame=Blame(failure.blame),
        retryable=failure.retryable,
    )
