"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from aiohttp import web

from router.http.encoding import json_response
from router.http.front import FRONT


async def tokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    (tokens,) = (await front.prepare(request, "tokenize")).prompts
    return json_response(
        {"tokens": list(tokens), "count": len(tokens), "max_model_len": front.model.max_model_len}
    )


async def detokenize(request: web.Request) -> web.Response:
    (text,) = (await request.app[FRONT].prepare(request, "detokenize")).texts
    return json_response({"prompt": text})
