"""Errors on their way from a rank to its node: typed, with code, blame and message."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from common.core.errors import (
    Blame,
    ConfigError,
    InvalidRequest,
    NodeError,
    PdserveError,
    TransferError,
)

logger = logging.getLogger(__name__)

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


def typed(error: BaseException, rank: int) -> PdserveError:
    """`error` itself if it is typed, else a NodeError that names the rank and the cause. What
    nobody foresaw is logged here, where its traceback still is."""
    if isinstance(error, PdserveError):
        return error
    logger.error("rank %d failed", rank, exc_info=error)
    return NodeError(f"rank {rank}: {type(error).__name__}: {error}")


def encode_failure(error: BaseException, rank: int) -> bytes:
    known = typed(error, rank)
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
    failure = msgspec.msgpack.decode(body, type=_Failure)
    return _CLASSES.get(failure.error, NodeError)(
        failure.message,
        code=failure.code,
        blame=Blame(failure.blame),
        retryable=failure.retryable,
    )
