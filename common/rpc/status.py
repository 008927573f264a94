"""Typed errors over gRPC: a status code for strangers, trailing metadata for ourselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from pdserve.common.core import errors
from pdserve.common.core.errors import Blame, PdserveError
from pdserve.common.core.printable import MAX_PEER_TEXT, peer_code, printable
from pdserve.common.core.request import is_plain_id, new_request_id
from pdserve.common.obs.logging import request_id_var

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
_CODE, _BLAME, _RETRYABLE, _PARAM, _RETRY_AFTER = (
    f"pdserve-{name}" for name in ("error-code", "blame", "retryable", "param", "retry-after")
)

_STATUS: dict[type[PdserveError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestTooLarge: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.TransferError: grpc.StatusCode.ABORTED,
    errors.NodeError: grpc.StatusCode.INTERNAL,
    errors.ClusterAuthError: grpc.StatusCode.UNAUTHENTICATED,
}
_CLASS = {status: cls for cls, status in reversed(list(_STATUS.items()))}
# Between roles it is never about the key of a client.
_CLASS[grpc.StatusCode.UNAUTHENTICATED] = errors.ClusterAuthError


@asynccontextmanager
async def serving(
    context: grpc.aio.ServicerContext[Any, Any], here: Blame = Blame.ROUTER
) -> AsyncIterator[None]:
    """Wraps a handler's body: sets the request id for its log lines and turns exceptions into
    statuses, in one place. What nobody expected is a defect of the role that is `here`."""
    request_id = _metadata(context.invocation_metadata()).get(REQUEST_ID_KEY, "-")
    request_id_var.set(request_id if is_plain_id(request_id) else "-")
    try:
        yield
    except PdserveError as error:
        await abort(context, error)
    except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
        raise
    except Exception:
        # Its text may hold anything: it stays in this process.
        error_id = new_request_id("error")
        logger.exception("%s: unexpected error in a gRPC handler", error_id)
        text = f"internal error; its traceback is in the log under {error_id}"
        await abort(context, _defect(text, here))


def _defect(text: str, here: Blame) -> PdserveError:
    """A node's is worth another try, on another one."""
    if here is Blame.ROUTER:
        return PdserveError(text)
    return errors.NodeError(f"the {here} node: {text}", code="INTERNAL", blame=here)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> None:
    """Ends the call with a typed error."""
    metadata = [
        (_CODE, error.code),
        (_BLAME, str(error.blame)),
        (_RETRYABLE, str(int(error.retryable))),
    ]
    if error.param is not None:
        metadata.append((_PARAM, error.param))
    if error.retry_after is not None:
        metadata.append((_RETRY_AFTER, str(error.retry_after)))
    await context.abort(
        _STATUS.get(type(error), grpc.StatusCode.INTERNAL), error.message, tuple(metadata)
    )


# Nobody answered; any other status is somebody's answer.
_LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


def from_rpc_error(error: grpc.aio.AioRpcError, peer: Blame) -> PdserveError:
    """The typed error behind a failed call, whatever a peer of any version says. Without our
    metadata the transport or the peer's server failed, and the peer is to blame; so it is for a
    defect in its handler, and for what is nobody's that we know of."""
    metadata = _metadata(error.trailing_metadata() or ())
    message = printable(error.details() or error.code().name, MAX_PEER_TEXT)
    if _CODE not in metadata:
        code = "PEER_LOST" if error.code() in _LOST else "RPC_FAILED"
        return errors.NodeError(
            f"{peer} node: {error.code().name}: {message}", code=code, blame=peer
        )
    cls = _CLASS.get(error.code(), errors.NodeError)
    return cls(
        message,
        code=peer_code(metadata[_CODE]),
        blame=peer if cls is errors.ClusterAuthError else _blame(metadata.get(_BLAME), peer),
        retryable=metadata.get(_RETRYABLE) == "1",
        param=metadata.get(_PARAM),
        retry_after=_seconds(metadata.get(_RETRY_AFTER)),
    )


def _blame(word: str | None, peer: Blame) -> Blame:
    """A peer that blames itself by no name, by an unknown one or as a router means itself."""
    known = {str(blame): blame for blame in Blame if blame is not Blame.ROUTER}
    return known.get(word or "", peer)


def _seconds(word: str | None) -> float | None:
    try:
        seconds = float(word or "nan")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _metadata(pairs: Sequence[tuple[str, str | bytes]] | Any) -> dict[str, str]:
    return {key: value for key, value in pairs or () if isinstance(value, str)}
