"""Generations to one HTTP response, whole or streamed; endpoints differ in their choices' shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import msgspec
from aiohttp import web

from pdserve.common.core.errors import PdserveError
from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.common.core.sampling import SampledToken
from pdserve.router.api.schema import GenerationBody
from pdserve.router.http.encoding import MUCH, error_body, json_response, made
from pdserve.router.http.request import SERVING
from pdserve.router.http.stream import News, respond_stream, unfinished
from pdserve.router.requests.arrival import arrival_var
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    TextDelta,
    coalesced,
    join,
    merge,
    prompt_only,
)

_encode = msgspec.json.Encoder().encode
MIN_LOGPROB = -9999.0  # JSON has no -Infinity


class ChoiceBuilder(Protocol):
    """The shape of an endpoint's choices. One object per request; it may remember choices."""

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    beside: dict[str, Any]  # the choices of an answer, or those of a stream's first event

    scored: dict[int, PromptLogprobs]
    """By the choice's index what is to be told of its prompt, once. It may be much: on a thread."""

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        """A complete choice; `whole` holds all of its text and tokens."""

    def chunks(self, index: int, delta: TextDelta) -> Iterable[dict[str, Any]]:
        """The choices of the events that tell of one delta, one choice an event."""


@dataclass
class Response:
    """One response in the making."""

    id: str
    body: GenerationBody
    choices: ChoiceBuilder
    requests: Sequence[GenerationRequest]
    best: int | None = None  # of each prompt's choices only so many are answered
    no_answer: bool = False  # prompts alone
    model: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    stats: dict[int, GenerationStats] = field(default_factory=dict)
    num_tokens: int = 0  # streamed so far
    last: bytes = b"data: [DONE]\n\n"  # of a stream

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Runs the generations and answers.

        Raises:
            PdserveError: they failed before anything was sent.
        """
        serving = request.app[SERVING]
        self.model = serving.answering(self.body.model)
        sources = [serving.pipeline.generate(one) for one in self.requests]
        if self.no_answer:
            sources = [prompt_only(source) for source in sources]
        async with aclosing(merge(sources)) as updates:
            if self.body.stream:
                return await respond_stream(request, updates, self)
            return await self._respond_whole(updates)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.body.stream_options
        return bool(options and options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.continuous_usage_stats and self.include_usage)

    async def _respond_whole(self, updates: AsyncGenerator[News, None]) -> web.Response:
        deltas: dict[int, list[TextDelta]] = {}
        async for batch in updates:
            for prompt, update in batch:
                if isinstance(update, GenerationStats):
                    self.stats[prompt] = update
                elif isinstance(update, PromptLogprobs):
                    self._scored(prompt, update)
                else:
                    deltas.setdefault(self._index(prompt, update), []).append(update)
        body = self._envelope(self.choices.object_name)
        num_deltas = sum(map(len, deltas.values()))
        if self.choices.scored or self.requests[0].sampling.logprobs is not None:
            num_deltas = MUCH
        body["choices"] = await made(num_deltas, lambda: self._choices(deltas))
        body["usage"] = self._usage()
        return json_response(body | self.choices.beside | extension(self.stats.values()))

    def _best(self, deltas: dict[int, list[TextDelta]], n: int) -> dict[int, list[TextDelta]]:
        """Of each prompt's choices the `n` whose tokens are the most likely, the best first."""

        def likelihood(index: int) -> float:
            tokens = [logprob_of(token) for delta in deltas[index] for token in delta.tokens]
            return sum(tokens) / max(1, len(tokens))

        best: dict[int, list[TextDelta]] = {}
        for prompt, request in enumerate(self.requests):
            indices = range(prompt * request.n, (prompt + 1) * request.n)
            ranked = sorted(indices, key=likelihood, reverse=True)
            best |= {prompt * n + place: deltas[i] for place, i in enumerate(ranked[:n])}
        return best

    def _choices(self, deltas: dict[int, list[TextDelta]]) -> list[msgspec.Raw]:
        """The JSON of whole choices."""
        if self.best is not None:
            deltas = self._best(deltas, self.best)
        choice = self.choices.choice
        return [msgspec.Raw(_encode(choice(i, join(deltas.pop(i))))) for i in sorted(deltas)]

    # ---- as a stream ------------------------------------------------------------------------

    def begin(self) -> bytes:
        return b""

    async def told(self, news: News) -> bytes:
        return _frames(await self._encoded(news))

    def end(self) -> bytes:
        usage, more = self._usage(), extension(self.stats.values())
        if not (self.include_usage or more):
            return b""
        head = self._envelope(self.choices.chunk_object_name)
        return _frames([_encode(head | {"choices": [], "usage": usage} | more)])

    def failed(self, error: PdserveError) -> bytes:
        return _frames([_encode(error_body(error))])

    async def _encoded(self, batch: News) -> list[bytes]:
        """The JSON of events; a thread encodes those that tell of a prompt."""
        for prompt, update in batch:
            if isinstance(update, PromptLogprobs):
                self._scored(prompt, update)
        if self.choices.scored:
            return await asyncio.to_thread(self._chunks, batch)
        return self._chunks(batch)

    def _chunks(self, batch: News) -> list[bytes]:
        chunks = []
        for prompt, update in coalesced(batch):
            if isinstance(update, PromptLogprobs):
                continue
            if isinstance(update, GenerationStats):
                self.stats[prompt] = update
                continue
            self.num_tokens += len(update.tokens)
            for choice in self.choices.chunks(self._index(prompt, update), update):
                chunks.append(b"%b%b%b" % (self._chunk_head, _encode(choice), self._tail()))
        return chunks

    @cached_property
    def _chunk_head(self) -> bytes:
        """The JSON of a chunk up to its one choice: it is the same in all of them."""
        envelope = _encode(self._envelope(self.choices.chunk_object_name))
        return envelope.removesuffix(b"}") + b',"choices":['

    def _tail(self) -> bytes:
        """Of the next chunk; mostly the same."""
        rest, self.choices.beside = self.choices.beside, {}
        if self.continuous_usage:
            prompt = sum(len(one.prompt_token_ids) for one in self.requests)
            usage = _tokens(prompt, self.num_tokens)
        elif rest:
            usage = None
        else:
            return self._chunk_tail
        if self.include_usage:
            rest["usage"] = usage
        return b"]," + _encode(rest)[1:]

    @cached_property
    def _chunk_tail(self) -> bytes:
        return b'],"usage":null}' if self.include_usage else b"]}"

    def _scored(self, prompt: int, found: PromptLogprobs) -> None:
        n = self.best or self.requests[prompt].n
        self.choices.scored |= dict.fromkeys(range(prompt * n, (prompt + 1) * n), found)

    def _index(self, prompt: int, delta: TextDelta) -> int:
        return prompt * self.requests[prompt].n + delta.choice

    def _envelope(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def _usage(self) -> dict[str, Any]:
        """Sums over the prompts; a prompt counts once, however many choices share it."""
        if len(self.stats) != len(self.requests):
            raise unfinished()
        prompt = sum(stats.prompt_tokens for stats in self.stats.values())
        completion = sum(stats.completion_tokens for stats in self.stats.values())
        cached = sum(stats.cached_tokens for stats in self.stats.values())
        details = {"cached_tokens": cached}
        return _tokens(prompt, completion) | {"prompt_tokens_details": details}


def extension(stats: Iterable[GenerationStats]) -> dict[str, Any]:
    """Our own key, for clients that ask: when things happened to the prompt that was answered last,
    and where the time went."""
    arrival = arrival_var.get()
    if arrival is None or not arrival.wants_timeline:
        return {}
    last = max(stats, key=lambda stats: stats.timeline.finished or 0.0)
    return {"pdserve": {"timeline": asdict(last.receipt())}}


def _frames(events: Sequence[bytes]) -> bytes:
    """Of the JSON of events."""
    return b"data: " + b"\n\ndata: ".join(events) + b"\n\n" if events else b""


def _tokens(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def token_name(token_id: int, text: str, body: GenerationBody) -> str:
    """Of a token in log-probabilities."""
    return f"token_id:{token_id}" if body.return_tokens_as_token_ids else text


def logprob_of(token: SampledToken) -> float:
    return MIN_LOGPROB if token.logprobs is None else max(token.logprobs.logprob, MIN_LOGPROB)
