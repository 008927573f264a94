"""Every error as OpenAI words it: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from itertools import takewhile
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from pdserve.common.core.errors import InvalidRequest, PdserveError, Unavailable
from pdserve.common.obs.logging import request_id_var
from pdserve.router.http.encoding import json_response
from pdserve.router.http.schema import SHAPES

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}
_MESSAGES = {
    404: "there is no such path",
    405: "this path does not take that method",
    413: "the request body is too large",
}


def error_body(error: PdserveError) -> dict[str, Any]:
    """The JSON of an error, for a response or an event of a stream."""
    return _body(error.http_status, error.message, error.param, error.code.lower())


def error_response(error: PdserveError) -> web.Response:
    headers = {}
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or 1)))
    return json_response(error_body(error), status=error.http_status, headers=headers)


def http_error_response(error: web.HTTPException) -> web.Response:
    """aiohttp's own errors: unknown path, wrong method, too large a body, …"""
    phrase = HTTPStatus(error.status).phrase
    message = _MESSAGES.get(error.status) or error.text or phrase
    body = _body(error.status, message, None, phrase.lower().replace(" ", "_"))
    allow = error.headers.get("Allow")
    return json_response(body, status=error.status, headers={"Allow": allow} if allow else {})


def as_typed(error: Exception) -> PdserveError:
    """The typed error, or for a defect an internal error that names only the request."""
    if isinstance(error, PdserveError):
        return error
    logger.error("unexpected error", exc_info=error)
    return PdserveError(f"internal error; its log entry is under request id {request_id_var.get()}")


def stopping() -> Unavailable:
    """What clients are told while this process ends: another router may serve them."""
    return Unavailable("the server is shutting down", code="SHUTTING_DOWN")


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first thing pydantic found wrong; `param` is a path such as `messages[0].role`."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['msg']}", code="INVALID_JSON")
    if not first["loc"]:
        return InvalidRequest("the body must be a JSON object", code="INVALID_JSON")
    # Inside a field of several shapes pydantic goes on with its own name of the shape.
    steps = list(takewhile(lambda step: not _is_shape(step), first["loc"]))
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)[1:]
    if len(steps) < len(first["loc"]) and steps[-1] in SHAPES:
        return InvalidRequest(f"{param}: must be {SHAPES[str(steps[-1])]}", param=param)
    return InvalidRequest(f"{param}: {first['msg']}", param=param)


def _is_shape(step: int | str) -> bool:
    return isinstance(step, str) and (step == "str" or "[" in step)


def _body(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = _TYPES.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
