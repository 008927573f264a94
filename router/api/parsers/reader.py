"""A reader of text that comes in pieces; parsers are written as if the text were complete.

A parser is a generator. It reads through a `Reader`, which waits for more text by a `yield`, so the
parser does not notice where the text is cut. Text goes to a sink at once; less than a marker is
held back. Each character is read a few times at most: nothing here is quadratic, and depth is
counted, without recursion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]  # returns a T; to be continued whenever text was fed
Sink = Callable[[str], None]

ANYTHING = re.compile(r".+", re.DOTALL)
_SPACE = re.compile(r"\s+")
_NO_ESCAPE = re.compile(r'[^"\\]+')
_BETWEEN = re.compile(r"[\w\s:,.+-]+")  # between brackets and strings in JSON
_SCALAR = re.compile(r"[\w.+-]+")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # half a character


class Reader:
    """The unread text. `kept` gives back the text read since `keep`, for parsers that find out late
    that it is no call."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._kept: list[str] | None = None

    def __len__(self) -> int:
        return len(self._text) - self._at

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """Ends the text, and with it the reads that wait for more."""
        self._closed = True

    def keep(self, *before: str) -> None:
        self._kept = list(before)

    def kept(self) -> str:
        """Returns the text read since `keep` and forgets it."""
        kept, self._kept = self._kept, None
        return "".join(kept or ())

    def take(self, length: int) -> str:
        """Reads up to `length` characters."""
        taken = self._text[self._at : self._at + length]
        self._at += len(taken)
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def peek(self) -> Step[str]:
        """Returns the next character; empty at the end."""
        while not len(self) and not self._closed:
            yield
        return self._text[self._at : self._at + 1]

    def literal(self, word: str) -> Step[bool]:
        """Reads the word, or nothing; the empty word is always there."""
        while True:
            begun = self._text[self._at : self._at + len(word)]
            if begun == word:
                self.take(len(word))
                return True
            if self._closed or not word.startswith(begun):
                return False
            yield

    def copy(self, pattern: re.Pattern[str], sink: Sink) -> Step[int]:
        """Reads as far as `pattern`, a repeated class of characters, matches; returns how many."""
        total = 0
        while (yield from self.peek()) and (match := pattern.match(self._text, self._at)):
            sink(self.take(len(match[0])))
            total += len(match[0])
        return total

    def space(self) -> Step[None]:
        yield from self.copy(_SPACE, nowhere)

    def until(self, markers: str | tuple[str, ...], sink: Sink) -> Step[str]:
        """Reads up to a marker and past it; the marker is kept, with the space before it. Returns
        which one it was; empty if the text ended without any."""
        if isinstance(markers, str):
            markers = (markers,)
        plain = _plain("".join(dict.fromkeys(marker[0] for marker in markers)))
        space: list[str] = []
        while True:
            yield from self.copy(_SPACE, space.append)
            for marker in markers:
                if (yield from self.literal(marker)):
                    self.keep(*space, marker)
                    return marker
            if not (yield from self.peek()):
                sink("".join(space))
                return ""
            match = plain.match(self._text, self._at)
            assert match is not None, "there is a character"
            sink("".join([*space, self.take(len(match[0]))]))
            space.clear()

    # ---- JSON, as models write it ------------------------------------------------------------

    def value(self, sink: Sink) -> Step[bool]:
        """Reads one value; returns false if it has no end. This looks at brackets and quotes only;
        the value may still be invalid."""
        if (yield from self.peek()) == '"':
            return (yield from self._string(sink))
        depth = 0
        while True:
            char = yield from self.peek()
            if char == '"':
                if not (yield from self._string(sink)):
                    return False
            elif char in ("{", "["):
                depth += 1
                sink(self.take(1))
            elif depth == 0:
                return (yield from self.copy(_SCALAR, sink)) > 0
            elif char in ("}", "]"):
                depth -= 1
                sink(self.take(1))
                if depth == 0:
                    return True
            elif not (yield from self.copy(_BETWEEN, sink)):
                return False

    def string(self) -> Step[str | None]:
        """Reads a string; returns None if there is none, or it is broken."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        whole = yield from self._string(parts.append)
        text = decode("".join(parts)) if whole else None
        return text if isinstance(text, str) else None

    def _string(self, sink: Sink) -> Step[bool]:
        sink(self.take(1))
        while True:
            yield from self.copy(_NO_ESCAPE, sink)
            char = yield from self.peek()
            if char != "\\":
                sink(self.take(1))
                return char == '"'
            while len(self) < 2 and not self._closed:
                yield
            sink(self.take(2))


def decode(text: str) -> object:
    """Returns the value of a JSON text; None if it is invalid. Half a character becomes `?`."""
    try:
        value = json.loads(text, strict=False)
        return _whole(value) if _HALF.search(text) else value
    except (ValueError, RecursionError):
        return None


def _whole(value: object) -> object:
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return json.loads(text)


def encode(text: str) -> str:
    """Returns the text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def nowhere(text: str) -> None:
    """Drops the text; a sink."""


@cache
def _plain(first: str) -> re.Pattern[str]:
    """Returns a character, then such as begin no marker, without the space at the end; `first` has
    the characters with which markers begin."""
    return re.compile(rf".[^{re.escape(first)}]*(?<!\s)", re.DOTALL)
