"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.request import new_request_id
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.admission import Batch
from pdserve.router.generation import TextDelta
from pdserve.router.http.request import SERVING, client_of, given_by, preprocess
from pdserve.router.http.response import MIN_LOGPROB, Response, logprob_of, token_name
from pdserve.router.http.schema import ChatBody


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
    choices = ChatChoices(serving.model.tokenizer, body, token_ids)
    return await Response(generation.request_id, body, choices, [generation]).respond(request)


class ChatChoices:
    object_name: ClassVar[str] = "chat.completion"
    chunk_object_name: ClassVar[str] = "chat.completion.chunk"

    def __init__(
        self, tokenizer: Tokenizer, body: ChatBody, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._begun: set[int] = set()
        self.beside: dict[str, Any] = {}
        if body.return_token_ids:
            self.beside["prompt_token_ids"] = list(prompt_token_ids)

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": whole.text}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(whole),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
            **self._ids(whole),
        }

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """The role first, once; then content; the finish reason in an event of its own."""
        if index not in self._begun:
            self._begun.add(index)
            yield _chunk(index, {"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta)
        if delta.text or (delta.tokens and (logprobs or self._body.return_token_ids)):
            chunk = _chunk(index, {"content": delta.text}) | {"logprobs": logprobs}
            yield chunk | self._ids(delta)
        if delta.finish_reason:
            ending = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield _chunk(index, {}) | ending

    def _ids(self, delta: TextDelta) -> dict[str, list[int]]:
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": [token.token_id for token in delta.tokens]}

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        """One entry per token."""
        if not self._body.logprobs:
            return None
        content = []
        for token in delta.tokens:
            top = token.logprobs.top if token.logprobs else ()
            entry = self._entry(token.token_id, logprob_of(token))
            entry["top_logprobs"] = [self._entry(i, max(p, MIN_LOGPROB)) for i, p in top]
            content.append(entry)
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(token_id, self._tokenizer.token_text(token_id), self._body),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _chunk(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
