"""Answers over HTTP that outlive their router: streams with ids of events, and whole ones by
Idempotency-Key."""

from __future__ import annotations

import binascii
import hmac
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from dataclasses import replace
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


async def resumable(
    request: web.Request,
    asked: Preprocessed[Any],
    generations: Sequence[GenerationRequest],
    drawn: Drawn,
) -> Resumable | None:
    """Returns the stream that the body wants resumable, or resumes; `drawn` is for a new one.

    Raises:
        InvalidRequest: it cannot be resumable.
        PermissionDenied: an id is not of this request.
    """
    body: GenerationBody = asked.body
    if not body.resumable:
        if body.resume:
            raise InvalidRequest("`resume` needs `resumable`: true", param="resume")
        return None
    _check(body)
    try:
        ids = [urlsafe_b64decode(each) for each in body.resume or ()]
    except (ValueError, binascii.Error):
        raise event_ids.foreign() from None
    digest = _digest(request, asked, generations)
    secrets = request.app[STATE].event_keys
    return await event_ids.resumable(secrets, digest, ids, generations, drawn)


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
    fields = set(type(asked.body).model_fields) - CONSUMED_FIELDS - {"resume"}
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


# ---- whole answers --------------------------------------------------------------------------

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY = 255  # characters


def idempotent(
    request: web.Request,
    asked: Preprocessed[Any],
    generations: Sequence[GenerationRequest],
    prefix: str,
) -> tuple[str, list[GenerationRequest]] | None:
    """Returns the answer's id and the generations for a request with an Idempotency-Key, None for
    one without. What would be drawn at random follows from the key, so every router gives the same
    answer, and finds what another one has left of it at a decode node. `prefix`: of the id.

    Raises:
        InvalidRequest: the key cannot be one, or the server has no secret.
    """
    if (given := request.headers.get(IDEMPOTENCY_KEY)) is None:
        return None
    if not 0 < len(given) <= MAX_KEY:
        raise InvalidRequest(f"{IDEMPOTENCY_KEY}: give 1 to {MAX_KEY} characters")
    if asked.body.stream:
        raise InvalidRequest(
            f"{IDEMPOTENCY_KEY} is for answers that are not streamed: a stream has `resumable`"
        )
    if not (secrets := request.app[STATE].event_keys):
        raise InvalidRequest(f"{IDEMPOTENCY_KEY} needs a server with a --cluster-key")
    named = _digest(request, asked, generations) + given.encode(errors="surrogateescape")
    key = hmac.digest(secrets[0], named, "sha256")

    def drawn(what: str) -> bytes:
        return hmac.digest(key, what.encode(), "sha256")

    answer_id = f"{prefix}-{drawn('id').hex()[:24]}"
    seeded = asked.body.seed is not None and asked.body.seed != -1
    made = []
    for i, each in enumerate(generations):
        if not seeded:
            seed = int.from_bytes(drawn(f"seed {i}")[:8]) >> 1
            each = replace(each, sampling=replace(each.sampling, seed=seed))
        request_id = answer_id if len(generations) == 1 else f"{answer_id}-{i}"
        made.append(replace(each, request_id=request_id, orphan_key=drawn(f"job {i}")))
    return answer_id, made
