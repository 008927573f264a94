"""Answers over HTTP that outlive their router: streams with ids of events, and all by
Idempotency-Key."""

from __future__ import annotations

from base64 import urlsafe_b64decode
from collections.abc import Collection, Iterator, Sequence
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from pdserve.common.core.errors import InvalidRequest
from pdserve.router.api.preprocess import CONSUMED_FIELDS, Preprocessed
from pdserve.router.api.schema import CompletionBody, GenerationBody
from pdserve.router.http.request import STATE, authorization_of
from pdserve.router.requests import event_ids
from pdserve.router.requests.event_ids import Drawn, Resumable
from pdserve.router.requests.generation import GenerationRequest
from pdserve.router.requests.keyed import IDEMPOTENCY_KEY, keyed


async def resumable(
    request: web.Request,
    asked: Preprocessed[Any],
    generations: Sequence[GenerationRequest],
    drawn: Drawn,
) -> Resumable | None:
    """Returns the stream if the body makes one resumable, or resumes one; `drawn` is for a new one.

    Raises:
        InvalidRequest: it cannot be resumable.
        PermissionDenied: an id belongs to another request.
    """
    body: GenerationBody = asked.body
    if not body.resumable:
        if asked.resume:
            raise InvalidRequest("`resume` needs `resumable`: true", param="resume")
        return None
    _check(body)
    digest = _digest(request, asked, generations)
    secrets = request.app[STATE].event_keys
    return await event_ids.resumable(secrets, digest, _Encoded(asked.resume), generations, drawn)


class _Encoded(Collection[bytes]):
    """The ids of a body, which may be hundreds of thousands: decoded one by one."""

    def __init__(self, joined: str) -> None:
        self._joined = joined

    def __len__(self) -> int:
        return self._joined.count(" ") + 1 if self._joined else 0

    def __iter__(self) -> Iterator[bytes]:
        return map(urlsafe_b64decode, self._joined.split())

    def __contains__(self, given: object) -> bool:
        return any(each == given for each in self)


def _check(body: GenerationBody) -> None:
    if not body.stream:
        raise InvalidRequest("resumable needs `stream`: true", param="resumable")
    completion = body if isinstance(body, CompletionBody) else None
    if body.prompt_logprobs is not None or (completion and (completion.echo or completion.best_of)):
        raise InvalidRequest(
            "resumable goes without prompt_logprobs, echo and best_of", param="resumable"
        )


def _digest(
    request: web.Request, asked: Preprocessed[Any], generations: Sequence[GenerationRequest]
) -> bytes:
    """Returns a digest of the request and of the API key with which it came."""
    fields = set(type(asked.body).model_fields) - CONSUMED_FIELDS
    adapter = generations[0].adapter
    parts = [
        request.path,
        authorization_of(request) or "",
        adapter.digest if adapter else "",
        repr(asked.structured),
        asked.body.model_dump(mode="json", include=fields, exclude_none=True),
    ]
    digest = sha256(msgspec.json.encode(parts, order="sorted"))
    for prompt in asked.prompts:
        digest.update(len(prompt).to_bytes(8))
        digest.update(np.asarray(prompt, np.uint32).tobytes())
    return digest.digest()


# ---- one answer for a key -------------------------------------------------------------------


def idempotent(
    request: web.Request,
    asked: Preprocessed[Any],
    generations: Sequence[GenerationRequest],
    prefix: str,
) -> tuple[str, list[GenerationRequest]] | None:
    """Returns and raises what `keyed` does for the request's Idempotency-Key; `prefix`: of the
    answer's id."""
    if (given := request.headers.get(IDEMPOTENCY_KEY)) is None:
        return None
    return keyed(
        *(request.app[STATE].event_keys, given, authorization_of(request) or ""),
        *(_digest(request, asked, generations), generations, prefix),
        seeded=asked.body.seed is not None and asked.body.seed != -1,
    )
