"""A chat's answer in another API's format: whole, or as events that name their type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from aiohttp import web

from pdserve.common.core.errors import PdserveError
from pdserve.router.api.chat import ChatRequest
from pdserve.router.api.parsers.parser import Event
from pdserve.router.http.response import Answer, encode, respond
from pdserve.router.http.timeline import timeline_of
from pdserve.router.requests.generation import (
    GenerationStats,
    TextDelta,
    Updates,
    coalesced,
    join,
)

ServerEvent = dict[str, Any]  # "type" is its name


class ResponseFormat(Protocol):
    """Writes one answer in an API's format. It gathers the answer from the events on the way."""

    def begin(self) -> Iterable[ServerEvent]: ...

    def event(self, event: Event) -> Iterable[ServerEvent]: ...

    def finish(self, reason: str, stop_reason: str | int | None) -> Iterable[ServerEvent]:
        """Ends the choice; both reasons are in chat's words."""

    def end(self, stats: GenerationStats) -> Iterable[ServerEvent]: ...

    def error(self, error: PdserveError) -> Iterable[ServerEvent]: ...

    def whole(self, stats: GenerationStats) -> dict[str, Any]:
        """Returns the gathered answer, as the body of a response that is not streamed."""


async def respond_as(
    request: web.Request, chat: ChatRequest, format: ResponseFormat
) -> web.StreamResponse:
    """Raises PdserveError: it failed before anything was sent."""
    return await respond(request, [chat.generation], EventWriter(chat, format))


class EventWriter:
    """An `AnswerWriter` for a `ResponseFormat`."""

    last = b""

    def __init__(self, chat: ChatRequest, format: ResponseFormat) -> None:
        self.stream = bool(chat.body.stream)
        self._choices = chat.choices
        self._format = format
        self._stats: GenerationStats | None = None

    def whole(self, answer: Answer) -> dict[str, Any]:
        for _ in self._parse(join(answer.deltas[0])):
            pass  # the format has gathered it
        return self._format.whole(answer.stats[0])

    def begin(self) -> bytes:
        return _encoded(self._format.begin())

    def takes_long(self, batch: Updates) -> bool:
        return False

    def write(self, batch: Updates) -> bytes:
        sent = b""
        for _, update in coalesced(batch):
            if isinstance(update, GenerationStats):
                self._stats = update
            elif isinstance(update, TextDelta):
                sent += _encoded(self._parse(update))
        return sent

    def end(self) -> bytes:
        assert self._stats is not None, "a generation's last update"
        *events, last = self._format.end(self._stats)
        return _encoded([*events, last | timeline_of([self._stats])])

    def error(self, error: PdserveError) -> bytes:
        return _encoded(self._format.error(error))

    def _parse(self, delta: TextDelta) -> Iterator[ServerEvent]:
        events, reason = self._choices.parse(delta)
        for event in events:
            yield from self._format.event(event)
        if reason:
            yield from self._format.finish(reason, delta.stop_reason)


def _encoded(events: Iterable[ServerEvent]) -> bytes:
    """Encodes each event before the next one is made: they share objects that grow."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (each["type"].encode(), encode(each)) for each in events
    )
