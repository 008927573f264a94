"""What the handlers share: the pipeline, the model, and how a body is read."""

from __future__ import annotations

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
    raw = await request.read()
    try:
        body = schema.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from error
    front = request.app[FRONT]
    front.unknown_fields.note(set(body.model_extra or ()))
    front.model.check_name(body.model)
    return body


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")
