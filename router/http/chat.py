"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.request import new_request_id
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.admission import Batch
from pdserve.router.generation import GenerationRequest, TextDelta
from pdserve.router.http.foreign import ForeignBody
from pdserve.router.http.preprocess import as_chat
from pdserve.router.http.request import SERVING, client_of, given_by, preprocess
from pdserve.router.http.response import MIN_LOGPROB, Response, logprob_of, token_name
from pdserve.router.http.schema import ChatBody


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a body asks of the pipeline, and what makes its answer of that."""

    body: ChatBody
    generation: GenerationRequest
    choices: ChatChoices


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    asked, body = await begin(request, "chat", "chatcmpl")
    response = Response(asked.generation.request_id, body, asked.choices, [asked.generation])
    return await response.respond(request)


async def begin(request: web.Request, kind: str, prefix: str) -> tuple[ChatRequest, Any]:
    """Reads a body of chat's or of what asks for the same in other words: the request and the
    body. `prefix` is that of the answer's id."""
    serving = request.app[SERVING]
    preprocessed = await preprocess(request, kind)
    given, (token_ids,) = preprocessed.body, preprocessed.prompts
    body = as_chat(given, messages=False) if isinstance(given, ForeignBody) else given
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generation = serving.make_request(
        given_by(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        request_id=new_request_id(prefix),
        prompt_token_ids=token_ids,
        max_tokens=serving.model.fit_max_tokens(len(token_ids), limit, None, "messages"),
        batch=Batch(client_of(request), len(token_ids)),
    )
    choices = ChatChoices(serving.model.tokenizer, body, token_ids)
    return ChatRequest(body, generation, choices), given


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
