"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from aiohttp import web

from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.request import new_request_id
from pdserve.common.core.sampling import SampledToken
from pdserve.common.text.detokenizer import TextOffsets
from pdserve.common.text.tokenizer import Tokenizer
from pdserve.router.api.prompt_logprobs import prompt_logprobs
from pdserve.router.api.sampling import make_choices
from pdserve.router.api.schema import CompletionBody
from pdserve.router.http.request import SERVING, client_of, given_by, preprocess
from pdserve.router.http.response import MIN_LOGPROB, Response, logprob_of, token_name
from pdserve.router.requests.admission import Batch
from pdserve.router.requests.generation import MAX_BURST, TextDelta
from pdserve.router.serving import DEFAULT_MAX_TOKENS


async def create_completion(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    preprocessed = await preprocess(request, "completion")
    body, prompts = preprocessed.body, preprocessed.prompts
    response_id = new_request_id("cmpl")
    batch = Batch(client_of(request), sum(map(len, prompts)))
    no_answer = bool(body.max_tokens == 0 and body.echo)
    logprobs, n = body.logprobs, make_choices(body.n)
    best = n if body.best_of is not None and body.best_of > n else None
    if best is not None:
        logprobs, n = logprobs or 0, body.best_of
    given = given_by(
        body,
        grammar=preprocessed.grammar,
        logprobs=logprobs,
        n=n,
        prompt_logprobs=body.prompt_top,
    )
    requests = []
    for i, token_ids in enumerate(prompts):
        if i % MAX_BURST == MAX_BURST - 1:
            await asyncio.sleep(0)
        request_id = response_id if len(prompts) == 1 else f"{response_id}-{i}"
        max_tokens = serving.model.fit_max_tokens(
            len(token_ids), 1 if no_answer else body.max_tokens, DEFAULT_MAX_TOKENS, "prompt"
        )
        requests.append(
            serving.make_request(
                given,
                request_id=request_id,
                prompt_token_ids=token_ids,
                max_tokens=max_tokens,
                batch=batch,
                model=body.model,
            )
        )
    choices = CompletionChoices(serving.model.tokenizer, body, preprocessed.texts, prompts)
    response = Response(response_id, body, choices, requests, best=best, no_answer=no_answer)
    return await response.respond(request)


class CompletionChoices:
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
        self.beside: dict[str, Any] = {}
        choices = range(len(prompts) * make_choices(body.n))
        self._logprobs: dict[int, CompletionLogprobs] = {}
        if body.logprobs is not None:
            n = make_choices(body.n)
            self._logprobs = {
                i: CompletionLogprobs(tokenizer, body, texts[i // n] if texts else "")
                for i in choices
            }
        self._tokenizer = tokenizer
        self._body = body
        self._prompts = prompts
        self.scored: dict[int, PromptLogprobs] = {}
        self._token_ids = bool(body.return_token_ids)
        self._prompt_ids: dict[int, Sequence[int]] = {}  # handed out once
        if self._token_ids:
            self._prompt_ids = {i: prompts[i // make_choices(body.n)] for i in choices}
        # What each choice's text begins with; handed out once.
        self._echo: dict[int, str] = {}
        if texts:
            self._echo = {i: texts[i // make_choices(body.n)] for i in choices}

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        logprobs, scored = self._logprobs.get(index), self.scored.pop(index, None)
        prompt = self._prompts[index // make_choices(self._body.n)]
        choice = {
            "index": index,
            "text": self._echo.pop(index, "") + whole.text,
            "logprobs": logprobs.add(whole.tokens, prompt, scored) if logprobs else None,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
        }
        if scored is not None and (num_top := self._body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt, scored, num_top)
        if self._token_ids:
            choice["token_ids"] = [token.token_id for token in whole.tokens]
            if index in self._prompt_ids:
                choice["prompt_token_ids"] = list(self._prompt_ids.pop(index))
        return choice

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """A delta whose text is held back gives no event, unless it tells of tokens."""
        choice = self.choice(index, delta)
        tells = delta.tokens and (choice["logprobs"] or self._token_ids)
        if choice["text"] or choice["finish_reason"] or tells:
            yield choice


class CompletionLogprobs:
    """`/v1/completions`: parallel lists. One object per choice: it counts text
    offsets, in characters of the text that the client gets."""

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody, echo: str = "") -> None:
        """`echo` is the text of the prompt, if that comes before the answer's."""
        self._tokenizer = tokenizer
        self._body = body
        self._echo = echo
        skip_special = body.skip_special_tokens is not False
        self._offsets = TextOffsets(tokenizer, skip_special, start=len(echo))

    def add(
        self,
        tokens: Sequence[SampledToken],
        prompt: Sequence[int] = (),
        scored: PromptLogprobs | None = None,
    ) -> dict[str, list[Any]]:
        """Of more tokens; and before them of the `prompt`, if it is echoed and `scored`."""
        echoed = scored if self._body.echo else None
        offsets = [self._offsets.push(token.token_id) for token in tokens]
        if echoed is not None:
            before = echoed.tokens(prompt[1:], self._body.logprobs or 0)
            tokens = [SampledToken(prompt[0]), *before, *tokens]
            offsets = _echo_offsets(self._tokenizer, prompt, self._echo) + offsets
        result: dict[str, list[Any]] = {
            "text_offset": offsets,
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token in tokens:
            result["tokens"].append(self._name(token.token_id))
            result["token_logprobs"].append(logprob_of(token))
            result["top_logprobs"].append(self._top(token))
        if echoed is not None:
            result["token_logprobs"][0] = result["top_logprobs"][0] = None
        return result

    def _top(self, token: SampledToken) -> dict[str, float]:
        """The most likely tokens and the chosen one, which may be one of them."""
        top = token.logprobs.top if token.logprobs else ()
        pairs: dict[str, float] = {}
        for token_id, logprob in (*top, (token.token_id, logprob_of(token))):
            pairs.setdefault(self._name(token_id), max(logprob, MIN_LOGPROB))
        return pairs

    def _name(self, token_id: int) -> str:
        """The token's text; parts of a character, which have none, as `bytes:\\xf0\\x9f`, so
        that two of them differ (as OpenAI's API names them)."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return token_name(token_id, text, self._body)


def _echo_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Where each token of a prompt begins in its text, as it was given or is made of them. Tokens
    that the tokenizer puts before a text (a BOS) are at its begin."""
    decoded = tokenizer.decode(prompt, skip_special_tokens=False)
    is_its_end = decoded.endswith(text)
    offsets = TextOffsets(tokenizer, skip_special_tokens=not is_its_end)
    before = len(decoded) - len(text) if is_its_end else 0
    return [min(max(0, offsets.push(each) - before), len(text)) for each in prompt]
