"""What the handlers share: the pipeline, the model, and how a body is read."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from router.auth import HEADER as AUTHORIZATION
from router.auth import APIKeys
from router.generation import Generator
from router.http.errors import from_validation
from router.http.schema import Body
from router.served_model import ServedModel

logger = logging.getLogger(__name__)

BODY_GRACE = 10.0  # seconds a body may take
BODY_RATE = 32 * 1024  # and a second more for so many bytes
_MAX_NAMES = 1000  # clients choose the names: remember no more than these

BodyType = TypeVar("BodyType", bound=Body)


class UnknownFields:
    """Logs each field name that no schema knows once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str]) -> None:
        new = names - self._seen
        if new and len(self._seen) < _MAX_NAMES:
            self._seen |= new
            logger.info("ignored request fields: %s", ", ".join(sorted(new)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Everything the HTTP API needs."""

    generator: Generator
    model: ServedModel
    keys: APIKeys = field(default_factory=APIKeys)
    trust_request_chat_template: bool = False
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)

    def client(self, request: web.Request) -> str:
        """Who sent it, for its share of this server."""
        return self.keys.client(request.headers.get(AUTHORIZATION), request.remote)


FRONT = web.AppKey("front", Front)


async def read_body(request: web.Request, schema: type[BodyType]) -> BodyType:
    """The JSON body as `schema`, for the model served.

    Raises:
        InvalidRequest: no JSON, or a field of the wrong type.
        ModelNotFound: it names another model.
        web.HTTPUnsupportedMediaType: it claims to be something other than JSON.
    """
    if "Content-Type" in request.headers and not _is_json(request.content_type):
        raise web.HTTPUnsupportedMediaType(text="the Content-Type must be application/json")
    raw = await read_raw(request)
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error
    front = request.app[FRONT]
    front.unknown_fields.note(set(body.model_extra or ()))
    front.model.check_name(body.model)
    return body


async def read_raw(request: web.Request) -> bytes:
    """The body's bytes.

    Raises:
        web.HTTPRequestEntityTooLarge: it has more than --max-body-size.
        web.HTTPRequestTimeout: it comes drop by drop.
    """
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    start = asyncio.get_running_loop().time() + BODY_GRACE
    raw = bytearray()
    try:
        async with asyncio.timeout_at(start) as timeout:
            while chunk := await request.content.readany():
                raw += chunk
                if len(raw) > limit:
                    raise web.HTTPRequestEntityTooLarge(limit, len(raw))
                timeout.reschedule(start + len(raw) / BODY_RATE)
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body comes too slowly") from None
    return bytes(raw)


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")
