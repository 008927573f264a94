"""Streams that any router can take up: the id of each event says, signed, what the event adds.

    id_n = payload_n · mac_n        mac_n = HMAC(key of the request, mac_{n-1} · payload_n)

A payload has the tokens of its event, by prompt and choice; the first one also what was drawn for
the answer. A client whose router died sends the same body again, to any router with the same
cluster key, with all ids that it has got, in order, as `resume`. That router begins with these
tokens, as it would after the death of a decode node, and streams what follows. So no process keeps
anything of a stream that nobody reads. The MACs are a chain that begins with the request and the
API key: an id of another one, or one that was changed, left out or moved, fits nowhere.
"""

from __future__ import annotations

import asyncio
import binascii
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from pdserve.common.core.errors import InvalidRequest, PermissionDenied
from pdserve.common.core.request import FinishReason
from pdserve.router.api.preprocess import CONSUMED_FIELDS, Preprocessed
from pdserve.router.api.schema import CompletionBody, GenerationBody
from pdserve.router.http.request import STATE, authorization_of
from pdserve.router.requests.generation import GenerationRequest, Past, TextDelta

_MAC_NBYTES = 12
MANY = 256  # ids, which take two milliseconds; a thread reads more


class Added(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one event adds to a choice."""

    prompt: int
    choice: int
    token_ids: list[int]
    version: str = ""  # as `TextDelta.version`, where it is not that of the prompt's last one
    finish_reason: str = ""


class Drawn(msgspec.Struct, array_like=True):
    """What was drawn for the answer, which all of its routers must share."""

    id: str
    created: int  # Unix time
    seeds: list[int]  # of each prompt


class Payload(msgspec.Struct, array_like=True, omit_defaults=True):
    added: list[Added]
    drawn: Drawn | None = None  # of the first event alone


_payload = msgspec.msgpack.Decoder(Payload)


class EventIds:
    """Makes the ids of one stream's events, in order."""

    def __init__(self, key: bytes, drawn: Drawn | None) -> None:
        """`key`: the request's. `drawn`: None if the stream has ids already, which `read` took."""
        self._key = key
        self._mac = b""
        self._drawn = drawn
        self._unsent: list[Added] = []
        self._versions: dict[int, str] = {}  # by prompt

    def add(self, prompt: int, delta: TextDelta) -> None:
        """Adds a delta to the next id."""
        known = self._versions.get(prompt) == delta.version
        self._versions[prompt] = delta.version
        self._unsent.append(
            Added(
                *(prompt, delta.choice, [token.token_id for token in delta.tokens]),
                "" if known else delta.version,
                delta.finish_reason or "",
            )
        )

    def next(self) -> bytes:
        payload = msgspec.msgpack.encode(Payload(self._unsent, self._drawn))
        self._unsent, self._drawn = [], None
        self._mac = self._next_mac(payload)
        return urlsafe_b64encode(payload + self._mac)

    def read(self, event_id: str) -> Payload:
        """Reads the next id of the stream.

        Raises:
            ValueError: it is not.
        """
        raw = urlsafe_b64decode(event_id)
        payload, mac = raw[:-_MAC_NBYTES], raw[-_MAC_NBYTES:]
        self._mac = self._next_mac(payload)
        if not hmac.compare_digest(mac, self._mac):
            raise ValueError("its MAC is wrong")
        found = _payload.decode(payload)
        for added in found.added:
            added.version = added.version or self._versions.get(added.prompt, "")
            self._versions[added.prompt] = added.version
        return found

    def _next_mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, self._mac + payload, "sha256")[:_MAC_NBYTES]


@dataclass(frozen=True, slots=True)
class Resumable:
    """A stream whose events have ids; `generations` go on where the client is."""

    ids: EventIds
    drawn: Drawn
    generations: list[GenerationRequest]


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
    if not (secrets := request.app[STATE].event_keys):
        raise InvalidRequest("resumable needs a server with a --cluster-key", param="resumable")
    digest = _digest(request, asked, generations)
    keys = [hmac.digest(secret, digest, "sha256") for secret in secrets]
    if not body.resume:
        return Resumable(EventIds(keys[0], drawn), drawn, list(generations))
    if len(body.resume) > MANY:
        return await asyncio.to_thread(_resumed, body.resume, keys, generations)
    return _resumed(body.resume, keys, generations)


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


def _resumed(
    event_ids: Sequence[str], keys: Sequence[bytes], generations: Sequence[GenerationRequest]
) -> Resumable:
    for key in keys:
        ids = EventIds(key, None)
        try:
            payloads = [ids.read(each) for each in event_ids]
        except (ValueError, binascii.Error, msgspec.DecodeError):
            continue  # of an older cluster key, perhaps
        if (drawn := payloads[0].drawn) is not None:
            return Resumable(ids, drawn, _past(generations, drawn, payloads))
    raise PermissionDenied(
        "resume: these are not all ids of this stream so far, in order: send the same body and key "
        "with each id that came",
        code="FOREIGN_EVENT_ID",
        param="resume",
    )


def _past(
    generations: Sequence[GenerationRequest], drawn: Drawn, payloads: Sequence[Payload]
) -> list[GenerationRequest]:
    past: list[list[Past]] = [[] for _ in generations]
    for payload in payloads:
        for added in payload.added:
            reason = FinishReason(added.finish_reason) if added.finish_reason else None
            tokens = tuple(added.token_ids)
            past[added.prompt].append(Past(added.choice, tokens, reason, added.version))
    return [
        replace(each, sampling=replace(each.sampling, seed=seed), past=tuple(its))
        for each, seed, its in zip(generations, drawn.seeds, past, strict=True)
    ]
