"""A chat's answer in the words of another API: whole, or as events that name their type. An API
says only how its answers look (`Shape`); what is in one, text, thought or calls, is chat's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from aiohttp import web

from pdserve.common.core.errors import PdserveError
from pdserve.router.generation import GenerationStats, TextDelta, coalesced, join, merge
from pdserve.router.http.chat import ChatRequest
from pdserve.router.http.encoding import EventStream, as_typed, json_response, stopping
from pdserve.router.http.request import SERVING
from pdserve.router.http.response import News, unfinished

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
            return await _respond_stream(request, asked, shape, updates)
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
    return json_response(shape.whole(asked.choices.choice(0, join(deltas)), stats))


async def _respond_stream(
    request: web.Request, asked: ChatRequest, shape: Shape, updates: AsyncGenerator[News, None]
) -> web.StreamResponse:
    # Until the first token there is no response yet, so an error still has its own status.
    first = await anext(updates, None)
    if first is None:
        raise unfinished()
    stream = EventStream(request)
    await stream.open()
    try:
        async with aclosing(_events(asked, shape, first, updates)) as batches:
            async for events in batches:
                await stream.write(b"".join(map(_frame, events)))
    except asyncio.CancelledError:
        if not stream.connected:
            raise
        await stream.write(b"".join(map(_frame, shape.failed(stopping()))))
    return await stream.close(b"")


async def _events(
    asked: ChatRequest, shape: Shape, first: News, updates: AsyncGenerator[News, None]
) -> AsyncGenerator[Sequence[Event], None]:
    stats: GenerationStats | None = None

    def told(batch: News) -> list[Event]:
        nonlocal stats
        events: list[Event] = []
        for _, update in coalesced(batch):
            if isinstance(update, GenerationStats):
                stats = update
            elif isinstance(update, TextDelta):
                for choice in asked.choices.chunks(0, update):
                    events += shape.chunk(choice)
        return events

    try:
        yield [*shape.begin(), *told(first)]
        async for batch in updates:
            yield told(batch)
        if stats is None:
            raise unfinished()
        yield list(shape.end(stats))
    except Exception as error:
        yield list(shape.failed(as_typed(error)))


def _frame(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
