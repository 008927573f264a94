"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.request import new_request_id
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.admission import Batch
from pdserve.router.generation import TextDelta
from pdserve.router.http.front import FRONT
from pdserve.router.http.generation_body import make_request, reply_options
from pdserve.router.http.logprobs import chat_logprobs
from pdserve.router.http.reply import Reply


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    prepared = await front.prepare(request, "chat")
    body, (token_ids,) = prepared.body, prepared.prompts
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generation = make_request(
        body,
        front,
        request_id=new_request_id("chatcmpl"),
        prompt_token_ids=token_ids,
        max_tokens=front.model.fit_max_tokens(len(token_ids), limit, None, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        batch=Batch(front.client(request), len(token_ids)),
    )
    reply = Reply(
        id=generation.request_id,
        model=front.model.name,
        wording=ChatWording(front.model.tokenizer if body.logprobs else None),
        requests=[generation],
        **reply_options(request, body),
    )
    return await reply.respond(request, front.pipeline)


class ChatWording:
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """With a tokenizer, choices carry log-probabilities."""
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": whole.text}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """The role first, once; then content; the finish reason in an event of its own."""
        if index not in self._begun:
            self._begun.add(index)
            yield _chunk(index, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta)
        if delta.text or (logprobs and delta.tokens):
            yield _chunk(index, {"content": delta.text}) | {"logprobs": logprobs}
        if delta.finish_reason:
            ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield _chunk(index, {}) | ending

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        return chat_logprobs(delta.tokens, self._tokenizer) if self._tokenizer else None


def _chunk(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
