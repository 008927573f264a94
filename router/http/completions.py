"""POST /v1/completions."""

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
from pdserve.router.http.schema import CompletionBody
from pdserve.router.sampling import make_choices
from pdserve.router.serving import DEFAULT_MAX_TOKENS


async def create_completion(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    preprocessed = await preprocess(request, "completion")
    body, prompts = preprocessed.body, preprocessed.prompts
    response_id = new_request_id("cmpl")
    batch = Batch(client_of(request), sum(map(len, prompts)))
    requests = [
        serving.make_request(
            given_by(body, logprobs=body.logprobs),
            request_id=response_id if len(prompts) == 1 else f"{response_id}-{i}",
            prompt_token_ids=token_ids,
            max_tokens=serving.model.fit_max_tokens(
                len(token_ids), body.max_tokens, DEFAULT_MAX_TOKENS, "prompt"
            ),
            batch=batch,
        )
        for i, token_ids in enumerate(prompts)
    ]
    choices = CompletionChoices(serving.model.tokenizer, body, preprocessed.texts, len(prompts))
    return await Response(response_id, body, choices, requests).respond(request)


class CompletionChoices:
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


class CompletionLogprobs:
    """`/v1/completions`: parallel lists. One object per choice: it counts text offsets."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def add(self, tokens: Sequence[SampledToken]) -> dict[str, list[Any]]:
        result: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token in tokens:
            text = self._tokenizer.token_text(token.token_id)
            result["text_offset"].append(self._offset)
            result["tokens"].append(self._name(token.token_id))
            result["token_logprobs"].append(logprob_of(token))
            result["top_logprobs"].append(self._top(token))
            self._offset += len(text)
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
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
