"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import new_request_id
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.app_state import DEFAULT_MAX_TOKENS
from pdserve.router.api.sampling import make_choices, with_seed
from pdserve.router.api.schema import CompletionBody
from pdserve.router.http.logprobs import CompletionLogprobs, prompt_logprobs
from pdserve.router.http.request import STATE, client_of, preprocess
from pdserve.router.http.response import OpenAIWriter, respond
from pdserve.router.requests.generation import MAX_BURST, GenerationRequest, TextDelta
from pdserve.router.requests.queue_bounds import Batch


async def create_completion(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    asked = await preprocess(request, "completion")
    body, prompts = asked.body, asked.prompts
    response_id = new_request_id("cmpl")
    batch = Batch(client_of(request), sum(map(len, prompts)))
    prompts_only = bool(body.max_tokens == 0 and body.echo)
    logprobs, n = body.logprobs, make_choices(body.n)
    best = n if body.best_of is not None and body.best_of > n else None
    if best is not None:
        logprobs, n = logprobs or 0, body.best_of
    given = body.given(
        grammar=asked.grammar,
        constraint=asked.structured and asked.structured.param,
        logprobs=logprobs,
        n=n,
        prompt_logprobs=body.prompt_top,
    )
    state.pipeline.check_room(batch.client, batch.num_tokens)
    generations = []
    alike: dict[int, GenerationRequest] = {}  # by max_tokens: all else is the body's
    for i, token_ids in enumerate(prompts):
        if i % MAX_BURST == MAX_BURST - 1:
            await asyncio.sleep(0)
        request_id = response_id if len(prompts) == 1 else f"{response_id}-{i}"
        max_tokens = state.model.fit_max_tokens(
            len(token_ids), 1 if prompts_only else body.max_tokens, DEFAULT_MAX_TOKENS, "prompt"
        )
        own: dict[str, Any] = {"request_id": request_id, "prompt_token_ids": token_ids}
        own["before"] = token_ids if body.echo and not prompts_only else ()
        if (like := alike.get(max_tokens)) is None:
            like = alike[max_tokens] = state.make_request(
                given,
                **own,
                max_tokens=max_tokens,
                batch=batch,
                model=body.model,
                prompt_only=prompts_only,
            )
            generations.append(like)
        else:
            generations.append(replace(like, **own, sampling=with_seed(like.sampling, body.seed)))
    choices = CompletionChoiceWriter(state.model.tokenizer, body, asked.texts, prompts)
    model = state.response_model(body.model)
    writer = OpenAIWriter(response_id, model, body, choices, generations, best)
    return await respond(request, await writer.resumable(request, asked), writer)


class CompletionChoiceWriter:
    """A `ChoiceWriter`."""

    object_name: ClassVar[str] = "text_completion"
    chunk_object_name: ClassVar[str] = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        texts: Sequence[str],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """`texts` are the prompts', if they are echoed; `prompts` their token ids."""
        self._tokenizer = tokenizer
        self._body = body
        self._texts = texts
        self._prompts = prompts
        self._n = make_choices(body.n)
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by the choice's index
        self._begun: set[int] = set()
        self.scored: dict[int, PromptLogprobs] = {}
        self.beside: dict[str, Any] = {}

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        body, prompt, echo = self._body, self._prompts[index // self._n], ""
        scored = self.scored.pop(index, None)
        if begins := index not in self._begun:
            self._begun.add(index)
            echo = self._texts[index // self._n] if self._texts else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + whole.text,
            "logprobs": None,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }
        if body.logprobs is not None:
            if begins:
                self._logprobs[index] = CompletionLogprobs(self._tokenizer, body, echo, prompt)
            choice["logprobs"] = self._logprobs[index].add(whole.tokens, prompt, scored)
        if scored is not None and (num_top := body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt, scored, num_top)
        if body.return_token_ids:
            choice["token_ids"] = [token.token_id for token in whole.tokens]
            if begins:
                choice["prompt_token_ids"] = list(prompt)
        return choice

    def usage(self) -> dict[str, Any]:
        return {}

    def chunks(self, index: int, delta: TextDelta) -> Sequence[dict[str, Any]]:
        """Returns None for a delta without text, unless its tokens were requested."""
        choice = self.choice(index, delta)
        if choice["text"] or choice["finish_reason"]:
            return (choice,)
        tokens = delta.tokens and (choice["logprobs"] or self._body.return_token_ids)
        return (choice,) if tokens else ()
