"""Typed errors over gRPC: a status code for any client, and trailing metadata for pdserve's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from pdserve.common.core import errors
from pdserve.common.core.errors import Blame, PdserveError
from pdserve.common.core.printable import MAX_PEER_TEXT, cut_bytes, peer_code, printable
from pdserve.common.core.request import is_plain_id, new_request_id
from pdserve.common.obs.logging import request_id_var
from pdserve.common.rpc.pb import cluster_pb2 as pb

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
# Bytes of an error's text. It is sent up to three times, percent-encoded outside ASCII, and clients
# drop metadata of more than 8 KiB.
MAX_MESSAGE = 1024
CLOCK_KEY = "pdserve-clock"  # `ClockSkew.clock`
CODE_KEY, _BLAME, _RETRYABLE, _PARAM, _RETRY_AFTER = (
    f"pdserve-{name}" for name in ("error-code", "blame", "retryable", "param", "retry-after")
)

STATUS: dict[type[PdserveError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.Conflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.Gone: grpc.StatusCode.FAILED_PRECONDITION,
    errors.KeyReused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.TransferError: grpc.StatusCode.ABORTED,
    errors.NodeError: grpc.StatusCode.INTERNAL,
    errors.ClusterAuthError: grpc.StatusCode.UNAUTHENTICATED,
    errors.ClockSkew: grpc.StatusCode.UNAUTHENTICATED,
}
_CLASS = {status: cls for cls, status in reversed(list(STATUS.items()))}
# Between roles this status never concerns a client's key.
_CLASS[grpc.StatusCode.UNAUTHENTICATED] = errors.ClusterAuthError


# grpc.aio's error of a call that is read or written after its server has stopped.
_STOPPED = "_ServerStoppedError"

Context = grpc.aio.ServicerContext[Any, Any]
Details = Callable[[PdserveError], Sequence[Message]]


@asynccontextmanager
async def serving(
    context: Context, here: Blame = Blame.ROUTER, details: Details = lambda error: ()
) -> AsyncIterator[None]:
    """Wraps a handler's body: sets the request id for its log lines and turns exceptions into
    statuses. Unexpected exceptions are blamed on the role `here`. `details`: returns the
    `google.rpc.Status` details of an error."""
    request_id = _metadata(context.invocation_metadata()).get(REQUEST_ID_KEY, "-")
    request_id_var.set(request_id if is_plain_id(request_id) else "-")
    try:
        yield
    except PdserveError as error:
        # Break the reference cycle: error → traceback → frames → error.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        await abort(context, error, details(error))
    except (GeneratorExit, grpc.aio.AbortError, CallGone):
        raise
    except (Exception, asyncio.CancelledError) as error:
        if isinstance(error, grpc.aio.InternalError) or type(error).__name__ == _STOPPED:
            raise CallGone from None  # read or written after its end
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise  # cancelled by the caller, or this server is stopping
        # The exception's text may contain anything, so it is only logged.
        error_id = new_request_id("error")
        logger.exception("%s: unexpected error in a gRPC handler", error_id)
        text = f"internal error; its traceback is in the log under {error_id}"
        defect = _defect(text, here)
        await abort(context, defect, details(defect))


def _is_cancelled() -> bool:
    """Returns whether this task was cancelled, and not only an awaitable in it. In the latter case
    the call must be answered: gRPC would not end it, and the caller would never get an answer."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _defect(text: str, here: Blame) -> PdserveError:
    """Returns the error for an unexpected exception; a node's is retryable, on another node."""
    if here is Blame.ROUTER:
        return PdserveError(text)
    return errors.NodeError(f"the {here} node: {text}", code="INTERNAL", blame=here)


class CallGone(asyncio.CancelledError):
    """The caller left before it got an error, or the server has stopped. (gRPC does not log a
    handler that ends with this.)"""


async def abort(context: Context, error: PdserveError, details: Sequence[Message] = ()) -> None:
    """Ends the call with a typed error.

    Raises:
        grpc.aio.AbortError: always, except
        CallGone: if the caller has left.
    """
    status, message, words = _status_of(error)
    metadata: list[tuple[str, str | bytes]] = list(words.items())
    if details:
        packed = [Packed() for _ in details]
        for each, detail in zip(packed, details, strict=True):
            each.Pack(detail)
        told = Status(code=status.value[0], message=message, details=packed)
        metadata += rpc_status.to_status(told).trailing_metadata
    try:
        await context.abort(status, message, tuple(metadata))
    except grpc.aio.InternalError:
        raise CallGone from None


def _status_of(error: PdserveError) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Returns (status, text, metadata with pdserve's fields)."""
    words = {
        CODE_KEY: error.code,
        _BLAME: str(error.blame),
        _RETRYABLE: str(int(error.retryable)),
    }
    if error.param is not None:
        words[_PARAM] = error.param
    if error.retry_after is not None:
        words[_RETRY_AFTER] = str(error.retry_after)
    if isinstance(error, errors.ClockSkew):
        words[CLOCK_KEY] = error.clock
    status = STATUS.get(type(error), grpc.StatusCode.INTERNAL)
    return status, cut_bytes(error.message, MAX_MESSAGE), words


def failure_to_pb(error: PdserveError) -> pb.Failure:
    """Encodes an error in a message, with the same fields as in a status."""
    status, message, words = _status_of(error)
    return pb.Failure(status=status.value[0], message=message, metadata=words)


def failure_from_pb(failure: pb.Failure, peer: Blame) -> PdserveError:
    """Returns the typed error, for any message of a peer of any version."""
    status = _STATUS_BY_NUMBER.get(failure.status, grpc.StatusCode.UNKNOWN)
    return _error(status, failure.message, dict(failure.metadata), peer)


_STATUS_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}

# Statuses without an answer from the peer.
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def from_rpc_error(error: grpc.aio.AioRpcError, peer: Blame) -> PdserveError:
    """Returns the typed error of a failed call, for any answer of a peer of any version. Without
    our metadata the transport or the peer's server failed, and the peer is to blame; also for an
    unexpected exception in its handler, and for an unknown blame."""
    metadata = _metadata(error.trailing_metadata() or ())
    return _error(error.code(), error.details() or error.code().name, metadata, peer)


def _error(
    status: grpc.StatusCode, text: str, metadata: dict[str, str], peer: Blame
) -> PdserveError:
    message = printable(text, MAX_PEER_TEXT)
    if CODE_KEY not in metadata:
        code = "PEER_LOST" if status in _LOST else "RPC_FAILED"
        return errors.NodeError(f"{peer} node: {status.name}: {message}", code=code, blame=peer)
    cls = _CLASS.get(status, errors.NodeError)
    return cls(
        message,
        code=peer_code(metadata[CODE_KEY]),
        blame=peer if cls is errors.ClusterAuthError else _blame(metadata.get(_BLAME), peer),
        retryable=metadata.get(_RETRYABLE) == "1",
        param=metadata.get(_PARAM),
        retry_after=_seconds(metadata.get(_RETRY_AFTER)),
    )


def _blame(word: str | None, peer: Blame) -> Blame:
    """Returns the blame in a peer's metadata; the peer itself if it is unknown, the node that
    reports the error, the router or the operator."""
    never = (Blame.NODE, Blame.ROUTER, Blame.OPERATOR)
    known = {str(blame): blame for blame in Blame if blame not in never}
    return known.get(word or "", peer)


def _seconds(word: str | None) -> float | None:
    try:
        seconds = float(word or "nan")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _metadata(pairs: Sequence[tuple[str, str | bytes]] | Any) -> dict[str, str]:
    return {key: value for key, value in pairs or () if isinstance(value, str)}
