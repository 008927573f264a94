"""Resumable streams, and one answer for an Idempotency-Key, over gRPC: what makes a request the
same."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from time import time

from pdserve.common.core.errors import InvalidRequest
from pdserve.common.rpc.pb import inference_pb2 as pb
from pdserve.router.requests import event_ids
from pdserve.router.requests.event_ids import Drawn, Resumable
from pdserve.router.requests.generation import GenerationRequest
from pdserve.router.requests.keyed import keyed


async def resumable(
    secrets: Sequence[bytes],
    request: pb.GenerateRequest,
    api_key: str,
    generation: GenerationRequest,
    public_id: str,
) -> Resumable | None:
    """Returns the stream if the request makes one resumable, or resumes one. `secrets` are those of
    `event_ids.resumable`, `api_key` is as the client sent it.

    Raises:
        InvalidRequest: it cannot be resumable.
        PermissionDenied: an id belongs to another request.
    """
    if not request.resumable:
        if request.resume:
            raise InvalidRequest("`resume` needs `resumable`", param="resume")
        return None
    if generation.sampling.prompt_logprobs is not None:
        raise InvalidRequest("resumable goes without prompt_logprobs", param="resumable")
    drawn = Drawn(public_id, int(time()), [generation.sampling.seed])
    digest = _digest(request, api_key, generation)
    return await event_ids.resumable(secrets, digest, request.resume, [generation], drawn)


def idempotent(
    secrets: Sequence[bytes],
    request: pb.GenerateRequest,
    api_key: str,
    given: str | None,
    generation: GenerationRequest,
) -> GenerationRequest | None:
    """Returns the generation for a request with an Idempotency-Key, `given`, None for one without.
    Raises as `keyed`."""
    if given is None:
        return None
    digest = _digest(request, api_key, generation)
    seed = request.sampling.seed if request.sampling.HasField("seed") else -1
    found = keyed(secrets, given, api_key, digest, [generation], "gen", seeded=seed != -1)
    return found[1][0] if found else None


def _digest(request: pb.GenerateRequest, api_key: str, generation: GenerationRequest) -> bytes:
    """Returns a digest of the request and of the API key with which it came."""
    same = pb.GenerateRequest()
    same.CopyFrom(request)
    same.ClearField("resume")
    adapter = generation.adapter.digest if generation.adapter else ""
    parts = ("grpc", api_key, adapter, str(list(generation.prompt_token_ids)))
    digest = sha256(same.SerializeToString(deterministic=True))
    for part in parts:
        digest.update(sha256(part.encode()).digest())
    return digest.digest()
