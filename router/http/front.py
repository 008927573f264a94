"""What the handlers share: the pipeline, the model, and how a body is read."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pdserve.router.auth import HEADER as AUTHORIZATION
from pdserve.router.auth import APIKeys
from pdserve.router.http.bodies import SMALL, Bodies
from pdserve.router.http.prepare import Prepared, TextModel
from pdserve.router.pipeline import Pipeline
from pdserve.router.served_model import ServedModel
from pdserve.router.text_workers import TextWorkers

logger = logging.getLogger(__name__)

BODIES = web.AppKey("bodies", Bodies)

INLINE = 4 * 1024  # bytes of a body that takes less than a few milliseconds
# Clients choose the names: remember no more than these, of so many characters.
_MAX_NAMES, _MAX_NAME_LENGTH = 1000, 64


class UnknownFields:
    """Logs each field name that no schema knows once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str]) -> None:
        new = {name[:_MAX_NAME_LENGTH] for name in names} - self._seen
        told = sorted(new)[: _MAX_NAMES - len(self._seen)]
        if told:
            self._seen.update(told)
            logger.info("ignored request fields: %s", ", ".join(told))


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Everything the HTTP API needs."""

    pipeline: Pipeline
    model: ServedModel
    keys: APIKeys = field(default_factory=APIKeys)
    trust_request_chat_template: bool = False
    workers: TextWorkers | None = None  # without them large bodies are prepared by threads
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)

    def client(self, request: web.Request) -> str:
        """Who sent it, for its share of this server."""
        return self.keys.client(request.headers.get(AUTHORIZATION), request.remote)

    async def prepare(self, request: web.Request, kind: str) -> Prepared[Any]:
        """The JSON body, of one of `pdserve.router.http.prepare.KINDS`, as what it asks.

        Raises:
            PdserveError: as `TextModel.prepare`, or there is no room for it.
            web.HTTPException: the body cannot be read.
        """
        if "Content-Type" in request.headers and not _is_json(request.content_type):
            raise web.HTTPUnsupportedMediaType(text="the Content-Type must be application/json")
        client = self.client(request)
        async with self._bodies(request).reading(request, client) as raw:
            prepared = await self._prepare(kind, raw, client)
        self.unknown_fields.note(set(prepared.unknown))
        return prepared

    async def _prepare(self, kind: str, raw: bytearray, client: str) -> Prepared[Any]:
        text = TextModel(self.model, self.trust_request_chat_template)
        if len(raw) <= INLINE:
            return text.prepare(kind, raw)
        if len(raw) <= SMALL or self.workers is None:
            return await asyncio.to_thread(text.prepare, kind, raw)
        return await self.workers.prepare(kind, raw, client)

    def _bodies(self, request: web.Request) -> Bodies:
        return request.app[BODIES]


FRONT = web.AppKey("front", Front)


def _is_json(content_type: str) -> bool:
    return content_type == "application/json" or content_type.endswith("+json")
