"""JSON responses, and errors in OpenAI's format:
`{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from pdserve.common.core.errors import PdserveError, RequestTooLarge
from pdserve.common.obs.logging import request_id_var

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_MESSAGES = {
    404: "there is no such path",
    405: "this path does not take that method",
    413: "the request body is too large",
}


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def error_body(error: PdserveError) -> dict[str, Any]:
    """Returns the JSON of an error, for a response or an event of a stream."""
    return _body(error.http_status, error.message, error.param, error.code.lower())


def error_response(error: PdserveError) -> web.Response:
    headers = {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.http_status in (409, 429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1)))
    return json_response(error_body(error), status=error.http_status, headers=headers)


def http_error_response(error: web.HTTPException) -> web.Response:
    """Returns the response for aiohttp's own errors: unknown path, wrong method, too large a body,
    …"""
    message = _MESSAGES.get(error.status) or error.text or HTTPStatus(error.status).phrase
    body = _body(error.status, message, None, code_of(error).lower())
    allow = error.headers.get("Allow")
    return json_response(body, status=error.status, headers={"Allow": allow} if allow else {})


def code_of(error: web.HTTPException) -> str:
    """Returns a code like those of `PdserveError`."""
    if error.status == RequestTooLarge.http_status:  # its phrase depends on Python's version
        return RequestTooLarge.default_code
    return HTTPStatus(error.status).phrase.upper().replace(" ", "_")


def as_typed(error: Exception) -> PdserveError:
    """Returns the typed error, or for a defect an internal error that names only the request."""
    if isinstance(error, PdserveError):
        return error
    logger.error("unexpected error", exc_info=error)
    return PdserveError(f"internal error; its log entry is under request id {request_id_var.get()}")


def _body(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
