"""Streams that any router can resume: each event's id holds, signed, what the event adds.

    id_n = payload_n · mac_n        mac_n = HMAC(key of the request, mac_{n-1} · payload_n)

A payload has the tokens of its event, by prompt and choice; the first one also has the answer's
random values. A client that lost its router sends the same request to any router with the same
cluster key, with all ids so far, in order, as `resume`. That router begins with these tokens, as it
would after the death of a decode node, and streams the rest. So no process keeps any state of a
broken stream. The MACs are a chain that begins with the request and the API key: an id of another
stream, or one that was changed, omitted or moved, does not verify.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from time import sleep

import msgspec

from pdserve.common.core.errors import InvalidRequest, PermissionDenied
from pdserve.common.core.request import FinishReason
from pdserve.router.requests.generation import GenerationRequest, Past, TextDelta

_MAC_NBYTES = 12
# Ids, which take two milliseconds. A thread reads more, and pauses for so many seconds after each
# such piece, in which the event loop runs.
MANY, PAUSE = 256, 0.002
MOST_TOKENS = 512  # of a `Past`


class Added(msgspec.Struct, array_like=True, omit_defaults=True):
    """The text and tokens that one event adds to a choice."""

    prompt: int
    choice: int
    token_ids: list[int]
    version: str = ""  # as `TextDelta.version`, where it is not that of the prompt's last one
    finish_reason: str = ""


class Drawn(msgspec.Struct, array_like=True):
    """The values drawn for the answer, which all of its routers must share."""

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
        return payload + self._mac

    def read(self, event_id: bytes) -> Payload:
        """Reads the next id of the stream.

        Raises:
            ValueError: it is not.
        """
        payload, mac = event_id[:-_MAC_NBYTES], event_id[-_MAC_NBYTES:]
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
    """A stream with event ids; `generations` continue where the client is."""

    ids: EventIds
    drawn: Drawn
    generations: list[GenerationRequest]


async def resumable(
    secrets: Sequence[bytes],
    digest: bytes,
    event_ids: Collection[bytes],
    generations: Sequence[GenerationRequest],
    drawn: Drawn,
) -> Resumable:
    """Returns the stream, which continues after `event_ids` if there are any; `drawn` is for a new
    one. `secrets`: the first makes ids, all verify them; `digest`: of the request and its API key.
    Iterating over `event_ids` may raise ValueError.

    Raises:
        InvalidRequest: the server has no secret.
        PermissionDenied: an id belongs to another request.
    """
    if not secrets:
        raise InvalidRequest("resumable needs a server with a --cluster-key", param="resumable")
    keys = [hmac.digest(secret, digest, "sha256") for secret in secrets]
    if not event_ids:
        return Resumable(EventIds(keys[0], drawn), drawn, list(generations))
    if len(event_ids) > MANY:
        return await asyncio.to_thread(_resumed, event_ids, keys, generations)
    return _resumed(event_ids, keys, generations)


def foreign() -> PermissionDenied:
    return PermissionDenied(
        "resume: these are not all ids of this stream so far, in order: send the same body and key "
        "with each id that came",
        code="FOREIGN_EVENT_ID",
        param="resume",
    )


def _resumed(
    event_ids: Collection[bytes], keys: Sequence[bytes], generations: Sequence[GenerationRequest]
) -> Resumable:
    for key in keys:
        ids, payloads = EventIds(key, None), list[Payload]()
        try:
            for each in event_ids:
                payloads.append(ids.read(each))
                if len(payloads) % MANY == 0:
                    sleep(PAUSE)
        except (ValueError, msgspec.DecodeError):
            continue  # of an older cluster key, perhaps
        if (drawn := payloads[0].drawn) is not None:
            return Resumable(ids, drawn, _past(generations, drawn, payloads))
    raise foreign()


def _past(
    generations: Sequence[GenerationRequest], drawn: Drawn, payloads: Sequence[Payload]
) -> list[GenerationRequest]:
    past: list[list[Past]] = [[] for _ in generations]
    for added in _joined(payloads):
        reason = FinishReason(added.finish_reason) if added.finish_reason else None
        tokens = tuple(added.token_ids)
        past[added.prompt].append(Past(added.choice, tokens, reason, added.version))
    return [
        replace(each, sampling=replace(each.sampling, seed=seed), past=tuple(its))
        for each, seed, its in zip(generations, drawn.seeds, past, strict=True)
    ]


def _joined(payloads: Sequence[Payload]) -> Iterator[Added]:
    """Joins what consecutive events add to one choice."""
    last: Added | None = None
    for each in (added for payload in payloads for added in payload.added):
        if last is not None and _continues(last, each):
            last.token_ids += each.token_ids
            last.finish_reason = each.finish_reason
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _continues(last: Added, each: Added) -> bool:
    same = (last.prompt, last.choice, last.version) == (each.prompt, each.choice, each.version)
    return same and len(last.token_ids) < MOST_TOKENS and not last.finish_reason
