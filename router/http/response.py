"""Runs generations and answers one HTTP request with them: whole, or as server-sent events.

    Pipeline.generate ─▶ Updates ─▶ AnswerWriter ─▶ JSON, or events

Each API has an `AnswerWriter`: OpenAI's completions and chat share `OpenAIWriter`, with choices of
their own (`ChoiceWriter`); `events` has the one of the other APIs.
"""

from __future__ import annotations

import asyncio
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

import msgspec
from aiohttp import web

from pdserve.common.core.errors import PdserveError
from pdserve.common.core.prompt_logprobs import PromptLogprobs
from pdserve.router.api.app_state import stopping
from pdserve.router.api.preprocess import Preprocessed
from pdserve.router.api.schema import GenerationBody
from pdserve.router.http.encoding import as_typed, error_body, json_response
from pdserve.router.http.event_stream import EventStream
from pdserve.router.http.logprobs import logprob_of
from pdserve.router.http.request import STATE
from pdserve.router.http.resume import idempotent, resumable
from pdserve.router.http.timeline import path_header, timeline_of
from pdserve.router.requests.event_ids import Drawn, EventIds
from pdserve.router.requests.generation import (
    GenerationRequest,
    GenerationStats,
    Outlet,
    Replayed,
    TextDelta,
    Turn,
    Updates,
    coalesced,
    join,
)

TURN = web.AppKey("turn", Turn)
encode = msgspec.json.Encoder().encode
MUCH = 256  # deltas of an answer, from which on a thread writes it


@dataclass(slots=True)
class Answer:
    """Everything that the generations of one request gave."""

    deltas: dict[int, list[TextDelta]] = field(default_factory=dict)  # by the choice's index
    stats: dict[int, GenerationStats] = field(default_factory=dict)  # by the prompt's index
    prompts: dict[int, PromptLogprobs] = field(default_factory=dict)  # likewise


class AnswerWriter(Protocol):
    """Writes the answer to one request in its API's format."""

    last: bytes  # ends a stream, also one that failed

    @property
    def stream(self) -> bool: ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed. A thread may call this."""

    def begin(self) -> bytes: ...

    def takes_long(self, batch: Updates) -> bool:
        """Returns whether `write` should be called by a thread."""

    def write(self, batch: Updates) -> bytes: ...

    def end(self) -> bytes: ...

    def error(self, error: PdserveError) -> bytes:
        """Returns the events that give the reason why the stream ends here."""


async def respond(
    request: web.Request,
    generations: Sequence[GenerationRequest],
    writer: AnswerWriter,
) -> web.StreamResponse:
    """Runs the generations and answers.

    Raises:
        PdserveError: they failed before anything was sent.
    """
    outlet = Outlet(request.app[TURN])
    async with aclosing(request.app[STATE].pipeline.generate(generations, outlet)) as updates:
        if writer.stream:
            return await _stream(request, updates, outlet, writer)
        answer = await _collect(generations, updates)
    num_deltas = sum(map(len, answer.deltas.values()))
    logprobs = bool(answer.prompts) or generations[0].sampling.logprobs is not None
    if logprobs or num_deltas >= MUCH:  # it may take seconds
        body = await asyncio.to_thread(writer.whole, answer)
    else:
        body = writer.whole(answer)
    stats = answer.stats.values()
    return json_response(body | timeline_of(stats), headers=path_header(stats))


async def _collect(
    generations: Sequence[GenerationRequest], updates: AsyncGenerator[Updates, None]
) -> Answer:
    answer = Answer()
    async for batch in updates:
        for prompt, update in batch:
            if isinstance(update, GenerationStats):
                answer.stats[prompt] = update
            elif isinstance(update, PromptLogprobs):
                answer.prompts[prompt] = update
            elif isinstance(update, TextDelta):
                index = prompt * generations[prompt].n + update.choice
                answer.deltas.setdefault(index, []).append(update)
    return answer


async def _stream(
    request: web.Request,
    updates: AsyncGenerator[Updates, None],
    outlet: Outlet,
    writer: AnswerWriter,
) -> web.StreamResponse:
    """Begins the response when the first update is there, or has not come for long: until then an
    error has its own HTTP status."""
    opened = False
    with EventStream(request) as stream:
        try:
            first = await anext(updates)
            await stream.begin()
            opened = True
            await stream.send(writer.begin() + await _written(writer, first))
            outlet.write = partial(_write_now, stream, writer)
            async for batch in updates:
                await stream.send(await _written(writer, batch))
            await stream.send(writer.end())
        except asyncio.CancelledError:
            gone = request.transport is None or request.transport.is_closing()
            if gone or not stream.begun:
                raise
            await stream.send(writer.error(stopping()))  # the client is there: this server stops
        except ConnectionError:  # the client is gone
            raise
        except Exception as error:
            if not stream.begun:
                raise
            opening = b"" if opened else writer.begin()
            await stream.send(opening + writer.error(as_typed(error)))
    await stream.end(writer.last)
    return stream.response


async def _written(writer: AnswerWriter, batch: Updates) -> bytes:
    if writer.takes_long(batch):
        return await asyncio.to_thread(writer.write, batch)
    return writer.write(batch)


def _write_now(stream: EventStream, writer: AnswerWriter, batch: Updates) -> bool:
    """Writes as the task of `_stream` would, if that did not have to wait."""
    if not stream.keeps_up or writer.takes_long(batch):
        return False
    stream.send_now(writer.write(batch))
    return True


# ---- OpenAI's completions and chat -----------------------------------------------------------


class ChoiceWriter(Protocol):
    """Writes the choices of one request."""

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    beside: dict[str, Any]  # fields beside the choices of an answer, or of a stream's first chunk

    scored: dict[int, PromptLogprobs]
    """The prompt's log-probabilities that a choice has still to show, by the choice's index."""

    def choice(self, index: int, whole: TextDelta) -> dict[str, Any]:
        """Returns a complete choice; `whole` has all of its text and tokens."""

    def chunks(self, index: int, delta: TextDelta) -> Sequence[dict[str, Any]]:
        """Returns the choices of the chunks for one delta, one for each chunk."""

    def usage(self) -> dict[str, Any]:
        """Returns what the usage of an answer has beside the counts of its tokens."""


@dataclass
class OpenAIWriter:
    """Writes completions and chat; a chunk has one choice."""

    id: str
    model: str
    body: GenerationBody
    choices: ChoiceWriter
    generations: Sequence[GenerationRequest]
    best: int | None = None  # choices of each prompt to answer, the best ones; None: all
    created: int = field(default_factory=lambda: int(time.time()))
    last: bytes = b"data: [DONE]\n\n"
    num_tokens: int = 0  # streamed so far
    stats: dict[int, GenerationStats] = field(default_factory=dict)
    ids: EventIds | None = None  # of a stream's events, if they have some

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    async def resumable(
        self, request: web.Request, asked: Preprocessed[Any]
    ) -> Sequence[GenerationRequest]:
        """Returns the generations, which go on where the client is if the body resumes a stream,
        and are made once if the request has an Idempotency-Key. Raises as `resume.resumable` and
        `resume.idempotent`."""
        prefix = self.id.partition("-")[0]
        if (keyed := idempotent(request, asked, self.generations, prefix)) is not None:
            self.id, self.generations = keyed
        seeds = [each.sampling.seed for each in self.generations]
        drawn = Drawn(self.id, self.created, seeds)
        if (found := await resumable(request, asked, self.generations, drawn)) is None:
            return self.generations
        self.ids, self.id, self.created = found.ids, found.drawn.id, found.drawn.created
        return found.generations

    @cached_property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.body.stream_options
        return bool(options and options.include_usage)

    @cached_property
    def continuous_usage(self) -> bool:
        options = self.body.stream_options
        return bool(options and options.continuous_usage_stats and self.include_usage)

    def whole(self, answer: Answer) -> dict[str, Any]:
        for prompt, found in answer.prompts.items():
            self._scored(prompt, found)
        deltas = answer.deltas if self.best is None else self._best(answer.deltas, self.best)
        choice = self.choices.choice
        # Each choice as JSON at once: their objects are much larger.
        choices = [msgspec.Raw(encode(choice(i, join(deltas.pop(i))))) for i in sorted(deltas)]
        body = self._envelope(self.choices.object_name) | {"choices": choices}
        usage = _usage(answer.stats) | self.choices.usage()
        return body | {"usage": usage} | self.choices.beside

    def _best(self, deltas: dict[int, list[TextDelta]], n: int) -> dict[int, list[TextDelta]]:
        """Returns the `n` choices of each prompt with the most likely tokens, the best first."""

        def likelihood(index: int) -> float:
            tokens = [logprob_of(token) for delta in deltas[index] for token in delta.tokens]
            return sum(tokens) / max(1, len(tokens))

        best: dict[int, list[TextDelta]] = {}
        for prompt, generation in enumerate(self.generations):
            indices = range(prompt * generation.n, (prompt + 1) * generation.n)
            ranked = sorted(indices, key=likelihood, reverse=True)
            best |= {prompt * n + place: deltas[i] for place, i in enumerate(ranked[:n])}
        return best

    # ---- as a stream -------------------------------------------------------------------------

    def begin(self) -> bytes:
        return b""

    def takes_long(self, batch: Updates) -> bool:
        """Returns True for prompts' log-probabilities, which may be hundreds of thousands."""
        for _, update in batch:
            if isinstance(update, PromptLogprobs):
                return True
        return bool(self.choices.scored)

    def write(self, batch: Updates) -> bytes:
        events: list[bytes] = []
        for prompt, update in coalesced(batch):
            if isinstance(update, TextDelta):
                made = self._events(prompt, update)
                if self.ids is not None:
                    self._with_id(self.ids, prompt, update, made)
                events += made
            elif isinstance(update, GenerationStats):
                self.stats[prompt] = update
            elif isinstance(update, PromptLogprobs):
                self._scored(prompt, update)
            elif isinstance(update, Replayed):
                self._events(prompt, update.delta)  # the client has these
        return b"".join(events)

    def _events(self, prompt: int, delta: TextDelta) -> list[bytes]:
        self.num_tokens += len(delta.tokens)
        index = prompt * self.generations[prompt].n + delta.choice
        choices = self.choices.chunks(index, delta)
        return [self._head + encode(choice) + self._tail() for choice in choices]

    def _with_id(self, ids: EventIds, prompt: int, delta: TextDelta, events: list[bytes]) -> None:
        """Adds the id to the last event of a delta; it stands for all of them."""
        ids.add(prompt, delta)
        if events:
            events[-1] = b"%bid: %b\n\n" % (events[-1][:-1], urlsafe_b64encode(ids.next()))

    def end(self) -> bytes:
        more = timeline_of(self.stats.values())
        if not (self.include_usage or more):
            return b""
        last = self._envelope(self.choices.chunk_object_name)
        usage = _usage(self.stats) | self.choices.usage()
        return _event(encode(last | {"choices": [], "usage": usage} | more))

    def error(self, error: PdserveError) -> bytes:
        return _event(encode(error_body(error)))

    @cached_property
    def _head(self) -> bytes:
        """An event of a chunk up to its choice, which is the same for all chunks."""
        envelope = encode(self._envelope(self.choices.chunk_object_name))
        return b"data: " + envelope.removesuffix(b"}") + b',"choices":['

    @cached_property
    def _usual_tail(self) -> bytes:
        return b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def _tail(self) -> bytes:
        """Returns the next event behind its choice, which is mostly the same."""
        if not (self.choices.beside or self.continuous_usage):
            return self._usual_tail
        rest, self.choices.beside = self.choices.beside, {}
        if self.continuous_usage:
            prompt = sum(len(each.prompt_token_ids) for each in self.generations)
            rest["usage"] = _tokens(prompt, self.num_tokens)
        elif self.include_usage:
            rest["usage"] = None
        return b"]," + encode(rest)[1:] + b"\n\n"

    def _scored(self, prompt: int, found: PromptLogprobs) -> None:
        n = self.best or self.generations[prompt].n
        self.choices.scored |= dict.fromkeys(range(prompt * n, (prompt + 1) * n), found)

    def _envelope(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _usage(stats: dict[int, GenerationStats]) -> dict[str, Any]:
    """Sums over the prompts; a prompt counts once, however many choices share it."""
    prompt = sum(each.prompt_tokens for each in stats.values())
    completion = sum(each.completion_tokens for each in stats.values())
    cached = sum(each.cached_tokens for each in stats.values())
    return _tokens(prompt, completion) | {"prompt_tokens_details": {"cached_tokens": cached}}


def _tokens(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
