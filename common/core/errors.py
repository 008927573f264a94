"""The error tree. Every error names who is to blame and whether a retry may succeed.

    PdserveError
    ├── ConfigError          a flag, file or model this process cannot start with
    ├── RequestError         the client's fault
    │   ├── InvalidRequest       400  `param` names the field
    │   ├── Unauthenticated      401  no API key, or a wrong one
    │   ├── PermissionDenied     403  needs an operator's key, and got a client's
    │   ├── ModelNotFound        404
    │   ├── RequestNotFound      404
    │   ├── UnsupportedEndpoint  404  other servers have the path
    │   ├── Conflict             409  the same request is being served
    │   ├── Gone                 410  the answer that the request would continue no longer exists
    │   ├── RequestTooLarge      413
    │   └── KeyReused            422  another request has its Idempotency-Key
    ├── Overloaded           429  queues are full; carries `retry_after` (seconds)
    ├── Unavailable          503  no node can serve; carries `retry_after` (seconds)
    ├── DeadlineExceeded     504
    ├── Cancelled            499  the client disconnected
    └── NodeError            500  a node failed while it served the request
        ├── ClusterAuthError 500  one role could not authenticate to another
        │   └── ClockSkew        the clocks of the two hosts differ too much
        └── TransferError    500  a KV transfer failed

The circuit breaker, the HTTP status, the gRPC status and the log line all use the fields `code`
(stable, upper snake case), `blame` and `retryable`.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import ClassVar


class Blame(StrEnum):
    """The role or party that caused an error."""

    CLIENT = "client"
    ROUTER = "router"
    OPERATOR = "operator"  # the person who configured the process
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # a node of both roles
    NODE = "node"  # the node that reports it; for its peer, the node's role
    NETWORK = "network"


class PdserveError(Exception):
    """Base of all errors that may cross a role boundary."""

    default_code: ClassVar[str] = "INTERNAL"
    default_blame: ClassVar[Blame] = Blame.ROUTER
    default_retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        blame: Blame | None = None,
        retryable: bool | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        # The message may quote a client's unpaired surrogate, which UTF-8 cannot encode.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.blame = blame or self.default_blame
        self.retryable = self.default_retryable if retryable is None else retryable
        self.param = param
        self.retry_after = retry_after
        self.counted = False  # whether the metrics have counted it

    def __str__(self) -> str:
        return f"[{self.code}, blame={self.blame}] {self.message}"


class ConfigError(PdserveError):
    """This process cannot start as configured; the message names the fix. Operators read it, so it
    stands without code and blame."""

    default_code = "BAD_CONFIG"
    default_blame = Blame.OPERATOR

    def __str__(self) -> str:
        return self.message


class InvalidCheckpoint(ConfigError):
    """The checkpoint's config has a wrong value or contradicts itself, for any implementation."""


class RequestError(PdserveError):
    """The client must change the request."""

    default_blame = Blame.CLIENT
    http_status = 400


class InvalidRequest(RequestError):
    default_code = "INVALID_REQUEST"


class Unauthenticated(RequestError):
    default_code = "INVALID_API_KEY"
    http_status = 401


class PermissionDenied(RequestError):
    default_code = "PERMISSION_DENIED"
    http_status = 403


class ModelNotFound(RequestError):
    default_code = "MODEL_NOT_FOUND"
    http_status = 404


class RequestNotFound(RequestError):
    default_code = "REQUEST_NOT_FOUND"
    http_status = 404


class UnsupportedEndpoint(RequestError):
    default_code = "UNSUPPORTED_ENDPOINT"
    http_status = 404


class Conflict(RequestError):
    default_code = "REQUEST_IN_PROGRESS"
    default_retryable = True
    http_status = 409


class Gone(RequestError):
    default_code = "VERSION_GONE"
    http_status = 410


class RequestTooLarge(RequestError):
    default_code = "REQUEST_TOO_LARGE"
    http_status = 413


class KeyReused(RequestError):
    default_code = "IDEMPOTENCY_KEY_REUSED"
    http_status = 422


class Overloaded(PdserveError):
    default_code = "OVERLOADED"
    default_retryable = True
    http_status = 429


class Unavailable(PdserveError):
    default_code = "UNAVAILABLE"
    default_retryable = True
    http_status = 503


class DeadlineExceeded(PdserveError):
    default_code = "DEADLINE_EXCEEDED"
    default_blame = Blame.NETWORK
    http_status = 504


class Cancelled(PdserveError):
    default_code = "CANCELLED"
    default_blame = Blame.CLIENT
    http_status = 499


class NodeError(PdserveError):
    default_code = "NODE_FAILED"
    default_blame = Blame.NODE
    default_retryable = True


class ClusterAuthError(NodeError):
    """Authentication between roles failed. (A client with a wrong API key gets Unauthenticated.)"""

    default_code = "CLUSTER_AUTH_FAILED"


class ClockSkew(ClusterAuthError):
    """The timestamp of a call is too far from this server's clock. Carries the server's time."""

    default_code = "CLOCK_SKEW"

    def __init__(self, message: str, clock: str = "") -> None:
        """`clock`: this server's time, authenticated for this call."""
        super().__init__(message)
        self.clock = clock


class TransferError(NodeError):
    """A KV transfer failed; `docs/troubleshooting.md` lists the codes."""

    default_code = "TRANSFER_FAILED"
    default_blame = Blame.NETWORK


def is_defect(error: BaseException) -> bool:
    """Returns whether `error` is an unexpected failure: neither a PdserveError nor a cancellation
    or exit. Takes a BaseException because a panic in a Rust library is not an Exception."""
    ends = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
    return not isinstance(error, (PdserveError, *ends))
