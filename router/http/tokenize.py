"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from aiohttp import web

from common.core.errors import InvalidRequest
from router.http.chat import encode_messages
from router.http.encoding import json_response
from router.http.front import FRONT, Front, read_body
from router.http.schema import DetokenizeBody, TokenizeBody
from router.served_model import off_loop


async def tokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    tokens = await _encode(front, await read_body(request, TokenizeBody))
    return json_response(
        {"tokens": tokens, "count": len(tokens), "max_model_len": front.model.max_model_len}
    )


async def detokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    body = await read_body(request, DetokenizeBody)
    token_ids = front.model.check_ids(body.tokens, "tokens")
    text = await off_loop(len(token_ids), lambda: front.model.tokenizer.decode(token_ids, False))
    return json_response({"prompt": text})


async def _encode(front: Front, body: TokenizeBody) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        return await encode_messages(front, body, body.messages)
    return await front.model.encode(body.prompt or "", body.add_special_tokens is not False)
