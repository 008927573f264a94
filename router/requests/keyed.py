"""Requests with an Idempotency-Key: one answer, whichever routers are asked for it, and how often.

What would be drawn at random, the answer's id and the seeds, follows from the key, the client's API
key and the request, so every router that computes the answer gives the same. So that one computes
it and the others join, the request has an `AnswerKey` (`cluster/claims.py`).
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from pdserve.common.core.errors import InvalidRequest
from pdserve.router.cluster.claims import AnswerKey
from pdserve.router.requests.generation import GenerationRequest

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY = 255  # characters


def keyed(
    secrets: Sequence[bytes],
    given: str | None,
    api_key: str,
    digest: bytes,
    generations: Sequence[GenerationRequest],
    prefix: str,
    seeded: bool,
) -> tuple[str, list[GenerationRequest]] | None:
    """Returns the answer's id and the generations for a request with a key, None for one without.
    `secrets` are those of `event_ids.resumable`; `given` and `api_key` are as the client sent them;
    `digest` is of the request and the API key; `prefix`: of the id; `seeded`: the client has given
    a seed.

    Raises:
        InvalidRequest: the key is invalid, or the server has no secret.
    """
    if given is None:
        return None
    if not 0 < len(given) <= MAX_KEY:
        raise InvalidRequest(f"{IDEMPOTENCY_KEY}: give 1 to {MAX_KEY} characters")
    if not secrets:
        raise InvalidRequest(f"{IDEMPOTENCY_KEY} needs a server with a --cluster-key")
    key = given.encode(errors="surrogateescape")
    ours = hmac.digest(secrets[0], digest + key, "sha256")
    whose = sha256(api_key.encode(errors="surrogateescape")).digest()
    clients = hmac.digest(secrets[0], b"claim" + whose + key, "sha256")
    answer_id = f"{prefix}-{_drawn(ours, 'id').hex()[:24]}"
    made = []
    for i, each in enumerate(generations):
        if not seeded:
            seed = int.from_bytes(_drawn(ours, f"seed {i}")[:8]) >> 1
            each = replace(each, sampling=replace(each.sampling, seed=seed))
        request_id = answer_id if len(generations) == 1 else f"{answer_id}-{i}"
        name = AnswerKey(claim=_drawn(clients, f"claim {i}"), job=_drawn(ours, f"job {i}"))
        made.append(replace(each, request_id=request_id, key=name))
    return answer_id, made


def _drawn(key: bytes, what: str) -> bytes:
    return hmac.digest(key, what.encode(), "sha256")
