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
from pdserve.common.core.sampling import SampledToken
from pdserve.router.generation import (
    GenerationRequest,
    GenerationStats,
    TextDelta,
    Updates,
    coalesced,
    join,
    merge,
)
from pdserve.router.http.encoding import EventStream, as_typed, error_body, json_response, stopping
from pdserve.router.http.request import SERVING
from pdserve.router.http.schema import GenerationBody

TIMELINE_HEADER = "X-Pdserve-Timeline"
_encode = msgspec.json.Encoder().encode
MIN_LOGPROB = -9999.0  # JSON has no -Infinity

News = Updates[TextDelta | GenerationStats]  # (prompt's index, what is new of it)


class ChoiceBuilder(Protocol):
    """The shape of an endpoint's choices. One object per request; it may remember choices."""

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

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
    model: str = ""
    include_timeline: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    stats: dict[int, GenerationStats] = field(default_factory=dict)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Runs the generations and answers.

        Raises:
            PdserveError: they failed before anything was sent.
        """
        serving = request.app[SERVING]
        self.model = serving.model.name
        self.include_timeline = request.headers.get(TIMELINE_HEADER) == "1"
        async with aclosing(
            merge([serving.pipeline.generate(one) for one in self.requests])
        ) as updates:
            if self.body.stream:
                return await self._respond_stream(request, updates)
            return await self._respond_whole(updates)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.body.stream_options
        return bool(options and options.include_usage)

    async def _respond_whole(self, updates: AsyncGenerator[News, None]) -> web.Response:
        deltas: dict[int, list[TextDelta]] = {}
        async for batch in updates:
            for prompt, update in batch:
                if isinstance(update, GenerationStats):
                    self.stats[prompt] = update
                else:
                    deltas.setdefault(self._index(prompt, update), []).append(update)
        body = self._envelope(self.choices.object_name)
        body["choices"] = [await self._choice(i, deltas.pop(i)) for i in sorted(deltas)]
        return json_response(body | {"usage": self._usage()} | self._extension())

    async def _choice(self, index: int, deltas: Sequence[TextDelta]) -> msgspec.Raw:
        """The JSON of a whole choice. Of log-probabilities there may be a million, which takes
        seconds: a thread encodes them."""

        def encode() -> msgspec.Raw:
            return msgspec.Raw(msgspec.json.encode(self.choices.choice(index, join(deltas))))

        if any(token.logprobs for delta in deltas for token in delta.tokens[:1]):
            return await asyncio.to_thread(encode)
        return encode()

    async def _respond_stream(
        self, request: web.Request, updates: AsyncGenerator[News, None]
    ) -> web.StreamResponse:
        # Until the first token there is no response yet, so an error still has its own status.
        first = await anext(updates, None)
        if first is None:
            raise _unfinished()
        stream = EventStream(request)
        await stream.open()
        try:
            async with aclosing(self._events(first, updates)) as batches:
                async for events in batches:
                    await stream.send(events)
        except asyncio.CancelledError:
            if not stream.connected:
                raise
            await stream.send([_encode(error_body(stopping()))])  # it is this server that goes
        return await stream.close()

    async def _events(
        self, first: News, updates: AsyncGenerator[News, None]
    ) -> AsyncGenerator[list[bytes], None]:
        """The JSON of all events but [DONE], those together that come together; an error is the
        last one."""
        try:
            yield self._chunks(first)
            async for batch in updates:
                yield self._chunks(batch)
            usage = self._usage()
            if self.include_usage or self.include_timeline:
                head = self._envelope(self.choices.chunk_object_name)
                yield [_encode(head | {"choices": [], "usage": usage} | self._extension())]
        except Exception as error:
            yield [_encode(error_body(as_typed(error)))]

    def _chunks(self, batch: News) -> list[bytes]:
        chunks = []
        for prompt, update in coalesced(batch):
            if isinstance(update, GenerationStats):
                self.stats[prompt] = update
                continue
            for choice in self.choices.chunks(self._index(prompt, update), update):
                chunks.append(b"%b%b%b" % (self._chunk_head, _encode(choice), self._chunk_tail))
        return chunks

    @cached_property
    def _chunk_head(self) -> bytes:
        """The JSON of a chunk up to its one choice: it is the same in all of them."""
        envelope = _encode(self._envelope(self.choices.chunk_object_name))
        return envelope.removesuffix(b"}") + b',"choices":['

    @cached_property
    def _chunk_tail(self) -> bytes:
        return b'],"usage":null}' if self.include_usage else b"]}"

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
            raise _unfinished()
        prompt = sum(stats.prompt_tokens for stats in self.stats.values())
        completion = sum(stats.completion_tokens for stats in self.stats.values())
        cached = sum(stats.cached_tokens for stats in self.stats.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _extension(self) -> dict[str, Any]:
        """Our own key, for clients that ask with `X-Pdserve-Timeline: 1`: when things happened
        to the (first) prompt."""
        if not self.include_timeline:
            return {}
        return {"pdserve": {"timeline": asdict(self.stats[0].timeline)}}


def logprob_of(token: SampledToken) -> float:
    return MIN_LOGPROB if token.logprobs is None else max(token.logprobs.logprob, MIN_LOGPROB)


def _unfinished() -> PdserveError:
    return PdserveError("the generation ended without a result")
