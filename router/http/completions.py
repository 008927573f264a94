"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from aiohttp import web

from common.core.errors import InvalidRequest
from common.core.ids import new_request_id
from common.core.sampling import check_range
from common.text.tokenizer import Tokenizer
from router.admission import Batch
from router.generation import GenerationRequest, TextDelta
from router.http.front import FRONT, Front, read_body
from router.http.generation_body import check_response_format, make_request, reply_options
from router.http.logprobs import CompletionLogprobs
from router.http.reply import Reply
from router.http.schema import CompletionBody
from router.sampling import make_choices
from router.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024  # of one request; each waits for a place of its own


async def create_completion(request: web.Request) -> web.StreamResponse:
    front = request.app[FRONT]
    body = await read_body(request, CompletionBody)
    _check_supported(body)
    reply_id = new_request_id("cmpl")
    prompts = await encode_prompts(body.prompt, front.model)
    batch = Batch(front.client(request), sum(map(len, prompts)))
    requests = _requests(body, front, reply_id, prompts, batch)
    reply = Reply(
        id=reply_id,
        model=front.model.name,
        wording=CompletionWording(front.model.tokenizer, body, prompts),
        requests=requests,
        **reply_options(request, body),
    )
    return await reply.respond(request, front.generator)


async def encode_prompts(
    prompt: str | list[str] | list[int] | list[list[int]], model: ServedModel
) -> list[tuple[int, ...]]:
    """The token ids of every prompt of a body."""
    if isinstance(prompt, str):
        return [await model.encode(prompt)]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        return [model.check_ids(prompt, "prompt")]  # type: ignore[arg-type]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt takes at most {MAX_PROMPTS} prompts", param="prompt")
    return [
        await model.encode(one) if isinstance(one, str) else model.check_ids(one, "prompt")  # type: ignore[arg-type]
        for one in prompt
    ]


def _requests(
    body: CompletionBody,
    front: Front,
    reply_id: str,
    prompts: Sequence[tuple[int, ...]],
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


def _check_supported(body: CompletionBody) -> None:
    check_response_format(body)
    if body.suffix:
        raise InvalidRequest("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != make_choices(body.n):
        raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, 5)
        if body.echo:
            raise InvalidRequest("logprobs of an echoed prompt are not supported", param="echo")


class CompletionWording:
    object_name: ClassVar[str] = "text_completion"
    chunk_object_name: ClassVar[str] = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionBody, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        choices = range(len(prompts) * make_choices(body.n))
        self._logprobs: dict[int, CompletionLogprobs] = {}
        if body.logprobs is not None:
            self._logprobs = {i: CompletionLogprobs(tokenizer) for i in choices}
        # What each choice's text begins with; handed out once.
        self._echo: dict[int, str] = {}
        if body.echo:
            texts = _prompt_texts(tokenizer, body, prompts)
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


def _prompt_texts(
    tokenizer: Tokenizer, body: CompletionBody, prompts: Sequence[tuple[int, ...]]
) -> list[str]:
    """The prompts as text: the client's own where it gave text."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(given[0], str):
        return [str(text) for text in given]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
