"""The frames between a node and its ranks' processes.

    node   ROUTER ipc://<directory>/node, or over a network tcp://<address>:<port> with CURVE
    rank r DEALER "r.steps"  takes steps, on the main thread
           DEALER "r.calls"  takes calls to the extension, on a thread of its own
           DEALER "r.out"    sends every answer and event, in one order

    node → rank   [number, body]           number STOP: end; body = seconds granted (msgpack)
    rank → node   [header, body]           header = rank, kind, number

A ROUTER drops messages for a dead rank instead of blocking; the rank's exit fails the futures that
wait for it. The directory is private to the user; until all ranks have connected it has the socket,
each rank's spec and the ranks' rendezvous file. Over a network every frame is encrypted, and only
ranks that know the node's key can connect (CurveZMQ, RFC 26; the key is never sent).
"""

from __future__ import annotations

import logging
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import version
from pathlib import Path

import msgspec
import zmq

import pdserve
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
PING = b""  # a call that the rank's process answers with the same
STOP = 2**64 - 1


class RankMessage(IntEnum):
    """The kinds of a rank's messages. RESULT and FAILURE answer the call of the same number; a
    rank's start counts as three calls (`start_number`)."""

    RESULT = 0
    FAILURE = 1
    BROKEN = 2  # a step failed, so the ranks are out of step and cannot be used any more
    EVENT = 3
    LOG = 4  # log text of a rank on another host


class Link(IntEnum):
    """A rank's sockets, in the order of their start numbers."""

    STEPS = 0
    CALLS = 1
    OUT = 2


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The address at which a rank reaches its node."""

    url: str
    key: str = ""  # over a network: the node's public key (Z85), known only to its ranks
    timeout: float = 30.0  # over a network: seconds without a sign of life until it counts as gone


def listen(server: zmq.Socket, address: str, timeout: float) -> NodeAddress:
    """Binds the node's socket to a free port of this host's `address`, with a new key."""
    key, server.curve_secretkey = zmq.curve_keypair()
    server.curve_server = True
    port = server.bind_to_random_port(f"tcp://{address}")
    return NodeAddress(f"tcp://{address}:{port}", key.decode(), timeout)


def code_version() -> str:
    """Returns the versions that must be equal on all hosts of a node, so that ranks compute alike
    and read each other's messages."""
    torch, _, _ = version("torch").partition("+")  # hosts may have other devices
    return f"pdserve {pdserve.__version__}, torch {torch}"


def check_version(theirs: str) -> None:
    """Raises ConfigError if this host's code is not the node's."""
    if theirs != (ours := code_version()):
        raise ConfigError(
            f"host {socket.gethostname()} has {ours}, the node {theirs or 'an older pdserve'}: "
            "install the same versions on every host of a node"
        )


def start_number(rank: int, link: Link) -> int:
    """Returns the number of the call that is answered when this socket of the rank is connected
    (OUT: when the worker is built)."""
    return rank * len(Link) + link


def routing_id(rank: int, link: Link) -> bytes:
    return f"{rank}.{link.name.lower()}".encode()


def local_address(directory: Path) -> NodeAddress:
    return NodeAddress(f"ipc://{directory}/node")


def spec_path(directory: Path, rank: int) -> Path:
    return directory / f"spec.{rank}"


def remove_high_water_mark(socket: zmq.Socket) -> None:
    """Removes the high-water mark, so that nothing is dropped or blocked while a peer is slow."""
    socket.set_hwm(0)


# ---- errors from a rank to its node ----

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
    """Returns `error` if it is typed, else a NodeError with the rank and the cause. Logs an
    unexpected error here, while its traceback is available."""
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
    """Decodes a rank's error; unknown classes become NodeError."""
    failure = _failures.decode(body)
    return _CLASSES.get(failure.error, NodeError)(
        failure.message,
        code=failure.code,
        blame=Blame(failure.blame),
        retryable=failure.retryable,
    )
