"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.request import new_request_id
from pdserve.common.core.sampling import SampledToken
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.admission import Batch
from pdserve.router.generation import TextDelta
from pdserve.router.http.request import SERVING, client_of, given_by, preprocess
from pdserve.router.http.response import MIN_LOGPROB, Response, logprob_of


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    preprocessed = await preprocess(request, "chat")
    body, (token_ids,) = preprocessed.body, preprocessed.prompts
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generation = serving.make_request(
        given_by(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        request_id=new_request_id("chatcmpl"),
        prompt_token_ids=token_ids,
        max_tokens=serving.model.fit_max_tokens(len(token_ids), limit, None, "messages"),
        batch=Batch(client_of(request), len(token_ids)),
    )
    choices = ChatChoices(serving.model.tokenizer if body.logprobs else None)
    return await Response(generation.request_id, body, choices, [generation]).respond(request)


class ChatChoices:
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
        return _logprobs(delta.tokens, self._tokenizer) if self._tokenizer else None


def _chunk(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(
    tokens: Sequence[SampledToken], tokenizer: Tokenizer
) -> dict[str, list[dict[str, Any]]]:
    """`/v1/chat/completions`: one entry per token."""
    content = []
    for token in tokens:
        top = token.logprobs.top if token.logprobs else ()
        entry = _logprob_entry(token.token_id, logprob_of(token), tokenizer)
        entry["top_logprobs"] = [_logprob_entry(i, max(p, MIN_LOGPROB), tokenizer) for i, p in top]
        content.append(entry)
    return {"content": content}


def _logprob_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
