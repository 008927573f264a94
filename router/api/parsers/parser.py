"""The events of an answer, and the base of all parsers: text goes in by pieces, events come out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdserve.router.api.parsers.reader import ANYTHING, Reader, Step


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class Reasoning:
    text: str


@dataclass(slots=True)
class CallStart:
    index: int  # the call's, in the message
    id: str
    name: str


@dataclass(slots=True)
class CallArguments:
    """More of a call's arguments, which are JSON."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Parser:
    """Parses one answer. A format is a subclass with `parse`."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.events: list[Event] = []  # that the next `push` or `finish` returns
        self._running = self._run()

    def push(self, text: str) -> list[Event]:
        """Takes the next text. All events together do not depend on how the text is cut."""
        self.reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Ends the text."""
        self.reader.close()
        return self._advance()

    def _advance(self) -> list[Event]:
        self.events = []
        next(self._running, None)
        return list(_joined(self.events))

    def _run(self) -> Iterator[None]:
        yield from self.parse()
        yield from self.reader.copy(ANYTHING, self.content)

    def parse(self) -> Step[None]:
        """Reads from `self.reader` and appends events, as `content` does; unread text becomes
        content."""
        raise NotImplementedError

    def content(self, text: str) -> None:
        self.events.append(Content(text))


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Joins neighbouring events of one kind and drops empty ones."""
    last: Content | Reasoning | CallArguments | None = None
    parts: list[str] = []
    for event in events:
        if not isinstance(event, CallStart) and _alike(event, last):
            parts.append(event.text)
            continue
        if last is not None and (text := "".join(parts)):
            last.text = text
            yield last
        if isinstance(event, CallStart):
            last = None
            yield event
        else:
            last, parts = event, [event.text]
    if last is not None and (text := "".join(parts)):
        last.text = text
        yield last


def _alike(event: Event, last: Event | None) -> bool:
    same_call = getattr(event, "index", None) == getattr(last, "index", None)
    return type(event) is type(last) and same_call
