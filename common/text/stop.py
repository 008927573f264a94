"""Finds stop strings in text that arrives in pieces, and never leaks a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be handed out, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Holds back the longest end of the text that could begin a stop string.

    Of several stop strings the one that is complete first wins (of two complete at once, the
    longer), so the outcome does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`stops` are not empty strings; `include_stop` hands the stop string out too."""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> StopResult:
        """Takes the next piece. While not `armed`, stop strings that become complete are
        ordinary text."""
        text = self._held + text
        if armed and (match := self._first_match(text)) is not None:
            start, stop = match
            self._held = ""
            return StopResult(text[: start + len(stop) * self._include_stop], stop)
        held = self._held_back(text)
        self._held = text[len(text) - held :]
        return StopResult(text[: len(text) - held])

    def flush(self) -> str:
        """The text held back, when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _held_back(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
