"""Request bodies to generation requests: what completions and chat do alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from pdserve.common.core.sampling import PARAMETERS
from pdserve.router.admission import Batch
from pdserve.router.generation import GenerationRequest
from pdserve.router.http.front import Front
from pdserve.router.http.reply import TIMELINE_HEADER
from pdserve.router.http.schema import GenerationBody
from pdserve.router.sampling import make_choices, make_sampling, make_stop


def make_request(
    body: GenerationBody,
    front: Front,
    *,
    request_id: str,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    logprobs: int | None,
    batch: Batch,
) -> GenerationRequest:
    """Raises InvalidRequest when a value is out of range."""
    given = {each.name: getattr(body, each.name) for each in PARAMETERS.values() if each.http}
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=make_sampling({**given, "logprobs": logprobs}, front.model, max_tokens),
        n=make_choices(body.n),
        stop=make_stop(body.stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=front.keys.cache_salt(batch.client, body.cache_salt),
        batch=batch,
    )


def reply_options(request: web.Request, body: GenerationBody) -> dict[str, Any]:
    """The part of a Reply that every endpoint reads from the same fields."""
    options = body.stream_options
    return {
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "include_timeline": request.headers.get(TIMELINE_HEADER) == "1",
    }
