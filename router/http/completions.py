"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.request import new_request_id
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.admission import Batch
from pdserve.router.generation import GenerationRequest, TextDelta
from pdserve.router.http.front import FRONT, Front
from pdserve.router.http.generation_body import make_request, reply_options
from pdserve.router.http.logprobs import CompletionLogprobs
from pdserve.router.http.reply import Reply
from pdserve.router.http.schema import CompletionBody
from pdserve.router.sampling import make_choices

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    prepared = await front.prepare(request, "completion")
    body, prompts = prepared.body, prepared.prompts
    reply_id = new_request_id("cmpl")
    batch = Batch(front.client(request), sum(map(len, prompts)))
    requests = _requests(body, front, reply_id, prompts, batch)
    reply = Reply(
        id=reply_id,
        model=front.model.name,
        wording=CompletionWording(front.model.tokenizer, body, prepared.texts, len(prompts)),
        requests=requests,
        **reply_options(request, body),
    )
    return await reply.respond(request, front.pipeline)


def _requests(
    body: CompletionBody,
    front: Front,
    reply_id: str,
    prompts: Sequence[Sequence[int]],
    batch: Batch,
) -> list[GenerationRequest]:
    return [
        make_request(
            body,
            front,
            request_id=reply_id if len(prompts) == 1 else f"{reply_id}-{i}",
            prompt_token_ids=token_ids,
            max_tokens=front.model.fit_max_tokens(
                len(token_ids), body.max_tokens, DEFAULT_MAX_TOKENS, "prompt"
            ),
            logprobs=body.logprobs,
            batch=batch,
        )
        for i, token_ids in enumerate(prompts)
    ]


class CompletionWording:
    object_name: ClassVar[str] = "text_completion"
    chunk_object_name: ClassVar[str] = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionBody, texts: Sequence[str], num_prompts: int
    ) -> None:
        """`texts` are the prompts', if they are echoed."""
        choices = range(num_prompts * make_choices(body.n))
        self._logprobs: dict[int, CompletionLogprobs] = {}
        if body.logprobs is not None:
            self._logprobs = {i: CompletionLogprobs(tokenizer) for i in choices}
        # What each choice's text begins with; handed out once.
        self._echo: dict[int, str] = {}
        if texts:
            self._echo = {i: texts[i // make_choices(body.n)] for i in choices}

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        logprobs = self._logprobs.get(index)
        return {
            "index": index,
            "text": self._echo.pop(index, "") + whole.text,
            "logprobs": logprobs.add(whole.tokens) if logprobs else None,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """A delta whose text is held back gives no event, unless it has log-probabilities."""
        choice = self.choice(index, delta)
        if choice["text"] or choice["finish_reason"] or (choice["logprobs"] and delta.tokens):
            yield choice
