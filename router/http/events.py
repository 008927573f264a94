"""A chat's answer in the words of another API: whole, or as events that name their type. An API
says only how its answers look (`Shape`); what is in one, text, thought or calls, is chat's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from aiohttp import web

from pdserve.common.core.errors import PdserveError
from pdserve.router.http.chat import ChatRequest
from pdserve.router.http.encoding import json_response, made
from pdserve.router.http.request import SERVING
from pdserve.router.http.response import extension
from pdserve.router.http.stream import News, respond_stream, unfinished
from pdserve.router.requests.generation import GenerationStats, TextDelta, coalesced, join, merge

Event = dict[str, Any]  # "type" is its name


class Shape(Protocol):
    """One object per request."""

    def whole(self, choice: dict[str, Any], stats: GenerationStats) -> dict[str, Any]:
        """The answer, of a choice as chat words it."""

    def begin(self) -> Iterable[Event]: ...

    def chunk(self, choice: dict[str, Any]) -> Iterable[Event]:
        """Of a choice in one of chat's chunks."""

    def end(self, stats: GenerationStats) -> Iterable[Event]: ...

    def failed(self, error: PdserveError) -> Iterable[Event]: ...


async def respond(request: web.Request, asked: ChatRequest, shape: Shape) -> web.StreamResponse:
    """Raises PdserveError: it failed before anything was sent."""
    generation = request.app[SERVING].pipeline.generate(asked.generation)
    async with aclosing(merge([generation])) as updates:
        if asked.body.stream:
            return await respond_stream(request, updates, _Frames(asked, shape))
        return await _respond_whole(asked, shape, updates)


async def _respond_whole(
    asked: ChatRequest, shape: Shape, updates: AsyncGenerator[News, None]
) -> web.Response:
    deltas: list[TextDelta] = []
    stats: GenerationStats | None = None
    async for batch in updates:
        for _, update in batch:
            if isinstance(update, GenerationStats):
                stats = update
            elif isinstance(update, TextDelta):
                deltas.append(update)
    if stats is None:
        raise unfinished()
    last = stats
    whole = await made(
        len(deltas), lambda: shape.whole(asked.choices.choice(0, join(deltas)), last)
    )
    return json_response(whole | extension([stats]))


class _Frames:
    last = b""

    def __init__(self, asked: ChatRequest, shape: Shape) -> None:
        self._choices = asked.choices
        self._shape = shape
        self._stats: GenerationStats | None = None

    def begin(self) -> bytes:
        return _frames(self._shape.begin())

    async def told(self, news: News) -> bytes:
        events: list[Event] = []
        for _, update in coalesced(news):
            if isinstance(update, GenerationStats):
                self._stats = update
            elif isinstance(update, TextDelta):
                for choice in self._choices.chunks(0, update):
                    events += self._shape.chunk(choice)
        return _frames(events)

    def end(self) -> bytes:
        if self._stats is None:
            raise unfinished()
        *events, last = self._shape.end(self._stats)
        return _frames([*events, last | extension([self._stats])])

    def failed(self, error: PdserveError) -> bytes:
        return _frames(self._shape.failed(error))


def _frames(events: Iterable[Event]) -> bytes:
    return b"".join(map(_frame, events))


def _frame(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
